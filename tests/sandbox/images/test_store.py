"""The store: what a name stands for, one unpacking for all, nothing removed under who uses it, nothing half made."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import msgspec
import pytest
import trio

from prorld.errors import SandboxError
from prorld.sandbox.images import making
from prorld.sandbox.images.collecting import collect, remove
from prorld.sandbox.images.contract import Image
from prorld.sandbox.images.making import build, pull
from prorld.sandbox.images.progress import Silence
from prorld.sandbox.images.records import Mode, check_name, name_for
from prorld.sandbox.images.store import ImageStore
from tests.sandbox.images.support import OWNER, Heard, fake_sif, small_tree
from tests.sandbox.support import gone

QUIET = Silence()
MODES: tuple[Mode, ...] = ("scratch", "versioned", "lock")
NO_IMAGES = (
    "nothing", "docker://python:3", "sha256:00000000", "sha256:", "sha256:../..", "../../etc", "..", "", "a\0b",
    "a" * 5000, "/" + "a" * 5000, "/no/such", "/dev/null", "/a\0b", "\ud800", "/\ud800",
)  # fmt: skip


async def take_in(store: ImageStore, source: Path, name: str = "small") -> str:
    made = await pull(store, str(source), name=name, mode="versioned", progress=QUIET)
    return made.record.digest


def owner_of(path: Path) -> tuple[int, int] | None:
    found = path.lstat() if path.exists() else None
    return None if found is None else (found.st_uid, found.st_gid)


def staged(store: ImageStore) -> list[str]:
    return sorted(path.name for path in (store.directory / "staging").iterdir())


async def test_a_directory_is_found_by_name_digest_and_the_beginning_of_one(store, place):
    """All of them are the same directory, complete and the sandboxes' own."""
    digest = await take_in(store, small_tree(place / "tree"))
    by_name = await store.resolve("small", unpacked=True)
    root = Path(by_name.path)
    assert by_name == Image(name="small", path=by_name.path, kind="directory")
    for name in (digest, digest[:20]):
        assert (await store.resolve(name, unpacked=False)).path == by_name.path
    assert (root / "bin" / "bash").read_text() == "#!/bin/sh\necho hello\n"
    assert (root / "etc" / "passwd").exists()
    if OWNER is not None:
        assert owner_of(root) == OWNER
    assert staged(store) == []


@pytest.mark.parametrize("name", NO_IMAGES)
@pytest.mark.parametrize("unpacked", [False, True])
async def test_what_is_not_there_is_no_image(store, name, unpacked):
    """Whatever a task may call it; and asking again does not help."""
    with pytest.raises(SandboxError) as caught:
        await store.resolve(name, unpacked=unpacked)
    assert (caught.value.stable_code, caught.value.may_retry) == ("no_image", False)


async def test_a_reference_that_was_not_pulled_says_how(store):
    """The cure is a command."""
    with pytest.raises(SandboxError, match="`prorld image pull docker://python:3` brings it here"):
        await store.resolve("docker://python:3", unpacked=True)


async def test_a_path_is_taken_as_it_is(store, place):
    """A directory stays where it is; a SIF file is only touched where it has to be unpacked."""
    tree, sif = small_tree(place / "tree"), fake_sif(place / "a.sif")
    assert await store.resolve(str(tree), unpacked=True) == Image(name=str(tree), path=str(tree), kind="directory")
    assert await store.resolve(str(sif), unpacked=False) == Image(name=str(sif), path=str(sif), kind="sif")
    assert not store.directory.exists()


async def test_a_sif_file_is_unpacked_once_for_all_who_ask(place, store, stand_in):
    """Ten tasks of two processes, one run of Apptainer; what the image sets comes with it."""
    stand_in.order("sleep 0.2")
    sif = fake_sif(place / "a.sif")
    other = ImageStore(store.directory, owner=OWNER, apptainer=stand_in.path)
    found: list[Image] = []

    async def ask(asked: ImageStore) -> None:
        found.append(await asked.resolve(str(sif), unpacked=True))

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(ask, (store, other)[number % 2])
    other.close()
    assert len(stand_in.calls()) == 1
    [image] = {image.path: image for image in found}.values()
    assert (image.kind, image.env) == ("directory", {"COLOUR": "red"})
    assert (Path(image.path) / "bin" / "program").read_text() == "unpacked\n"
    assert (Path(image.path) / "proc").is_dir()
    assert staged(store) == []
    await store.resolve(str(sif), unpacked=True)
    assert len(stand_in.calls()) == 1


