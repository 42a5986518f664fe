"""Trees as tar: what is packed comes out the same, and what a hostile stream says is refused before it does harm."""

from __future__ import annotations

import io
import os
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.sandbox import tar_unpack
from prorld.sandbox.tar_pack import pack_tree
from prorld.sandbox.tar_unpack import Unpacker

LONG = "d" * 200


def entry(name: str, kind: bytes = tarfile.REGTYPE, *, link: str = "", size: int = 0) -> tarfile.TarInfo:
    """One entry to put into a stream."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode = kind, link, size, 0o644
    return info


def stream(*entries: tarfile.TarInfo, form: int = tarfile.GNU_FORMAT) -> bytes:
    """A whole stream; files hold zeros."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for info in entries:
            archive.addfile(info, io.BytesIO(bytes(info.size)))
    return out.getvalue()


def unpack(root: Path, data: bytes, *, max_bytes: int = 1 << 20, step: int = 1 << 20) -> None:
    """Unpack a stream that comes in pieces of a size."""
    root.mkdir()
    unpacker = Unpacker(root, max_bytes=max_bytes)
    try:
        for start in range(0, len(data), step):
            unpacker.feed(data[start : start + step])
        unpacker.finish()
    finally:
        unpacker.close()


def look(root: Path) -> dict[str, tuple[str, int, bytes]]:
    """What is in a tree: kind, mode, content."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = ("link", 0, os.fsencode(path.readlink()))
        elif path.is_dir():
            found[name] = ("directory", path.stat().st_mode & 0o777, b"")
        else:
            found[name] = ("file", path.stat().st_mode & 0o777, path.read_bytes())
    return found


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with all that is kept."""
    root = tmp_path / "tree"
    (root / LONG / LONG).mkdir(parents=True)
    (root / LONG / LONG / "deep").write_bytes(b"deep")
    (root / "empty").write_bytes(b"")
    (root / "blocks").write_bytes(bytes(range(256)) * 4)
    (root / "odd \n name").write_bytes(b"x" * 513)
    (root / os.fsdecode(b"\xff\xfe")).write_bytes(b"bytes")
    (root / "run").write_bytes(b"#!/bin/sh\n")
    (root / "run").chmod(0o755)
    (root / "private").mkdir(mode=0o700)
    (root / "private" / "up").symlink_to("../run")
    (root / "far").symlink_to(f"{LONG}/{LONG}/deep")
    (root / "dangling").symlink_to("nowhere")
    return root


@pytest.mark.parametrize("step", [1, 100, 512, 1 << 20])
def test_round_trip(tree: Path, tmp_path: Path, step: int) -> None:
    """Names, modes, links and content come out as they went in, whatever the pieces."""
    unpack(tmp_path / "out", b"".join(pack_tree(tree)), step=step)
    assert look(tmp_path / "out") == look(tree)


def test_packs_what_others_read(tree: Path) -> None:
    """What is packed is tar as others know it."""
    with tarfile.open(fileobj=io.BytesIO(b"".join(pack_tree(tree)))) as archive:
        names = {os.path.normpath(member.name) for member in archive}
    assert names - {"."} == set(look(tree))


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_reads_what_others_pack(tmp_path: Path, form: int) -> None:
    """The three kinds of tar that images have are read, hard links too."""
    directory = "a" * 90
    entries = [entry(directory, tarfile.DIRTYPE), entry(f"{directory}/{'b' * 90}", size=5)]
    entries += [entry("f", size=7), entry("hard", tarfile.LNKTYPE, link="f"), entry("ä", tarfile.SYMTYPE, link="hard")]
    unpack(tmp_path / "out", stream(*entries, form=form))
    found = look(tmp_path / "out")
    assert found[f"{directory}/{'b' * 90}"][2] == bytes(5)
    assert found["f"][2] == bytes(7) == found["hard"][2]
    assert found["ä"] == ("link", 0, b"hard")


