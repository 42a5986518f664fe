"""Trees of unknown origin: nothing leads out of them, nothing in them harms, and all of them can be removed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import trio

from prorld.errors import SandboxError
from prorld.sandbox.images import tree
from prorld.sandbox.images.store import delete
from prorld.sandbox.images.tree import copy_tree, digest_tree, furnish, make_harmless, measure
from tests.sandbox.images.support import OWNER, paths, small_tree

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices and gives files away")


def tick(done_bytes: int) -> None:
    assert done_bytes >= 0


@pytest.fixture
def hostile(place: Path) -> Path:
    """Everything at once that an image may hold to harm its host."""
    root = small_tree(place / "hostile")
    (place / "outside").mkdir(mode=0o700)
    (place / "outside" / "secret").write_text("secret")
    (place / "outside" / "secret").chmod(0o600)
    (root / "out").symlink_to(place / "outside")
    (root / "secret").symlink_to(place / "outside" / "secret")
    (root / "loop").symlink_to("loop")
    (root / "suid").write_text("")
    (root / "suid").chmod(0o6755)
    os.mkfifo(root / "pipe")
    (root / "closed" / "below").mkdir(parents=True)
    (root / "closed" / "below" / "file").write_text("deep")
    (root / "closed" / "below" / "file").chmod(0)
    (root / "closed" / "below").chmod(0)
    (root / "closed").chmod(0)
    (root / os.fsdecode(b"\xff\n-rf")).write_text("a name")
    return root


def test_what_could_harm_is_taken_away(hostile, place):
    """Pipes go, setuid goes, closed directories open up, and what a link leads to is left alone."""
    make_harmless(hostile, OWNER, tick)
    assert not (hostile / "pipe").exists()
    assert stat.S_IMODE((hostile / "suid").stat().st_mode) == 0o755
    assert stat.S_IMODE((hostile / "closed").stat().st_mode) == 0o700
    assert (hostile / "closed" / "below" / "file").read_text() == "deep"
    assert (hostile / "out").readlink() == place / "outside"
    outside = (place / "outside" / "secret").stat()
    assert (outside.st_uid, stat.S_IMODE(outside.st_mode)) == (os.geteuid(), 0o600)
    assert stat.S_IMODE((place / "outside").stat().st_mode) == 0o700


@ROOT_ONLY
def test_devices_are_removed_and_all_else_is_given_to_the_owner(hostile):
    """A device of the host's disk is no part of an image."""
    os.mknod(hostile / "disk", 0o666 | stat.S_IFBLK, os.makedev(7, 0))
    make_harmless(hostile, OWNER, tick)
    assert not (hostile / "disk").exists()
    owners = {(found.st_uid, found.st_gid) for found in (path.lstat() for path in [hostile, *hostile.rglob("*")])}
    assert owners == {OWNER}


def test_a_copy_has_links_as_links_and_nothing_from_outside(hostile, place):
    """Neither the secret nor the pipe is in it; hard links stay one file."""
    unread = copy_tree(hostile, place / "copy", tick)
    copy = place / "copy"
    assert (copy / "out").is_symlink()
    assert (copy / "secret").readlink() == place / "outside" / "secret"
    assert not (copy / "pipe").exists()
    assert (copy / "data" / "one").stat().st_ino == (copy / "data" / "two").stat().st_ino
    assert [Path(path).name for path in unread] == ([] if os.geteuid() == 0 else ["closed"])


async def test_whatever_is_in_a_tree_it_can_be_removed(hostile, place):
    """The tree goes, and what its links lead to stays."""
    await delete(hostile)
    assert not hostile.exists()
    assert (place / "outside" / "secret").read_text() == "secret"


def test_what_is_furnished_never_leaves_the_image(place):
    """An image whose /etc and /tmp lead to the host gets nothing there."""
    (place / "host").mkdir(mode=0o700)
    root = small_tree(place / "image")
    (root / "etc").symlink_to(place / "host")
    (root / "tmp").symlink_to(place / "host")
    furnish(root, OWNER)
    assert paths(place / "host") == []
    assert stat.S_IMODE((place / "host").stat().st_mode) == 0o700
    assert {"proc", "sys", "dev", "run", "var/tmp", "work"} <= set(paths(root))


def test_what_is_there_is_not_furnished_over(place):
    """An image's own /etc/passwd stays."""
    root = small_tree(place / "image")
    (root / "etc").mkdir()
    (root / "etc" / "passwd").write_text("mine")
    furnish(root, OWNER)
    assert (root / "etc" / "passwd").read_text() == "mine"
    assert "root:x:0:0" not in (root / "etc" / "passwd").read_text()
    assert (root / "etc" / "resolv.conf").exists()
    assert stat.S_IMODE((root / "tmp").stat().st_mode) == 0o1777


def change_content(root: Path) -> None:
    (root / "data" / "one").write_text("jello")


def change_mode(root: Path) -> None:
    (root / "data" / "one").chmod(0o600)


def change_name(root: Path) -> None:
    (root / "data" / "one").rename(root / "data" / "three")


def change_link(root: Path) -> None:
    (root / "sh").unlink()
    (root / "sh").symlink_to("bin/other")


def add_directory(root: Path) -> None:
    (root / "empty").mkdir()


@pytest.mark.parametrize("change", [change_content, change_mode, change_name, change_link, add_directory])
def test_each_difference_gives_another_digest(place, change):
    """Contents, permissions, names, targets of links and empty directories count."""
    first, second = small_tree(place / "first"), small_tree(place / "second")
    os.utime(second / "data" / "one", (1, 1))
    assert digest_tree(first, tick) == digest_tree(second, tick)
    change(second)
    assert digest_tree(first, tick) != digest_tree(second, tick)


def test_a_tree_that_is_too_deep_or_too_large_is_none(place, monkeypatch):
    """Nobody walks for ever."""
    root = small_tree(place / "image")
    deep = root
    for _ in range(tree.DEPTH_MAX + 1):
        deep /= "d"
    deep.mkdir(parents=True)
    with pytest.raises(SandboxError, match="deep") as caught:
        make_harmless(root, OWNER, tick)
    assert (caught.value.stable_code, caught.value.may_retry) == ("image_broken", False)
    monkeypatch.setattr(tree, "ENTRIES_MAX", 3)
    with pytest.raises(SandboxError, match="more than 3 files"):
        make_harmless(small_tree(place / "other"), OWNER, tick)


def test_a_link_in_the_place_of_a_root_is_none(place):
    """A maker that leaves a link to the host's root gets nothing changed there."""
    (place / "link").symlink_to(place)
    before = place.stat()
    with pytest.raises(SandboxError, match="no directory"):
        make_harmless(place / "link", OWNER, tick)
    assert place.stat() == before


def test_a_tick_that_raises_ends_the_work(place):
    """That is how a cancel reaches a thread."""

    def refuse(_: int) -> None:
        raise trio.TooSlowError

    with pytest.raises(trio.TooSlowError):
        measure(small_tree(place / "image"), refuse)