async def test_a_file_is_copied_once_for_all_who_ask(place, store):
    """A group of jobs comes at once, and its image may be as large as the room that is left."""
    sif = fake_sif(place / "a.sif")
    heard = Heard()
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(store.take_in_sif, sif, heard)
    assert heard.steps == ["copying a.sif"]


async def test_what_could_not_be_written_leaves_nothing(place, store, monkeypatch):
    """A disk that is full does not get fuller with each try."""
    await take_in(store, small_tree(place / "tree"))

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SandboxError, match="No space left") as caught:
        await take_in(store, place / "tree", name="other")
    monkeypatch.undo()
    assert (caught.value.stable_code, caught.value.may_retry) == ("images_dir", True)
    assert sorted(file.name for file in (store.directory / "names").iterdir()) == ["small"]


async def test_a_store_is_not_taken_into_itself(place, store):
    """A copy of all that holds the store would never come to an end."""
    for source in (place, store.directory):
        await store.prepare()
        with pytest.raises(SandboxError, match="copied into itself") as caught:
            await take_in(store, source)
        assert (caught.value.stable_code, staged(store)) == ("bad_reference", [])


async def test_a_changed_file_is_another_image(place, store, stand_in):
    """A path is not a promise of its content."""
    sif = fake_sif(place / "a.sif")
    first = await store.resolve(str(sif), unpacked=True)
    fake_sif(sif, b"other content")
    assert (await store.resolve(str(sif), unpacked=True)).path != first.path
    assert len(stand_in.calls()) == 2


async def test_hostile_things_in_a_sif_file_are_harmless_when_unpacked(place, store, stand_in):
    """Setuid programs, closed directories and links out of the image."""
    stand_in.order(f'mkdir -p "$3/closed/in" && touch "$3/suid" && chmod 6755 "$3/suid" && ln -s {place} "$3/out"\n'
                   'mkfifo "$3/pipe"; chmod 0 "$3/closed/in" "$3/closed"')  # fmt: skip
    image = await store.resolve(str(fake_sif(place / "a.sif")), unpacked=True)
    root = Path(image.path)
    assert stat.S_IMODE((root / "suid").stat().st_mode) == 0o755
    assert stat.S_IMODE((root / "closed" / "in").stat().st_mode) == 0o700
    assert not (root / "pipe").exists()
    assert (root / "out").readlink() == place
    digest = (await store.list())[0].record.digest
    assert await store.remove(digest)
    assert owner_of(root) is None
    assert (place / "a.sif").exists()


async def test_an_unpacking_that_fails_says_why_and_leaves_nothing(place, store, stand_in):
    """And the next one who asks tries again."""
    stand_in.order('mkdir -p "$3/half"; chmod 0 "$3/half"; echo "FATAL:   the file is damaged" >&2; exit 255')
    sif = fake_sif(place / "a.sif")
    with pytest.raises(SandboxError, match="the file is damaged") as caught:
        await store.resolve(str(sif), unpacked=True)
    assert (caught.value.stable_code, caught.value.may_retry) == ("image_broken", False)
    assert staged(store) == []
    stand_in.order("")
    assert (await store.resolve(str(sif), unpacked=True)).kind == "directory"


async def test_apptainer_sees_nothing_of_our_environment(place, store, stand_in, monkeypatch):
    """No home, a cache of its own, and no settings of ours, which would take effect inside."""
    monkeypatch.setenv("APPTAINER_BIND", "/root")
    monkeypatch.setenv("SECRET", "1")
    stand_in.order(f"env >{place}/tool/calls")
    await store.resolve(str(fake_sif(place / "a.sif")), unpacked=True)
    seen = dict(line.split("=", 1) for line in stand_in.calls())
    assert {"APPTAINER_BIND", "SECRET"} & seen.keys() == set()
    assert seen["HOME"] == "/nonexistent"
    assert seen["APPTAINER_CONFIGDIR"].startswith(str(store.directory))
    assert seen["APPTAINER_CACHEDIR"].startswith(str(store.directory))


async def test_a_cancelled_unpacking_ends_its_process_and_leaves_nothing(place, store, stand_in):
    """Whoever waits next begins anew."""
    stand_in.stop_there()
    sif = fake_sif(place / "a.sif")
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: store.resolve(str(sif), unpacked=True))
            while stand_in.pid() is None:  # noqa: ASYNC110 - the program only writes a file
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel("enough")
    pid = stand_in.pid()
    assert pid is not None
    assert await gone({pid})
    assert staged(store) == []


