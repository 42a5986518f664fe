"""The three modes: what has to change for an image to be made again."""

from __future__ import annotations

import pytest

from prorld.errors import SandboxError
from prorld.sandbox.images.modes import copied_files, definition_key, key_of, reference_key

DEFINITION = """\
Bootstrap: docker
From: python:{base}

%labels
    Author nobody
    Env-Version {version}

%files
    requirements.txt /requirements.txt
    data/*.csv /data/
    # comment.txt /

%files from other
    host.txt /

%post
    pip install {package}
"""


@pytest.fixture
def directory(place):
    (place / "data").mkdir()
    (place / "data" / "one.csv").write_text("1")
    (place / "requirements.txt").write_text("numpy")
    (place / "poetry.lock").write_text("numpy 1")
    return place


def key(directory, mode, *, base="3.12", version="1", package="numpy", arguments=None, machine="x86_64"):
    definition = directory / "env.def"
    definition.write_text(DEFINITION.format(base=base, version=version, package=package))
    return definition_key(
        definition, mode, arguments=arguments or {}, lock_files=[directory / "poetry.lock"], extra=machine,
        tick=lambda _: None,
    )  # fmt: skip


def test_scratch_is_always_made_again(directory):
    """There is no key to find anything by."""
    assert key(directory, "scratch") is None
    assert reference_key("docker://python:3.12", "scratch", "x86_64") is None


@pytest.mark.parametrize(
    "changed", [{"base": "3.13"}, {"version": "2"}, {"arguments": {"A": "1"}}, {"machine": "aarch64"}]
)
@pytest.mark.parametrize("mode", ["versioned", "lock"])
def test_another_version_is_another_image(directory, mode, changed):
    """The base, the labels of versions, the arguments and the kind of machine count in both modes."""
    assert key(directory, mode) == key(directory, mode)
    assert key(directory, mode) != key(directory, mode, **changed)


def test_a_change_of_scripts_counts_for_lock_alone(directory):
    """Who says `versioned` says it by the version."""
    assert key(directory, "versioned") == key(directory, "versioned", package="scipy")
    assert key(directory, "lock") != key(directory, "lock", package="scipy")


def test_another_definition_of_one_version_is_another_image(directory):
    """Many tasks have definitions of their own on one base, with one label and even one file name."""
    keys = set()
    for task, package in (("one", "numpy"), ("two", "scipy")):
        (directory / task).mkdir()
        file = directory / task / "Apptainer"
        file.write_text(DEFINITION.format(base="3.12", version="1", package=package))
        keys.add(definition_key(file, "versioned", arguments={}, lock_files=[], extra="", tick=lambda _: None))
    assert len(keys) == 2


@pytest.mark.parametrize("name", ["requirements.txt", "data/one.csv", "data/two.csv", "poetry.lock"])
def test_copied_files_and_lock_files_count_for_lock_alone(directory, name):
    """Each by its content, those of a wildcard too, and one more among them."""
    before = {mode: key(directory, mode) for mode in ("versioned", "lock")}
    (directory / name).write_text("other")
    assert key(directory, "versioned") == before["versioned"]
    assert key(directory, "lock") != before["lock"]


def test_only_files_of_the_host_are_counted(directory):
    """Comments are none, and what comes from another stage is not on the host."""
    found = copied_files(DEFINITION, directory)
    assert found == [directory / "requirements.txt", directory / "data" / "one.csv"]


def test_a_later_stage_counts_as_a_version(directory):
    """Each stage has a base of its own."""
    one = "Bootstrap: docker\nFrom: a:1\nStage: first\n%post\n  true\nBootstrap: docker\nFrom: b:1\n%post\n  true\n"
    keys = set()
    for text in (one, one.replace("b:1", "b:2"), one.replace("true", "false")):
        (directory / "env.def").write_text(text)
        keys.add(
            definition_key(
                directory / "env.def", "versioned", arguments={}, lock_files=[], extra="", tick=lambda _: None
            )
        )
    assert len(keys) == 2


def test_a_reference_is_locked_by_a_digest_alone():
    """A tag may move; a digest does not."""
    pinned = "docker://python@sha256:" + "0" * 64
    assert reference_key("docker://python:3.12", "lock", "x86_64") is None
    assert reference_key(pinned, "lock", "x86_64") == reference_key(pinned, "lock", "x86_64") is not None
    assert reference_key("docker://python:3.12", "versioned", "x86_64") is not None
    assert reference_key("docker://python:3.12", "versioned", "x86_64") != reference_key(
        "docker://python:3.12", "versioned", "aarch64"
    )


def test_parts_of_a_key_are_kept_apart():
    """What moves from one part to its neighbour changes the key."""
    assert key_of("ab", "c") != key_of("a", "bc")
    assert key_of("a", "") != key_of("a")


def test_a_definition_that_is_no_text_is_refused(directory):
    """With a code that says whose fault it is."""
    (directory / "env.def").write_bytes(b"\xff\xfe")
    (directory / "large.def").write_bytes(b"a" * (1 << 20) + b"a")
    for name, words in (("env.def", "it is no text"), ("large.def", "too large"), ("none.def", "can't be read")):
        with pytest.raises(SandboxError, match=words) as caught:
            definition_key(directory / name, "lock", arguments={}, lock_files=[], extra="", tick=lambda _: None)
        assert caught.value.stable_code == "bad_definition"
