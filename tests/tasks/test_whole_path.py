"""Every play of every task through the whole daemon: each comes to its reward, and the record says why.

Another plugin is one more file of instances, ``instances/NAME.jsonl``, named after its handler. What takes longer than
a minute in all is played by ``./just test-real tasks``, and a chosen part of it here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from prorld.handlers.packages import PACKAGES_VARIABLE, packages_dir
from prorld.handlers.registry import discover
from prorld.testing.plays import play_of
from tests.tasks.judge import judge_engine
from tests.tasks.tinycalc import row_of, write_sdist
from tests.tasks.whole_path import INSTANCES, Rollout, instances_of, plays_by_name, whole_path

Instances = Sequence[dict[str, Any]]

TASKS = sorted({*(file.stem for file in INSTANCES.glob("*.jsonl")), "swe"})
INSTALLED = {point.name for point in entry_points(group="prorld.handlers")}

NEEDED = {"gold", "empty", "wrong", "malformed"}
# Of these handlers everything takes too long to be played every time: how many instances are, and which plays.
CHOSEN: dict[str, tuple[int, tuple[str, ...] | None]] = {
    # Cheats that the grade does not take, that it sees in the code, and that it sees in the run.
    "swe": (1, (*sorted(NEEDED), "cheat:conftest", "cheat:patched_pytest", "cheat:forged_report")),
    "terminal": (3, None),
}
ENVIRONMENTS = [
    pytest.param({"data_source": "gem", "env": "prorld_gym.example:GuessEnv", "seed": 5}, id="gem"),
    pytest.param(
        {"data_source": "verifiers", "env": "prorld_gym.example:Capitals", "index": 1},
        id="verifiers", marks=pytest.mark.real,
    ),
    pytest.param(
        {"data_source": "reasoning_gym", "env": "basic_arithmetic", "seed": 3, "index": 1},
        id="reasoning_gym", marks=pytest.mark.real,
    ),
]  # fmt: skip
# A grade of its own, one by a grader's child and a judge, and one in a fresh sandbox.
QUICK = ("calc", "stem", "swe")
# What handlers say when they give a grade, each with what it was given for.
REASONS = {"graded", "scored", "no answer to score", "played", "verified", "the work used its sandbox up"}
SETTINGS = {
    # A tool call that never ends is stopped sooner than a minute after it began.
    "math": "[handlers.config.math]\ntool_s = 3.0\n",
    "stem": "[handlers.config.stem]\ntool_s = 3.0\n",
    "swe": "[handlers.config.swe]\ntest_least_s = 30.0\ntest_limit_s = 30.0\n",
}


@contextmanager
def judge_of(name: str) -> Iterator[str]:
    """What the daemon has to be told of a judge, for the handler that asks one."""
    if name != "stem":
        yield ""
        return
    with judge_engine() as url:
        yield f'[[backends]]\nurl = "{url}"\nkind = "openai"\npolicy = "judge"\n'


@pytest.fixture
def given(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The instances of a handler; those of swe are made, with the package that they are about."""

    def instances(name: str) -> Instances:
        if name not in INSTALLED:
            pytest.skip(f"prorld-{name} is not installed")
        if name != "swe":
            return instances_of(name)
        sdist = write_sdist(tmp_path_factory.mktemp("packages"))
        monkeypatch.setenv(PACKAGES_VARIABLE, str(sdist.parent.parent))
        return [row_of(sdist)]

    return instances


def words(rollout: Rollout) -> str:
    """What became of it, for the message of a failure."""
    record = rollout.record
    outcome = record["outcome"]
    return (
        f"line {rollout.line}, {rollout.play.name}: reward {record['reward']} and not {rollout.play.reward:g}, "
        f"{outcome['kind']} ({outcome['code']}) {outcome['message']}; {[*rollout.told]}"
    )