async def test_a_stored_file_that_was_changed_is_not_unpacked(place, store, stand_in):
    """The digest is checked before anything is made of it."""
    digest = await take_in(store, fake_sif(place / "a.sif"))
    file = store.directory / "images" / digest.removeprefix("sha256:") / "image.sif"
    file.chmod(0o644)
    file.write_bytes(file.read_bytes() + b"!")
    with pytest.raises(SandboxError, match="not what it was") as caught:
        await store.resolve("small", unpacked=True)
    assert (caught.value.stable_code, caught.value.may_retry) == ("image_broken", False)
    assert stand_in.calls() == []


async def test_without_apptainer_a_sif_file_can_still_be_taken_in(place):
    """Only unpacking needs it, and says so."""
    store = ImageStore(place / "store", owner=OWNER, apptainer=str(place / "none"))
    await take_in(store, fake_sif(place / "a.sif"))
    assert (await store.resolve("small", unpacked=False)).kind == "sif"
    with pytest.raises(SandboxError, match="can't be run") as caught:
        await store.resolve("small", unpacked=True)
    assert (caught.value.stable_code, caught.value.may_retry) == ("no_apptainer", False)
    store.close()


async def test_an_image_in_use_stays(place, store):
    """Neither another process's rm nor its gc takes it; once let go, both do."""
    digest = await take_in(store, small_tree(place / "tree"))
    other = ImageStore(store.directory, owner=OWNER)
    with pytest.raises(SandboxError) as caught:
        await remove(other, "small")
    assert (caught.value.stable_code, caught.value.may_retry) == ("image_busy", True)
    done = await collect(other, unused_days=None, keep_bytes=0)
    assert [item.record.digest for item in done.in_use] == [digest]
    assert (await other.resolve("small", unpacked=True)).kind == "directory"
    other.close()
    store.close()
    assert (await remove(other, "small")).image
    assert await other.list() == []


async def test_a_name_moves_on_and_the_last_one_takes_the_image_along(place, store):
    """Two names of one content are one image."""
    first = await take_in(store, small_tree(place / "one"), "a")
    assert await take_in(store, small_tree(place / "two"), "b") == first
    [item] = await store.list()
    assert item.names == ("a", "b")
    assert not (await remove(store, "a")).image
    second = await take_in(store, small_tree(place / "three", "other"), "b")
    assert {(item.record.digest, item.names) for item in await store.list()} == {(first, ()), (second, ("b",))}
    store.close()
    done = await collect(store, unused_days=None, keep_bytes=None)
    assert [item.record.digest for item in done.removed] == [first]


async def test_what_a_dead_maker_left_goes_and_what_a_live_one_makes_stays(place, store):
    """A lock tells them apart, whichever process looks."""
    await store.prepare()
    dead = store.directory / "staging" / "dead"
    small_tree(dead / "image" / "root")
    (dead / "image" / "root" / "data").chmod(0)
    (store.directory / "staging" / "dead.lock").touch()
    async with store.staged() as staging:
        other = ImageStore(store.directory, owner=OWNER)
        done = await collect(other, unused_days=None, keep_bytes=None)
        assert done.leftovers == 1
        assert staging.place.exists()
        assert not dead.exists()
    assert staged(store) == []


async def test_an_image_whose_record_is_lost_is_shown_and_collected(place, store):
    """One broken image does not hide the others."""
    digest = await take_in(store, small_tree(place / "one"), "broken")
    await take_in(store, small_tree(place / "two", "other"), "well")
    (store.directory / "images" / digest.removeprefix("sha256:") / "record.json").write_text("{")
    store.close()
    with pytest.raises(SandboxError) as caught:
        await store.resolve("broken", unpacked=True)
    assert caught.value.stable_code == "image_broken"
    assert {item.names: item.broken for item in await store.list()} == {("broken",): True, ("well",): False}
    store.close()
    done = await collect(store, unused_days=None, keep_bytes=None)
    assert [item.names for item in done.removed] == [("broken",)]
    assert (await store.resolve("well", unpacked=True)).kind == "directory"


async def test_a_store_that_others_can_write_or_that_is_newer_is_refused(place):
    """Its images would be theirs; its layout would be unknown."""
    (place / "open").mkdir()
    (place / "open").chmod(0o777)
    newer = ImageStore(place / "newer", owner=OWNER)
    await newer.prepare()
    (place / "newer" / "format").write_text("2\n")
    for name, words in (("open", "can be written by others"), ("newer", "has the format '2'")):
        with pytest.raises(SandboxError, match=words) as caught:
            await ImageStore(place / name, owner=OWNER).resolve("small", unpacked=True)
        assert (caught.value.stable_code, caught.value.may_retry) == ("images_dir", False)


