"""Distributions are unpacked within bounds, with any Python that prorld runs on."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from prorld.handlers import GraderError
from prorld_swe.held import LOCK, HeldDirectory
from prorld_swe.sources import unpack


def archive_of(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            member.size = 2 if member.isfile() else 0
            tar.addfile(member, io.BytesIO(b"a\n"))
    return path


def member(name: str, *, mode: int = 0o666, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.mode, made.type, made.linkname = mode, kind, link
    return made


def test_files_come_out_and_links_do_not(tmp_path: Path) -> None:
    """Nobody but the owner may write them, and what was executable stays so."""
    links = [member("a-1/l", kind=tarfile.SYMTYPE, link="/etc"), member("a-1/h", kind=tarfile.LNKTYPE, link="a-1/f")]
    archive = archive_of(tmp_path / "a-1.tar.gz", member("a-1/f"), member("a-1/run", mode=0o4777), *links)
    unpack(archive, tmp_path / "out")
    found = {path.name: path.stat().st_mode & 0o7777 for path in (tmp_path / "out").iterdir()}
    assert found == {"f": 0o644, "run": 0o755}
    assert (tmp_path / "out/f").read_bytes() == b"a\n"


@pytest.mark.parametrize("name", ["../f", "/f", "a-1/../../f"])
def test_what_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    """Nothing is written then."""
    archive = archive_of(tmp_path / "a-1.tar.gz", member("a-1/f"), member(name))
    with pytest.raises(GraderError, match="leads out"):
        unpack(archive, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a-1.tar.gz"]


def test_what_a_killed_process_left_goes_with_the_next(tmp_path: Path) -> None:
    """What is held stays, and so do directories of others and those that are just being made."""
    left, fresh, other = (tmp_path / name for name in ("prorld-swe-left", "prorld-swe-fresh", "elsewhere"))
    for place in (left, fresh, other):
        place.mkdir()
    for place in (left, other):
        (place / LOCK).touch()
        (place / "tree").mkdir()
    first = HeldDirectory(tmp_path, "prorld-swe-")
    second = HeldDirectory(tmp_path, "prorld-swe-")
    assert set(tmp_path.iterdir()) == {fresh, other, first.path, second.path}
    first.remove()
    second.remove()
    assert set(tmp_path.iterdir()) == {fresh, other}
