"""Definitions out of a trainer's own source, run here without what the rest of its module imports."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

PLACE = Path(__file__).parents[2] / ".tools" / "trainer-classes"


def of(package: str) -> Path:
    """Where a trainer's source is; the test is skipped where it was not fetched."""
    place = PLACE / package
    if not place.is_dir():
        pytest.skip("scripts/trainer-classes fetches the classes of trainers")
    return place


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