def check_plays(
    place: Path,
    name: str,
    instances: Instances,
    names: Sequence[str] | None = None,
    *,
    limits: Mapping[str, str] = SETTINGS,
    alone: bool = False,
) -> None:
    """Gold in full, everything else as it says, none without a grade and a reason."""
    handler = discover([name]).get(name)
    offered = plays_by_name(handler, instances)
    assert offered.keys() >= (NEEDED - {"gold"} if alone else NEEDED)
    variables = {PACKAGES_VARIABLE: str(packages_dir())}
    with judge_of(name) as judge:
        settings = limits.get(name, "") + judge
        found = whole_path(place, handler, instances, names, settings=settings, variables=variables, alone=alone)
    assert len(found) == sum(len(offered[play]) for play in names or offered)
    wrong = [rollout for rollout in found if rollout.record["reward"] != pytest.approx(rollout.play.reward, abs=1e-9)]
    assert not wrong, "\n".join(map(words, wrong))
    assert {rollout.record["outcome"]["kind"] for rollout in found} <= {"ok", "policy_limit"}
    assert {rollout.record["reward"] for rollout in found if rollout.play.name == "gold"} <= {1.0}
    # An engine that knows no play for a prompt says the end of its turn alone. Control tokens are many bytes each.
    said = {id(rollout): rollout.record["tokens"]["sampled"] for rollout in found}
    unsaid = [rollout for rollout in found if said[id(rollout)] <= len(rollout.play.turns[0].encode()) // 2]
    assert not unsaid, "\n".join(map(words, unsaid))
    silent = [rollout for rollout in found if not any(line["what"] in REASONS for line in rollout.told)]
    assert not silent, "\n".join(map(words, silent))
    if name == "stem" and names is None:
        asked = {
            rollout.play.name for rollout in found if any(line["what"] == "a judge answered" for line in rollout.told)
        }
        assert asked >= {"wrong", "cheat:judge-verdict"}


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_every_play_comes_to_its_reward(name, tmp_path, given):
    """All of them, or those that are chosen."""
    lines, plays = CHOSEN.get(name, (None, None))
    check_plays(tmp_path, name, given(name)[:lines], plays)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CHOSEN))
def test_every_play_of_what_takes_long_comes_to_its_reward(name, tmp_path, given):
    """On every instance."""
    check_plays(tmp_path, name, given(name))


@pytest.mark.slow
@pytest.mark.parametrize("instance", ENVIRONMENTS)
def test_every_play_in_an_environment_comes_to_its_reward(instance, tmp_path, given):
    """What it says first is known when it was started, and there is no answer to be had from it."""
    given("gym")
    check_plays(tmp_path, "gym", [instance], alone=True)


@pytest.mark.real
@pytest.mark.parametrize("name", QUICK)
def test_work_and_no_work_are_told_apart(name, tmp_path, given):
    """The part that a hurry leaves time for: two plays of one instance."""
    check_plays(tmp_path, name, given(name)[:1], ["gold", "empty"])


@pytest.mark.real
@pytest.mark.slow
def test_every_play_of_made_tasks_comes_to_its_reward(tmp_path):
    """One task of each of two packages, out of the file of tasks that ``PRORLD_SWE_TASKS`` names."""
    named = os.environ.get("PRORLD_SWE_TASKS")
    if not named:
        pytest.skip("PRORLD_SWE_TASKS names no file of tasks")
    read_tasks = pytest.importorskip("prorld_swe.factory.plant").read_tasks
    by_package = {row["sdist"]["package"]: row for row in reversed(read_tasks(Path(named)))}
    check_plays(tmp_path, "swe", [*by_package.values()][-2:], limits={})


def test_a_play_that_can_not_be_told_apart_fails_before_anything_is_started(tmp_path):
    """With the lines of both."""
    pytest.importorskip("prorld_calc")
    handler = discover(["calc"]).get("calc")
    twice = [{"question": "What is 1 plus 1?", "answer": answer} for answer in (2, 3)]
    with pytest.raises(ValueError, match="instances 2 and 1 can't be told apart"):
        whole_path(tmp_path, handler, twice, ["gold"])
    assert play_of(handler, twice[0], "gold").reward == 1.0
    assert not (tmp_path / "state").exists()
