"""Files and directories are there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorld.whole_file import replace_file, written_directory, written_file


def test_a_file_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    """In one move, and what was written beside it is gone."""
    path = tmp_path / "state"
    for words in ("one", "two"):
        with written_file(path) as half:
            half.write_text(words)
        assert path.read_text() == words
    assert [file.name for file in path.parent.iterdir()] == ["state"]


def test_a_file_that_was_not_finished_leaves_the_old_one(tmp_path: Path) -> None:
    """Nothing of the new one is left."""
    path = tmp_path / "state"
    path.write_text("old")

    def fail() -> None:
        with written_file(path) as half:
            half.write_text("ne")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("state", "old")]


def test_what_a_killed_writer_left_is_not_written_into(tmp_path: Path) -> None:
    """Were it a link, somebody else's file would be; a file of bytes is its owner's to read."""
    other, path = tmp_path / "other", tmp_path / "state"
    other.write_text("other")
    (tmp_path / ".state.half").symlink_to(other)
    replace_file(path, b"new")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o600)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"other": "other", "state": "new"}


def test_a_directory_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    """No file of the old one stays in the new one."""
    path = tmp_path / "deep" / "weights"
    for name in ("one", "two"):
        with written_directory(path) as half:
            assert not (path / name).exists()
            (half / name).write_text(name)
        assert [file.name for file in path.iterdir()] == [name]
    assert [file.name for file in path.parent.iterdir()] == ["weights"]


def test_a_directory_that_was_not_finished_leaves_the_old_one(tmp_path: Path) -> None:
    """An engine that reads it meanwhile reads what was."""
    path = tmp_path / "weights"
    path.mkdir()
    (path / "old").touch()

    def fail() -> None:
        with written_directory(path) as half:
            (half / "new").touch()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [file.name for file in tmp_path.rglob("*")] == ["weights", "old"]


def test_what_a_killed_writer_left_is_cleared_away(tmp_path: Path) -> None:
    """Otherwise each kill would cost a model's size on disk."""
    (tmp_path / ".step-6.half").mkdir()
    (tmp_path / ".step-6.half" / "model").touch()
    (tmp_path / ".step-5.old").mkdir()
    with written_directory(tmp_path / "step-7") as half:
        (half / "model").touch()
    assert [file.name for file in tmp_path.iterdir()] == ["step-7"]
