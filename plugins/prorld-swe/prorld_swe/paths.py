"""Which files a policy's patch may change: not the tests, nor what decides how tests are found, run and judged."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import msgspec

from prorld_swe.diff import Diff, FileChange

__all__ = ["Sifted", "changed_paths", "is_configuration", "is_test", "sift", "without_shadows"]

_TEST_NAME: Final = re.compile(r"(?:test_.*|.*_tests?|tests?|_?testing|testutils?)\.\w+", re.IGNORECASE)
# Helpers that tests compare with decide as much as tests do.
_TEST_PARTS: Final = frozenset({"test", "tests", "testing", "_testing", "testutils", "test_utils"})
_CONFIGURATION: Final = frozenset(
    {
        *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
        *("pyproject.toml", "noxfile.py", ".coveragerc", "run_tests.sh", "runtests.py"),
        *("sitecustomize.py", "usercustomize.py"),
    }
)
_NEVER: Final = frozenset({"conftest.py", "sitecustomize.py", "usercustomize.py"})
_ENDINGS: Final = (".pth", ".pyc", ".pyo", ".pyd", ".so", ".egg-link", ".dist-info", ".egg-info")
_DIRECTORIES: Final = frozenset({"__pycache__", "r2e_tests", ".tox", ".nox", ".venv", "site-packages"})
# What lies where modules are looked for first must not take the place of what judges.
_JUDGES: Final = frozenset(
    {*sys.stdlib_module_names, "pytest", "_pytest", "pluggy", "iniconfig", "packaging", "exceptiongroup", "tomli", "py"}
)


class Sifted(msgspec.Struct, frozen=True, kw_only=True):
    """What of a diff is applied, and what is left out, with the reason."""

    changes: tuple[FileChange, ...]
    left_out: tuple[tuple[str, str], ...]

    @property
    def patch(self) -> bytes:
        """The diff of what is applied."""
        return b"".join(change.text for change in self.changes)

    @property
    def tests_touched(self) -> int:
        """How many files of tests, or of how they are run, were changed."""
        return sum(why in {"a test", "configuration of tests"} for _, why in self.left_out)


def is_test(path: str) -> bool:
    """Whether a path is one of tests, by its name or by where it is."""
    parts = path.split("/")
    return _TEST_NAME.fullmatch(parts[-1]) is not None or not _TEST_PARTS.isdisjoint(parts[:-1])


def is_configuration(path: str) -> bool:
    """Whether a file decides which code a test run loads, or how."""
    parts = path.split("/")
    # A directory that looks like that of an installed distribution names plugins that pytest then loads.
    ends = any(part.lower().endswith(_ENDINGS) for part in parts)
    return parts[-1].lower() in _CONFIGURATION or ends or not _DIRECTORIES.isdisjoint(parts)


def shadows(path: str, roots: Iterable[str]) -> bool:
    """Whether a new file would be imported instead of the standard library or of what runs the tests."""
    for root in roots:
        prefix = "" if root in {"", "."} else root.rstrip("/") + "/"
        if path.startswith(prefix):
            top = path[len(prefix) :].partition("/")[0]
            if top.partition(".")[0] in _JUDGES and (top.endswith(".py") or "/" in path[len(prefix) :]):
                return True
    return False


def without_shadows(sifted: Sifted, roots: Sequence[str], *, there: Collection[str], known: Collection[str]) -> Sifted:
    """Without new modules that would be imported instead of ``known`` ones, which are installed beside the repository.

    ``there`` are the repository's own entries below each root: what it has under such a name is its own.
    """
    kept: list[FileChange] = []
    left_out = list(sifted.left_out)
    for change in sifted.changes:
        tops = [top for root in dict.fromkeys(["", *roots]) if (top := _top(change.path, root)) is not None]
        if change.kind == "added" and any(
            top not in there and top.rpartition("/")[2].partition(".")[0] in known for top in tops
        ):
            left_out.append((change.path, "in the place of an installed module"))
        else:
            kept.append(change)
    return Sifted(changes=tuple(kept), left_out=tuple(left_out))


def _top(path: str, root: str) -> str | None:
    """The entry below a root that a module is in; ``None`` for what is elsewhere or no module."""
    prefix = "" if root in {"", "."} else root.rstrip("/") + "/"
    if not path.startswith(prefix):
        return None
    top, below, _ = path[len(prefix) :].partition("/")
    return prefix + top if below or top.endswith(".py") else None


def changed_paths(patch: str) -> frozenset[str]:
    """The files that a patch names."""
    return frozenset(re.findall(r"^diff --git a/.+? b/(.+)$", patch, re.MULTILINE)) | frozenset(
        re.findall(r"^\+\+\+ b/([^\t\n]+)", patch, re.MULTILINE)
    )


def sift(diff: Diff, *, tests: Collection[str], right: Collection[str], roots: Sequence[str]) -> Sifted:
    """What may be applied. Files that the ``right`` patch changes, and that hold no expected test, always may."""
    kept: list[FileChange] = []
    left_out = list(diff.refused)
    for change in diff.changes:
        why = _why_not(change, tests, right, roots)
        if why is None:
            kept.append(change)
        else:
            left_out.append((change.path, why))
    return Sifted(changes=tuple(kept), left_out=tuple(left_out))


def _why_not(change: FileChange, tests: Collection[str], right: Collection[str], roots: Sequence[str]) -> str | None:
    path = change.path
    if path in tests:
        return "a test"
    if path in right and path.rpartition("/")[2] not in _NEVER:
        return None
    if is_configuration(path):
        return "configuration of tests"
    if is_test(path):
        return "a test"
    if change.kind == "added" and shadows(path, ["", *roots]):
        return "in the place of a module that judges"
    return "a program that is no text" if change.binary and path.endswith((".py", ".pyi")) else None