async def test_a_digest_that_was_expected_is_insisted_on(place, store):
    """What came instead is not kept."""
    wrong = "sha256:" + "0" * 64
    with pytest.raises(SandboxError, match="was expected") as caught:
        await pull(store, str(small_tree(place / "tree")), name="a", mode="versioned", expected=wrong, progress=QUIET)
    assert caught.value.stable_code == "image_broken"
    assert await store.list() == []


async def test_what_is_no_image_is_refused(place, store):
    """A text file, a name that can be none, an unknown kind of reference, and one over plain HTTP."""
    (place / "text").write_text("text")
    refused = [
        (str(place / "text"), "a", "bad_reference"), ("ftp://host/image", None, "bad_reference"),
        ("http://host/image.sif", None, "bad_reference"), (str(place), "../a", "bad_image_name"),
        (str(place / "none"), None, "no_image"), ("", None, "bad_reference"), ("", "a", "bad_reference"),
    ]  # fmt: skip
    for source, name, code in refused:
        with pytest.raises(SandboxError) as caught:
            await pull(store, source, name=name, mode="versioned", progress=QUIET)
        assert caught.value.stable_code == code, source


@pytest.mark.parametrize("kind", ["docker-archive", "oci-archive"])
async def test_an_archive_that_is_no_file_is_refused(place, store, kind):
    """Nobody waits for what comes out of a pipe, or for the end of a device."""
    os.mkfifo(place / "pipe")
    for source in (place / "pipe", Path("/dev/zero")):
        for mode in MODES:
            with trio.fail_after(5), pytest.raises(SandboxError, match="no regular file") as caught:
                await pull(store, f"{kind}:{source}", name="a", mode=mode, progress=QUIET)
            assert (caught.value.stable_code, staged(store)) == ("bad_reference", [])


async def test_nothing_is_no_definition(store):
    """An empty name does not stand for the directory where one happens to be."""
    with pytest.raises(SandboxError, match="nothing was named") as caught:
        await build(store, "", name="a", mode="lock", arguments={}, progress=QUIET)
    assert caught.value.stable_code == "bad_reference"


async def test_progress_is_told_step_by_step(place, store):
    """What is copied, then what is checked."""
    heard = Heard()
    await pull(store, str(small_tree(place / "tree")), name="a", mode="versioned", progress=heard)
    assert heard.steps == [f"copying {place / 'tree'}", "taking its digest"]


async def test_the_record_says_what_it_was_made_of(place, store):
    """It is a file of JSON that other programs may read."""
    digest = await take_in(store, small_tree(place / "tree"))
    record = msgspec.json.decode(
        (store.directory / "images" / digest.removeprefix("sha256:") / "record.json").read_bytes()
    )
    assert (record["digest"], record["kind"], record["origin"]) == (digest, "directory", "pull")
    assert record["source"] == str(place / "tree")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs sandboxes as another user")
async def test_other_users_of_the_host_see_nothing_of_the_store(place, store):
    """The user of the sandboxes passes by its group, and can't change what leads to an image."""
    await take_in(store, small_tree(place / "tree"))
    image = await store.resolve("small", unpacked=True)
    for path in [store.directory, *Path(image.path).relative_to(store.directory).parents]:
        found = (store.directory / path).stat()
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (0, 65534, 0o710)
    for name in ("names", "keys", "locks"):
        assert stat.S_IMODE((store.directory / name).stat().st_mode) == 0o700


async def test_a_full_disk_is_trouble_of_the_store(place, store, monkeypatch):
    """It may pass; and what was half copied is gone."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/full")

    monkeypatch.setattr(making, "copy_tree", full)
    with pytest.raises(SandboxError, match="/full: No space left") as caught:
        await take_in(store, small_tree(place / "tree"))
    assert (caught.value.stable_code, caught.value.may_retry) == ("images_dir", True)
    assert staged(store) == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("docker://python:3.12", "docker://python:3.12"),
        ("https://host/dir/env.sif?token=1", "env"),
        ("oci-archive:/dir/env.tar:latest", "env"),
        ("/dir/env.sif", "env"),
        ("/dir/my env", "my-env"),
        ("/dir/...", "image"),
    ],
)
def test_a_source_gives_a_name(source, name):
    """A reference is its own; what else there is has a name that can be typed."""
    assert check_name(name_for(source)) == name
