"""Archives that are not what they seem."""

from __future__ import annotations

import gzip
import io
import tarfile

import pytest

from prorld.handlers import Impossible
from prorld_swe.factory import tree as tree_module
from prorld_swe.factory.layout import Wishes, find_layout, name_and_version
from prorld_swe.factory.tree import Tree, read_sdist, write_tree


def test_an_honest_package_is_read_and_written(kit, tmp_path):
    """With its modes, without its top directory."""
    info = tarfile.TarInfo("wordy-1.0/run.sh")
    info.mode = 0o755
    path = kit.archive(tmp_path / "wordy-1.0.tar.gz", [("wordy-1.0/wordy.py", b"x = 1\n"), (info, b"#!/bin/sh\n")])
    tree = read_sdist(path)
    assert tree.files == {"wordy.py": b"x = 1\n", "run.sh": b"#!/bin/sh\n"}
    write_tree(tree, tmp_path / "out")
    assert (tmp_path / "out/run.sh").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "out/wordy.py").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    "name", ["a/../../x.py", "/etc/x.py", "a/b/../x.py", "a/x\ny.py", "a\\..\\x.py", "a/" * 40 + "x"]
)
def test_a_path_that_leads_elsewhere_is_refused(kit, tmp_path, name):
    """Whatever else is in there."""
    path = kit.archive(tmp_path / "a-1.tar.gz", [("a/good.py", b""), (name, b"bad")])
    with pytest.raises(Impossible, match="refused"):
        read_sdist(path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_what_is_no_file_is_left_out(kit, tmp_path, kind):
    """Links are not followed and not made."""
    info = tarfile.TarInfo("a/link")
    info.type, info.linkname = kind, "/etc/passwd"
    tree = read_sdist(kit.archive(tmp_path / "a-1.tar.gz", [("a/good.py", b"1"), (info, b"")]))
    assert (list(tree.files), tree.skipped) == (["good.py"], 1)


def test_a_repository_within_is_left_out(kit, tmp_path):
    """Its hooks would be git's."""
    members = [("a/good.py", b"1"), ("a/.git/hooks/pre-commit", b"bad"), ("a/b/.git", b"gitdir: /")]
    tree = read_sdist(kit.archive(tmp_path / "a-1.tar.gz", members))
    assert list(tree.files) == ["good.py"]


def test_a_file_that_is_a_directory_too_is_refused(kit, tmp_path):
    """One of the two would go missing."""
    path = kit.archive(tmp_path / "a-1.tar.gz", [("a/b", b"1"), ("a/b/c.py", b"2")])
    with pytest.raises(Impossible, match="as a file and as a directory"):
        read_sdist(path)


def test_a_bomb_is_cut_off(kit, tmp_path, monkeypatch):
    """Before it is all there."""
    monkeypatch.setattr(tree_module, "TREE_BYTES_MAX", 1 << 20)
    path = kit.archive(tmp_path / "a-1.tar.gz", [("a/zeros", bytes(8 << 20))])
    assert path.stat().st_size < 100_000
    with pytest.raises(Impossible, match="unpacks to more"):
        read_sdist(path)


def test_too_many_entries_are_refused(kit, tmp_path, monkeypatch):
    """Directories count, too."""
    monkeypatch.setattr(tree_module, "FILES_MAX", 10)
    path = kit.archive(tmp_path / "a-1.tar.gz", [(f"a/{number}.py", b"") for number in range(11)])
    with pytest.raises(Impossible, match="more than 10"):
        read_sdist(path)


def test_a_header_that_names_a_great_size_takes_no_memory(kit, tmp_path):
    """It claims a gigabyte that the archive does not have."""
    info = tarfile.TarInfo("a/x.py")
    info.size = 1 << 30
    path = tmp_path / "a-1.tar.gz"
    with gzip.open(path, "wb") as file:
        file.write(info.tobuf() + b"x" * 512)
    with pytest.raises(Impossible, match="can't be read"):
        read_sdist(path)


@pytest.mark.parametrize("data", [b"", b"no archive", gzip.compress(b"text"), gzip.compress(bytes(10_240))[:-9]])
def test_what_is_no_archive_is_refused(kit, tmp_path, data):
    """With a readable line."""
    path = tmp_path / "a-1.tar.gz"
    path.write_bytes(data)
    with pytest.raises(Impossible):
        read_sdist(path)
    (tmp_path / "a.zip").write_bytes(data)
    with pytest.raises(Impossible, match="no source distribution"):
        read_sdist(tmp_path / "a.zip")


@pytest.mark.slow
def test_every_cut_of_an_archive_is_refused_or_read(kit, tmp_path):
    """Never anything but a typed error."""
    whole = kit.sdist(tmp_path, kit.FILES).read_bytes()
    path = tmp_path / "cut-1.tar.gz"
    for length in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:length])
        with pytest.raises(Impossible):
            read_sdist(path)


def _tree(*paths: str) -> Tree:
    return Tree(files=dict.fromkeys(paths, b"x = 1\n"))


@pytest.mark.parametrize(
    ("name", "paths", "code", "tests", "root"),
    [
        ("a-b", ("a_b/__init__.py", "a_b/c.py", "tests/test_a.py"), ("a_b/__init__.py", "a_b/c.py"), ("tests",), "."),
        ("a", ("src/a/__init__.py", "src/a/tests/test_x.py"), ("src/a/__init__.py",), ("src/a/tests",), "src"),
        ("a", ("a.py", "test_a.py", "setup.py"), ("a.py",), ("test_a.py",), "."),
        ("python-a", ("a/__init__.py", "a/_vendor/v.py", "test/a_test.py"), ("a/__init__.py",), ("test",), "."),
        ("q", ("other/__init__.py", "docs/conf.py", "tests.py"), ("other/__init__.py",), ("tests.py",), "."),
    ],
)
def test_code_and_tests_are_found(name, paths, code, tests, root):
    """In the layouts that packages have."""
    layout = find_layout(_tree(*paths), name, Wishes())
    assert (layout.code, layout.tests, layout.python_path) == (code, tests, (root,))


def test_a_wish_comes_before_a_guess():
    """And one for what is not there is refused."""
    tree = _tree("a/__init__.py", "b/__init__.py", "checks/one.py")
    layout = find_layout(tree, "a", Wishes(code=("b",), tests=("checks",), pytest_args=("-x",)))
    assert (layout.modules, layout.tests, layout.pytest_args) == (("b",), ("checks",), ("-x",))
    with pytest.raises(Impossible, match="no tests"):
        find_layout(tree, "a", Wishes())
    with pytest.raises(Impossible, match="has no nothing"):
        find_layout(tree, "a", Wishes(tests=("nothing",)))


def test_a_name_says_package_and_version():
    """As the index writes them."""
    assert name_and_version("Foo_Bar-1.0rc1.tar.gz") == ("foo-bar", "1.0rc1")
    for name in ("foo.tar.gz", "../foo-1.tar.gz", "foo-1.zip"):
        with pytest.raises(Impossible):
            name_and_version(name)


def test_an_empty_archive_is_refused(kit, tmp_path):
    """There is nothing to do with it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz"):
        pass
    (tmp_path / "a-1.tar.gz").write_bytes(out.getvalue())
    with pytest.raises(Impossible, match="no files"):
        read_sdist(tmp_path / "a-1.tar.gz")
