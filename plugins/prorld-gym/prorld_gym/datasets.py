"""Rows of other environments that distributions of the package index carry, as they are.

No handler here grades them: they are material for handlers of one's own. Each row says which file it is from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from prorld.handlers import Dataset, PackageFiles

__all__ = ["DATASETS", "as_it_is"]

_NEMO_GYM: Final = "955f08027a2f01a1c6e0e3c5da0820c330fee0307754d59ba2517f5ad89cea6e"
_BFCL: Final = "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a"


def as_it_is(row: dict[str, Any], member: str) -> Iterator[dict[str, Any]]:
    """The row, with the file that it is from."""
    yield {"member": member, "row": row}


def _nemo_gym(*members: str) -> PackageFiles:
    return PackageFiles(package="nemo-gym", version="0.4.0", sha256=_NEMO_GYM, members=members)


def _bfcl(*members: str) -> PackageFiles:
    return PackageFiles(package="bfcl-eval", version="2026.3.23", sha256=_BFCL, members=members)


def _rows(name: str, title: str, source: PackageFiles, count: int) -> Dataset:
    return Dataset(name=name, title=title, convert="prorld_gym.datasets:as_it_is", source=source, count=count)


DATASETS: Final = (
    _rows(
        "nemo-gym-examples",
        "Example rows of the environments of NeMo Gym, about five of each",
        _nemo_gym("resources_servers/*/data/example.jsonl"),
        475,
    ),
    _rows(
        "minif2f",
        "miniF2F, with its statements in Lean",
        _nemo_gym("resources_servers/math_formal_lean/data/minif2f_test.jsonl"),
        244,
    ),
    _rows(
        "bfcl",
        "Berkeley function calling, version 4: questions and functions",
        _bfcl(*(f"bfcl_eval/data/BFCL_v4_{what}*.json" for what in ("irr", "live", "m", "par", "sim", "web"))),
        4696,
    ),
    _rows(
        "bfcl-answers",
        "Berkeley function calling, version 4: answers that are right",
        _bfcl("bfcl_eval/data/possible_answer/BFCL_v4_*.json"),
        3556,
    ),
)
