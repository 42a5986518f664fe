"""The sets that can be converted: published rows of software tasks, from local files or from a package."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

import msgspec

from prorld.handlers import Dataset, PackageFiles
from prorld_swe.instance import SweInstance

__all__ = ["DATASETS", "convert_nemo", "convert_r2e", "convert_swebench", "convert_swegym", "convert_swesmith"]

_KEPT: Final = frozenset(field.encode_name for field in msgspec.structs.fields(SweInstance))


def convert_swebench(row: dict[str, Any], member: str) -> Iterator[dict[str, Any]]:
    """A row of SWE-bench, of either form."""
    yield from _instance(row, "swebench", member)


def convert_swegym(row: dict[str, Any], member: str) -> Iterator[dict[str, Any]]:
    """A row of SWE-Gym, or one that wraps it."""
    yield from _instance(row, "swegym", member)


def convert_r2e(row: dict[str, Any], member: str) -> Iterator[dict[str, Any]]:
    """A row of R2E-Gym. Its repair is in the commit that it was made from."""
    yield from _instance(row, "r2egym", member)


def convert_swesmith(row: dict[str, Any], member: str) -> Iterator[dict[str, Any]]:
    """A row of SWE-smith, whose patch is the bug; rows without an issue text are no tasks yet."""
    if row.get("problem_statement"):
        yield from _instance(row, "swesmith", member)


def convert_nemo(row: dict[str, Any], member: str) -> Iterator[dict[str, Any]]:
    """An example row of NeMo Gym's environments for software."""
    source = "swegym" if "instance" in row or row.get("subset") == "gym" else "swebench"
    for instance in _instance(row, source, member):
        # The path of an image on the machine that the row was made on.
        image = (instance.get("metadata") or {}).get("image")
        if image:
            instance["metadata"] = {"image": str(image).rpartition("/")[2]}
        yield instance


def _instance(row: dict[str, Any], source: str, member: str) -> Iterator[dict[str, Any]]:
    kept = {name: _plain(value) for name, value in row.items() if name in _KEPT and value is not None}
    kept["data_source"] = source
    if isinstance(kept.get("difficulty"), int | float):
        del kept["difficulty"]
    try:
        decoded = msgspec.convert(kept, SweInstance)
    except msgspec.ValidationError as exc:
        name = row.get("instance_id") or row.get("commit_hash") or "a row without a name"
        raise ValueError(f"{member}: {name}: {exc}") from exc
    yield msgspec.to_builtins(decoded)


def _plain(value: Any) -> Any:
    """Tables have values that JSON has not."""
    if isinstance(value, datetime):
        return value.isoformat()
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


def _nemo(*members: str) -> PackageFiles:
    sha256 = "955f08027a2f01a1c6e0e3c5da0820c330fee0307754d59ba2517f5ad89cea6e"
    return PackageFiles(package="nemo-gym", version="0.4.0", sha256=sha256, members=members)


DATASETS: Final = (
    Dataset(
        name="swegym-examples",
        title="SWE-Gym rows among NeMo Gym's examples",
        handler="swe",
        convert="prorld_swe.datasets:convert_nemo",
        source=_nemo("resources_servers/swerl_gen/data/example.jsonl"),
        licence="MIT (SWE-Gym), Apache-2.0 (NeMo Gym)",
        count=5,
    ),
    Dataset(
        name="swebench-examples",
        title="SWE-bench Verified and SWE-Gym rows among NeMo Gym's examples of agents",
        handler="swe",
        convert="prorld_swe.datasets:convert_nemo",
        source=_nemo(
            "responses_api_agents/mini_swe_agent/data/example.jsonl",
            "responses_api_agents/mini_swe_agent_2/data/example.jsonl",
            "responses_api_agents/swe_agents/data/example.jsonl",
        ),
        licence="MIT (SWE-bench, SWE-Gym), Apache-2.0 (NeMo Gym)",
        count=11,
    ),
    Dataset(
        name="swebench",
        title="SWE-bench, Verified, Lite and their like",
        handler="swe",
        convert="prorld_swe.datasets:convert_swebench",
        rows="parquet",
        licence="MIT",
    ),
    Dataset(
        name="swebench-jsonl",
        title="SWE-bench rows as JSON lines, of either form",
        handler="swe",
        convert="prorld_swe.datasets:convert_swebench",
        licence="MIT",
    ),
    Dataset(
        name="swegym",
        title="SWE-Gym, and SkyRL's rows that wrap it",
        handler="swe",
        convert="prorld_swe.datasets:convert_swegym",
        rows="parquet",
        licence="MIT",
    ),
    Dataset(
        name="swegym-jsonl",
        title="SWE-Gym rows as JSON lines",
        handler="swe",
        convert="prorld_swe.datasets:convert_swegym",
        licence="MIT",
    ),
    Dataset(
        name="r2egym",
        title="R2E-Gym",
        handler="swe",
        convert="prorld_swe.datasets:convert_r2e",
        rows="parquet",
        licence="MIT",
    ),
    Dataset(
        name="swesmith",
        title="SWE-smith",
        handler="swe",
        convert="prorld_swe.datasets:convert_swesmith",
        rows="parquet",
        licence="MIT",
    ),
)
