"""Every play of every task through the whole daemon: each comes to its reward, and the record says why.

Another plugin is one more file of instances, ``instances/NAME.jsonl``, named after its handler.
"""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from prorld.handlers.registry import discover
from prorld.testing.plays import play_of
from tests.tasks.whole_path import INSTANCES, Rollout, instances_of, plays_by_name, whole_path

TASKS = sorted(file.stem for file in INSTANCES.glob("*.jsonl"))

INSTALLED = {point.name for point in entry_points(group="prorld.handlers")}
NEEDED = {"gold", "empty", "wrong", "malformed"}
# A tool call that never ends is stopped sooner than a minute after it began.
SETTINGS = {"math": "[handlers.config.math]\ntool_s = 3.0\n"}
# Who would ask a judge has none here: no grade is the honest end, and never a reward.
ASKS_A_JUDGE = {"stem"}

pytestmark = pytest.mark.slow


def words(rollout: Rollout) -> str:
    """What became of it, for the message of a failure."""
    record = rollout.record
    outcome = record["outcome"]
    return (
        f"line {rollout.line}, {rollout.play.name}: reward {record['reward']} and not {rollout.play.reward:g}, "
        f"{outcome['kind']} ({outcome['code']}) {outcome['message']}; {[*rollout.told]}"
    )


@pytest.mark.parametrize("name", TASKS)
def test_every_play_comes_to_its_reward(name, tmp_path):
    """Gold in full, everything else as it says, none without a grade."""
    instances = instances_of(name)
    if name not in INSTALLED or not instances:
        pytest.skip(f"prorld-{name} is not installed, or has no instances in tests/tasks/instances")
    handler = discover([name]).get(name)
    offered = plays_by_name(handler, instances)
    if "gold" not in offered:
        pytest.skip(f"{name} has no gold play")
    assert offered.keys() >= NEEDED
    found = whole_path(tmp_path, handler, instances, settings=SETTINGS.get(name, ""))
    assert len(found) == sum(len(lines) for lines in offered.values())
    if name in ASKS_A_JUDGE:
        asked = [rollout for rollout in found if rollout.record["outcome"]["code"] == "no_judge"]
        assert all(rollout.record["reward"] is None and rollout.play.name != "gold" for rollout in asked)
        found = [rollout for rollout in found if rollout not in asked]
    wrong = [rollout for rollout in found if rollout.record["reward"] != pytest.approx(rollout.play.reward, abs=1e-9)]
    assert not wrong, "\n".join(map(words, wrong))
    assert {rollout.record["outcome"]["kind"] for rollout in found} <= {"ok", "policy_limit"}
    assert {rollout.record["reward"] for rollout in found if rollout.play.name == "gold"} == {1.0}
    assert all(rollout.record["tokens"]["sampled"] > 0 for rollout in found)


def test_a_play_that_can_not_be_told_apart_fails_before_anything_is_started(tmp_path):
    """With the lines of both."""
    pytest.importorskip("prorld_calc")
    handler = discover(["calc"]).get("calc")
    twice = [{"question": "What is 1 plus 1?", "answer": answer} for answer in (2, 3)]
    with pytest.raises(ValueError, match="instances 2 and 1 can't be told apart"):
        whole_path(tmp_path, handler, twice, ["gold"])
    assert play_of(handler, twice[0], "gold").reward == 1.0
    assert not (tmp_path / "state").exists()
