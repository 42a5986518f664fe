"""``prorld image``: a store is filled, shown and cleaned; trouble is one line; a signal leaves nothing behind."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from prorld.cli import image
from prorld.cli.exits import Exit
from prorld.cli.image_progress import StepLines, sized
from prorld.cli.main import build_parser, main
from prorld.cli.parser import parsed
from prorld.kit.lanes import Lane
from prorld.sandbox.images.records import Mode
from prorld.sandbox.tiny_image import make_tiny_image
from tests.sandbox.images.support import StandIn, fake_sif, small_tree
from tests.sandbox.support import gone


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that the user of the sandboxes can pass through; the state directory is in it."""
    with tempfile.TemporaryDirectory(prefix="prorld-image-") as name:
        Path(name).chmod(0o755)
        monkeypatch.setenv("PRORLD_STATE", f"{name}/state")
        yield Path(name)


@pytest.fixture
def stand_in(place: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A program in Apptainer's place, as the configuration names it."""
    made = StandIn(place / "tool")
    monkeypatch.setenv("PRORLD__SANDBOX__APPTAINER", made.path)
    return made


def test_a_directory_goes_in_is_shown_and_goes_out(place, capsys):
    """Each action in words and as JSON; the store is that of the state directory."""
    tree = small_tree(place / "tree")
    assert main(["image", "pull", str(tree), "--name", "small"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("small is there now: directory, ")
    assert shown.err.splitlines()[0] == f"copying {tree}"
    assert main(["image", "pull", str(tree), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["name"], made["reused"]) == ("tree", True)
    assert main(["image"]) == 0
    [head, row] = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "DIGEST", "KIND", "SIZE", "USED", "STATE"]
    assert row.startswith(f"small, tree  {made['record']['digest'][:19]}  directory")
    assert main(["image", "inspect", "small", "--verify", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["intact"], found["contents"]["programs"]) == (True, {"bash": "/bin/bash"})
    assert found["path"].startswith(str(place / "state" / "images"))
    assert main(["image", "inspect", "small"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "misses   python3" in lines
    assert "in use   no" in lines
    assert main(["image", "rm", "tree", "small"]) == 0
    assert capsys.readouterr().out == "tree: this name is gone; the image has others\nsmall: removed\n"
    assert main(["image", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_the_store_can_be_another(place, capsys):
    """By a flag, which wins over the configuration."""
    main(["image", "pull", str(small_tree(place / "tree")), "--images-dir", str(place / "other")])
    capsys.readouterr()
    main(["image", "list", "--json"])
    assert json.loads(capsys.readouterr().out) == []
    main(["image", "list", "--json", "--images-dir", str(place / "other")])
    assert [item["names"] for item in json.loads(capsys.readouterr().out)] == [["tree"]]


def test_content_that_was_changed_is_told(place, capsys):
    """With exit code 1."""
    main(["image", "pull", str(small_tree(place / "tree")), "--json"])
    record = json.loads(capsys.readouterr().out)["record"]
    [root] = (place / "state" / "images" / "images").glob("*/root")
    assert root.parent.name == record["digest"].removeprefix("sha256:")
    (root / "data" / "one").write_text("changed")
    assert main(["image", "inspect", "tree", "--verify"]) == Exit.FAILED
    assert "content  NOT what was stored" in capsys.readouterr().out.splitlines()


def test_a_sif_file_is_unpacked_to_be_looked_into(place, stand_in, capsys):
    """Where it can't be, the rest is told, and why."""
    main(["image", "pull", str(fake_sif(place / "env.sif"))])
    stand_in.order("echo 'FATAL:   no room' >&2; exit 255")
    capsys.readouterr()
    assert main(["image", "inspect", "env"]) == 0
    assert "no room" in next(line for line in capsys.readouterr().out.splitlines() if line.startswith("contents"))
    stand_in.order("")
    assert main(["image", "inspect", "env"]) == 0
    assert "env      COLOUR=red" in capsys.readouterr().out.splitlines()
    main(["image"])
    assert capsys.readouterr().out.splitlines()[1].endswith("unpacked")


def test_garbage_is_what_has_no_name_or_is_too_much(place, capsys):
    """A dry run only tells."""
    main(["image", "pull", str(small_tree(place / "one", "one")), "--name", "a"])
    main(["image", "pull", str(small_tree(place / "two", "two")), "--name", "a"])
    capsys.readouterr()
    assert main(["image", "gc", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 image would be removed, ")
    assert main(["image", "gc"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 image removed, ")
    assert main(["image", "gc", "--keep", "0", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["removed"]) == 1


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["inspect", "none"], Exit.FAILED, "there is no image 'none'"),
        (["rm", "none"], Exit.FAILED, "there is no image 'none'"),
        (["pull", "ftp://host/x"], Exit.USAGE, "unknown kind of reference"),
        (["pull", "/no/such/place"], Exit.FAILED, "there is no image at"),
        (["build", "/no/such/place"], Exit.USAGE, "is not there"),
        (["rootfs", "../up"], Exit.USAGE, "can't be called"),
        (["rootfs", "small", "--", "-oDir=/"], Exit.FAILED, "is no name of a package"),
    ],
)
def test_what_goes_wrong_is_one_line(place, capsys, words, code, said):
    """And an exit code that scripts can tell apart; with ``--json`` it is JSON."""
    assert main(["image", *words]) == code
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("prorld: ")
    assert said in line
    assert main(["image", words[0], "--json", *words[1:]]) == code
    assert said in json.loads(capsys.readouterr().err)["error"]["message"]


@pytest.mark.parametrize("words", [["pull", "docker://python:3"], ["build", "{place}/env.def"]])
def test_without_apptainer_the_cure_is_told(place, capsys, monkeypatch, words):
    """Nothing is on PATH and nothing is installed beside this environment."""
    monkeypatch.setenv("PATH", str(place))
    monkeypatch.delenv("PRORLD_APPTAINER", raising=False)
    monkeypatch.setattr(sys, "prefix", str(place / "none" / ".venv"))
    (place / "env.def").write_text("Bootstrap: docker\nFrom: python:3\n")
    assert main(["image", *(word.format(place=place) for word in words)]) == Exit.FAILED
    assert "run `scripts/apptainer`" in capsys.readouterr().err.splitlines()[-1]


def test_without_apt_the_reason_is_told(place, capsys, monkeypatch):
    """An image of packages is made on Debian alone."""
    monkeypatch.setenv("PATH", str(place))
    assert main(["image", "rootfs", "small"]) == Exit.FAILED
    assert "there is no apt-get and dpkg-deb" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_of_it_and_leaves_nothing(place, stand_in, number):
    """Apptainer has gone, what it had made has gone, and the exit code says so."""
    main(["image", "pull", str(fake_sif(place / "env.sif"))])
    stand_in.stop_there()
    argv = [sys.executable, "-m", "prorld.cli", "image", "inspect", "env"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 30
        while stand_in.pid() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    assert process.returncode == Exit.INTERRUPTED
    assert b"Traceback" not in said
    assert trio.run(gone, {stand_in.pid()})
    assert [*(place / "state" / "images" / "staging").iterdir()] == []


@pytest.mark.slow
def test_what_a_killed_command_leaves_goes_with_the_next_gc(place, stand_in, capsys):
    """Apptainer ends with whoever started it, however that ended; a second unpacking is not held up."""
    main(["image", "pull", str(fake_sif(place / "env.sif"))])
    stand_in.stop_there()
    with subprocess.Popen([sys.executable, "-m", "prorld.cli", "image", "inspect", "env"]) as process:
        deadline = time.monotonic() + 30
        while stand_in.pid() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
    assert trio.run(gone, {stand_in.pid()})
    capsys.readouterr()
    assert main(["image", "gc"]) == 0
    assert capsys.readouterr().out == "0 images removed, 0 B, and 1 leftover\n"
    assert [*(place / "state" / "images" / "staging").iterdir()] == []
    stand_in.order("")
    assert main(["image", "inspect", "env"]) == 0
    assert "env      COLOUR=red" in capsys.readouterr().out.splitlines()


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_moves_on_a_terminal_and_is_plain_elsewhere(monkeypatch):
    """No control characters in a pipe; none of what a program said reach a terminal."""
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        lines = StepLines(stream)
        lines.step("pulling x")
        now += 1
        lines.said("evil \x1b[2J line")
        lines.step("copying", total_bytes=1 << 20)
        now += 1
        lines.advance(1 << 19)
        lines.close()
    assert pipe.getvalue() == "pulling x\ncopying (1.0 MiB)\n"
    shown = terminal.getvalue()
    assert "\x1b[2J" not in shown
    assert "pulling x: evil \\x1b[2J line" in shown
    assert f"[{'█' * 12}{'·' * 12}] copying 512 KiB/1.0 MiB" in shown
    assert shown.endswith("\r\x1b[Kcopying (1.0 s)\n")


@pytest.mark.parametrize(("text", "wanted"), [("1", 1), ("2K", 2048), ("3MiB", 3 << 20), ("50GB", 50 << 30), ("0", 0)])
def test_sizes_are_read_as_they_are_written(text, wanted):
    """With any usual unit."""
    assert image.size(text) == wanted


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (image.size, "-1"), (image.size, "1.5G"), (image.size, "ten"), (image.days, "-1"), (image.days, "nan"),
        (image.digest, "sha256:00"), (image.assignment, "=x"), (image.assignment, "A"),
    ],
)  # fmt: skip
def test_what_is_no_size_number_digest_or_assignment_is_refused(check, text):
    """By argparse, with what was typed."""
    with pytest.raises(argparse.ArgumentTypeError, match="is not"):
        check(text)


def test_bytes_are_told_for_people():
    """Three digits at most before the point."""
    assert [sized(n) for n in (0, 1023, 1536, 200 << 20, 5 << 30)] == [
        "0 B", "1023 B", "1.5 KiB", "200 MiB", "5.0 GiB"
    ]  # fmt: skip


def test_the_modes_of_the_help_are_those_of_the_store():
    """They are written out there."""
    assert set(image.MODES) == set(Mode.__args__)  # type: ignore[attr-defined]
    assert parsed(build_parser(), ["image", "build", "x"]).mode == "lock"
    assert parsed(build_parser(), ["image", "pull", "x"]).mode == "versioned"


@pytest.mark.slow
def test_the_doctor_tries_the_image_of_the_configuration(place, monkeypatch, capsys):
    """An image of the store, by its name; one that is not there is what is wrong, with the cure that fits, once."""
    trio.run(make_tiny_image, place / "tree", (os.getuid(), os.getgid()), Lane("test", 1))
    assert main(["image", "pull", str(place / "tree"), "--name", "tiny"]) == 0
    ends = {"tiny": "", "tin": "there is no image 'tin' in the store; `prorld image list` names what there is"}
    for name, end in ends.items():
        monkeypatch.setenv("PRORLD__SANDBOX__IMAGE", name)
        capsys.readouterr()
        main(["doctor"])
        [line] = [line for line in capsys.readouterr().out.splitlines() if "sandbox bubblewrap" in line]
        assert line.startswith("FAIL" if end else "ok  "), line
        assert line.endswith(end)
