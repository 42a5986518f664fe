"""All of HumanEval through the whole handler, where the distribution that it comes in was fetched."""

from __future__ import annotations

import gzip
import json
import zipfile
from typing import Any

import pytest

from prorld.handlers import cached_package
from prorld.sandbox.runtime import Runtime
from prorld_code.datasets import DATASETS, humaneval
from tests.tasks import code_support
from tests.tasks.code_support import graded, plays, why

runtime, runtime_dir = code_support.runtime, code_support.runtime_dir


def instances() -> list[dict[str, Any]]:
    """The set, converted; the test is skipped where it was not fetched."""
    dataset = DATASETS[0]
    assert dataset.source is not None
    assert dataset.source.sha256 is not None
    found = cached_package(dataset.source.sha256)
    if found is None:
        pytest.skip(f"prorld data fetch {dataset.name} has not been run")
    (member,) = dataset.source.members
    with zipfile.ZipFile(found) as archive:
        lines = gzip.decompress(archive.read(member)).splitlines()
    made = [instance for line in lines for instance in humaneval(json.loads(line), member)]
    assert len(made) == dataset.count
    return made


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gold", "wrong", "cheat:exit", "cheat:equal", "cheat:equal_number"])
async def test_every_problem_of_humaneval(name: str, runtime: Runtime) -> None:
    """1 for each reference solution, and 0 for no work, an early exit, and objects that equal everything."""
    found: dict[str, tuple[float, Any]] = {}
    for instance in instances():
        play = next(play for play in plays(instance) if play.name == name)
        run = await graded(runtime, instance, *play.turns, test_s=10.0)
        if run.grade.reward != play.reward:
            found[instance["task_id"]] = run.grade.reward, why(run)
    assert found == {}
