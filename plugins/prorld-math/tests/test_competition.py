"""All competition problems of the package index against the real grader, where they were fetched."""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from typing import Any

import pytest
import trio

from prorld.handlers import GraderError, cached_package, open_grader
from prorld_math.convert import competition, informal_minif2f
from prorld_math.datasets import DATASETS
from prorld_math.paper import MathPaper, MathVerdict

pytestmark = [pytest.mark.real, pytest.mark.slow]

Outcome = tuple[str, bool]


def instances_of(name: str) -> list[dict[str, Any]]:
    """The instances of a set whose package is in the cache."""
    dataset = next(one for one in DATASETS if one.name == name)
    assert dataset.source is not None
    assert dataset.source.sha256 is not None
    path = cached_package(dataset.source.sha256)
    if path is None:
        pytest.skip(f"{dataset.source.package} was not fetched: prorld data fetch {name}")
    convert = {"competition-math": competition, "minif2f-informal": informal_minif2f}[name]
    with zipfile.ZipFile(path) as archive:
        (member,) = dataset.source.members
        rows = [json.loads(line) for line in archive.read(member).splitlines()]
    made = [instance for row in rows for instance in convert(row, member)]
    assert len(made) == dataset.count
    return made


async def graded(papers: list[MathPaper]) -> list[Outcome]:
    """How each was judged, and whether it was right; the code where there was no verdict."""
    found: list[Outcome] = []
    async with open_grader("prorld_math.grading:grade", MathVerdict, children=1, limit_s=60.0) as grader:
        for paper in papers:
            try:
                verdict = await grader.grade(paper)
                found.append((verdict.how, verdict.correct))
            except GraderError as exc:
                found.append((exc.stable_code, False))
            await trio.lowlevel.checkpoint()
    return found


def box(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


@pytest.mark.parametrize("name", ["competition-math", "minif2f-informal"])
async def test_every_right_answer_agrees_with_itself(name: str):
    """All of them as text; by value all but the few that are prose."""
    golds = [instance["answer"] for instance in instances_of(name)]
    as_given = await graded([MathPaper(said=box(gold), gold=gold) for gold in golds])
    by_value = await graded([MathPaper(said=box(gold), gold=gold, by_value=True) for gold in golds])
    assert Counter(as_given) == {("text", True): len(golds)}
    unreadable = [gold for gold, outcome in zip(golds, by_value, strict=True) if outcome != ("value", True)]
    assert len(unreadable) <= 3, unreadable


@pytest.mark.parametrize("name", ["competition-math", "minif2f-informal"])
@pytest.mark.parametrize("distance", [1, 7])
async def test_no_answer_of_another_problem_is_right(name: str, distance: int):
    """Where the two answers are not the same; a right answer that can't be read gives no verdict."""
    golds = [instance["answer"] for instance in instances_of(name)]
    others = golds[distance:] + golds[:distance]
    papers = [MathPaper(said=box(other), gold=gold) for gold, other in zip(golds, others, strict=True)]
    found = await graded(papers)
    right = [(p.gold, p.said) for p, outcome in zip(papers, found, strict=True) if outcome[1] and box(p.gold) != p.said]
    assert right == []
    assert sum(outcome == ("grader_failed", False) for outcome in found) <= 2
