"""Where in a source package the code and the tests are: guesses from names, each of which an option can replace."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

import msgspec

from prorld.handlers import Impossible
from prorld_swe.factory.tree import Tree

__all__ = ["Layout", "Wishes", "find_layout", "is_test_path", "name_and_version"]

_TEST_NAME = re.compile(r"(test_.*|.*_test|tests?)\.py")
_TEST_DIRECTORIES = frozenset({"tests", "test", "testing", "testsuite"})
# Directories whose Python is not what the package is for.
_ASIDE = _TEST_DIRECTORIES | {
    "docs", "doc", "examples", "example", "benchmarks", "benchmark", "bench", "scripts", "tools", "build", "samples",
    "_vendor", "vendor", "vendored", "packages", "contrib", "demo", "demos", "tasks", "ci",
}  # fmt: skip
_SETTINGS = frozenset({"setup.py", "conftest.py", "noxfile.py", "tasks.py", "fabfile.py", "versioneer.py"})
_SDIST_NAME = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*?)-(?P<version>[0-9][A-Za-z0-9.!+_-]*?)\.(?:tar\.gz|tgz)")
CODE_FILES_MAX = 400


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What a user says instead of a guess: paths within the package."""

    code: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    python_path: str | None = None
    pytest_args: tuple[str, ...] = ()


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """``modules`` are the names that have to be imported from the tree; ``tests`` are what pytest is given."""

    code: tuple[str, ...]
    modules: tuple[str, ...]
    tests: tuple[str, ...]
    python_path: tuple[str, ...]
    pytest_args: tuple[str, ...] = ()


def name_and_version(filename: str) -> tuple[str, str]:
    """The package and version that an sdist's file name says. Raises ``Impossible``."""
    match = _SDIST_NAME.fullmatch(filename)
    if match is None:
        raise Impossible(f"{filename[:120]!r} is not named like a source distribution, NAME-VERSION.tar.gz")
    return re.sub(r"[-_.]+", "-", match["name"]).lower(), match["version"]


def is_test_path(path: str) -> bool:
    """Whether a file belongs to the tests: by its own name, or by a directory that it is in."""
    parts = PurePosixPath(path).parts
    return bool(_TEST_NAME.fullmatch(parts[-1])) or parts[-1] == "conftest.py" or _in(parts[:-1], _TEST_DIRECTORIES)


def find_layout(tree: Tree, name: str, wishes: Wishes) -> Layout:
    """Code, tests and the path to import from. Raises ``Impossible`` where one of them can't be found."""
    root = wishes.python_path or _python_path(tree)
    base = "" if root == "." else f"{root}/"
    tops = wishes.code or _top_of_code(tree, name, base)
    code = sorted(path for path in tree.files if path.endswith(".py") and _is_code(path, tops))
    if not code:
        raise Impossible(f"no code was found in {name}: name it with --code")
    tests = wishes.tests or _tests(tree)
    if not tests:
        raise Impossible(f"no tests were found in {name}: name them with --tests")
    for path in (*tops, *tests):
        if not _is_there(tree, path):
            raise Impossible(f"{name} has no {path}")
    modules = {path.removeprefix(base).split("/")[0].removesuffix(".py") for path in code}
    return Layout(
        code=tuple(code[:CODE_FILES_MAX]),
        modules=tuple(sorted(modules)),
        tests=tuple(tests),
        python_path=(root,),
        pytest_args=wishes.pytest_args,
    )


def _python_path(tree: Tree) -> str:
    inside = [path for path in tree.files if path.startswith("src/") and path.endswith(".py")]
    return "src" if inside else "."


def _top_of_code(tree: Tree, name: str, base: str) -> tuple[str, ...]:
    """The directory or module that is named as the package is, else the largest package."""
    plain = re.sub(r"[-_.]+", "_", name)
    wanted = {plain, plain.replace("_", ""), plain.removeprefix("python_"), plain.removesuffix("_python")}
    sizes: dict[str, int] = {}
    for path, data in tree.files.items():
        if not path.startswith(base) or not path.endswith(".py"):
            continue
        parts = path.removeprefix(base).split("/")
        if len(parts) == 1 and (parts[0] in _SETTINGS or is_test_path(path)):
            continue
        if parts[0] not in _ASIDE and (len(parts) == 1 or f"{base}{parts[0]}/__init__.py" in tree.files):
            sizes[base + parts[0]] = sizes.get(base + parts[0], 0) + len(data)
    named = [top for top in sizes if top.removeprefix(base).removesuffix(".py").lower() in wanted]
    return tuple(named[:1] or sorted(sizes, key=lambda top: -sizes[top])[:1])


def _is_code(path: str, tops: Iterable[str]) -> bool:
    top = next((top for top in tops if path == top or path.startswith(f"{top}/")), None)
    if top is None:
        return False
    below = path[len(top) :].strip("/").split("/")
    return not is_test_path(path) and not _in(below[:-1], _ASIDE)


def _tests(tree: Tree) -> tuple[str, ...]:
    """The topmost directories of tests, else test modules at the top or within the package."""
    found: set[str] = set()
    for path in tree.files:
        parts = path.split("/")
        if not _TEST_NAME.fullmatch(parts[-1]):
            continue
        depth = next((at for at, part in enumerate(parts[:-1]) if part in _TEST_DIRECTORIES), None)
        found.add(path if depth is None else "/".join(parts[: depth + 1]))
    outside = {path for path in found if path.split("/")[0] not in {"examples", "docs", "doc", "benchmarks"}}
    directories = {path for path in outside if not path.endswith(".py")}
    return tuple(sorted(directories or outside))[:40]


def _is_there(tree: Tree, path: str) -> bool:
    return path in tree.files or any(name.startswith(f"{path}/") for name in tree.files)


def _in(parts: Iterable[str], names: Iterable[str]) -> bool:
    return bool(set(parts) & set(names))
