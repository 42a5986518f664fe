"""Definitions out of a trainer's own source, run here without what the rest of its module imports."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PLACE = ROOT / ".tools" / "trainer-classes"
PINS = ROOT / "requirements" / "trainer-classes.txt"


def of(package: str) -> Path:
    """Where a trainer's source is; the test is skipped where it was not fetched."""
    place = PLACE / package
    if not place.is_dir():
        pytest.skip("scripts/trainer-classes fetches the classes of trainers")
    return place


def version_of(package: str) -> str:
    """The version of a trainer that is fetched."""
    pins = dict(line.split("==") for line in PINS.read_text().splitlines() if not line.startswith("#"))
    return pins[package]


@contextmanager
def packages(place: Path, *names: str) -> Iterator[None]:
    """Modules of a trainer, imported as packages whose own ``__init__`` is not run; gone after the block."""
    before, path = dict(sys.modules), [*sys.path]
    sys.path.insert(0, str(place))
    for name in names:
        package = types.ModuleType(name)
        package.__path__ = [str(place / name.replace(".", "/"))]
        sys.modules[name] = package
    try:
        yield
    finally:
        sys.path[:] = path
        roots = {name.split(".")[0] for name in names}
        for name in [name for name in sys.modules if name.split(".")[0] in roots]:
            del sys.modules[name]
        sys.modules.update({name: module for name, module in before.items() if name.split(".")[0] in roots})


def definitions(path: Path, *names: str, **given: Any) -> dict[str, Any]:
    """What these names are in a module, or ``Class.method``; ``given`` is what they need of its imports.

    Decorators that are not given are left out, as is nothing else: what runs is the trainer's code.
    """
    tree = ast.parse(path.read_text(), str(path))
    wanted = set(names)
    future = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    found: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found += [each for each in node.body if f"{node.name}.{getattr(each, 'name', '')}" in wanted]
        if _name(node) in wanted:
            found.append(node)
    assert len(found) == len(wanted), f"{path} does not define all of {sorted(wanted)}"
    for node in found:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.decorator_list = [each for each in node.decorator_list if ast.unparse(each).split("(")[0] in given]
    world = dict(given)
    # How annotations are read is the trainer's to say, too, and not this module's.
    exec(compile(ast.Module([*future, *found], []), str(path), "exec", dont_inherit=True), world)
    return world


def _name(node: ast.stmt) -> str:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return getattr(node, "name", "")