HOSTILE = [
    ("absolute", [entry("/etc/x")]),
    ("upwards", [entry("../x")]),
    ("upwards inside", [entry("a", tarfile.DIRTYPE), entry("a/../../x")]),
    ("absolute link", [entry("x", tarfile.SYMTYPE, link="/etc/passwd")]),
    ("link out", [entry("x", tarfile.SYMTYPE, link="../x")]),
    ("link out of a directory", [entry("a", tarfile.DIRTYPE), entry("a/x", tarfile.SYMTYPE, link="../../x")]),
    (
        "link up after a name",
        [
            entry("a", tarfile.DIRTYPE),
            entry("a/x", tarfile.SYMTYPE, link="."),
            entry("a/y", tarfile.SYMTYPE, link="x/.."),
        ],
    ),
    ("empty link", [entry("x", tarfile.SYMTYPE, link="")]),
    ("through a link", [entry("x", tarfile.SYMTYPE, link="."), entry("x/y")]),
    ("over a link", [entry("x", tarfile.SYMTYPE, link="y"), entry("x")]),
    ("directory over a link", [entry("x", tarfile.SYMTYPE, link="."), entry("x", tarfile.DIRTYPE)]),
    ("twice", [entry("x"), entry("x")]),
    ("file over the root", [entry(".")]),
    ("link over the root", [entry(".", tarfile.SYMTYPE, link="x")]),
    ("no parent", [entry("a/b")]),
    ("below a file", [entry("a"), entry("a/b")]),
    ("hard link out", [entry("x", tarfile.LNKTYPE, link="/etc/passwd")]),
    ("hard link up", [entry("x", tarfile.LNKTYPE, link="../../etc/passwd")]),
    ("hard link to nothing", [entry("x", tarfile.LNKTYPE, link="y")]),
    ("hard link to a link", [entry("y", tarfile.SYMTYPE, link="z"), entry("x", tarfile.LNKTYPE, link="y")]),
    ("hard link through a link", [entry("y", tarfile.SYMTYPE, link="z"), entry("x", tarfile.LNKTYPE, link="y/a")]),
    ("pipe", [entry("x", tarfile.FIFOTYPE)]),
    ("device", [entry("x", tarfile.CHRTYPE)]),
    ("block device", [entry("x", tarfile.BLKTYPE)]),
    ("too large", [entry("x", size=(1 << 20) + 1)]),
    ("too large together", [entry("x", size=1 << 19), entry("y", size=1 << 19), entry("z", size=1)]),
    ("long name", [entry("x" * 256)]),
    ("long path", [entry("x/" * 1100)]),
    ("long name of a name", [entry("x" * (1 << 17))]),
    ("long link", [entry("x", tarfile.SYMTYPE, link="y" * 300)]),
]


@pytest.mark.parametrize("entries", [entries for _, entries in HOSTILE], ids=[name for name, _ in HOSTILE])
@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_hostile(tmp_path: Path, entries: list[tarfile.TarInfo], form: int) -> None:
    """Refused with ``ValueError``, and nothing stands outside of the directory."""
    with pytest.raises(ValueError):  # noqa: PT011 - the kind is the promise
        unpack(tmp_path / "out", stream(*entries, form=form))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_holes(tmp_path: Path) -> None:
    """A file that says to have more than it sends is refused before the first byte of it."""
    huge = entry("x")
    huge.size = 1 << 50
    header = huge.tobuf(tarfile.GNU_FORMAT)
    with pytest.raises(ValueError, match="too large"):
        unpack(tmp_path / "out", header)


def test_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are counted, and the names of directories weighed."""
    monkeypatch.setattr(tar_unpack, "ENTRIES_MAX", 10)
    with pytest.raises(ValueError, match="10 entries"):
        unpack(tmp_path / "one", stream(*(entry(f"f{i}") for i in range(11))))
    monkeypatch.setattr(tar_unpack, "DIRECTORY_NAMES_BYTES_MAX", 10)
    with pytest.raises(ValueError, match="directories"):
        unpack(tmp_path / "two", stream(*(entry(f"dir{i}", tarfile.DIRTYPE) for i in range(3))))


def test_no_privileges_come_out(tmp_path: Path) -> None:
    """Set-user-id bits are dropped, and the owner can always read and remove what came."""
    file, directory = entry("x"), entry("d", tarfile.DIRTYPE)
    file.mode, directory.mode = 0o6111, 0o1000
    unpack(tmp_path / "out", stream(file, directory))
    assert look(tmp_path / "out") == {"d": ("directory", 0o700, b""), "x": ("file", 0o711, b"")}


@pytest.mark.parametrize("cut", [0, 1, 512, 700, 1024 + 600])
def test_cut_off(tmp_path: Path, cut: int) -> None:
    """A stream that ends before its end is an error, and none of the stream's."""
    with pytest.raises(OSError, match="before its end"):
        unpack(tmp_path / "out", stream(entry("a"), entry("b", size=1000))[:cut])


@given(st.data())
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever bytes are changed, it is unpacked or refused, and nothing else happens."""
    whole = bytearray(
        stream(entry("d", tarfile.DIRTYPE), entry("d/a", size=700), entry("l", tarfile.SYMTYPE, link="d"))
    )
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, 4 * 512))] = data.draw(st.integers(0, 255))
        block = data.draw(st.integers(0, 3)) * 512
        header = whole[block : block + 512]
        total = sum(header[:148]) + sum(header[156:]) + 8 * 32
        whole[block + 148 : block + 156] = b"%06o\0 " % total
    place = tmp_path_factory.mktemp("any")
    with suppress(ValueError, OSError):
        unpack(place / "out", bytes(whole))
    assert [path.name for path in place.iterdir()] == ["out"]
