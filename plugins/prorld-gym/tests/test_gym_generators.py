"""All generators of reasoning-gym through the bridge, in real children."""

from __future__ import annotations

from typing import Any

import pytest

from prorld.handlers import GraderError, open_grader

# Their answer is ``None`` by design: many are right, and the scorer checks the one that is given.
WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
# Takes whatever does not contain the right word as the other one.
LENIENT = {"game_of_life_halting"}
ANSWERS = {"program": "__import__('os')._exit(0)", "wrong": "no such thing 7f3a"}


@pytest.mark.real
@pytest.mark.slow
async def test_every_generator_agrees_with_its_own_answer() -> None:
    """And none of their scorers runs an answer that is a program: each one lives to give its score."""
    found: dict[str, float | None] = {}
    ends: dict[tuple[str, str], str] = {}
    lenient: set[tuple[str, str]] = set()
    async with open_grader("prorld_gym.bridge:call", dict[str, Any], children=2, limit_s=60.0) as grader:
        asked = {"kind": "reasoning_gym", "seed": 7, "index": 0, "config": {}}
        names = set((await grader.grade({**asked, "op": "names"}))["names"]) - {"composite"}
        for name in sorted(names):
            one = {**asked, "env": name}
            found[name] = (await grader.grade({**one, "op": "self_score"}))["score"]
            for what, text in ANSWERS.items():
                try:
                    reply = await grader.grade({**one, "op": "score", "answer": text})
                except GraderError as exc:
                    ends[name, what] = exc.stable_code
                    continue
                if reply["score"] >= 0.5:
                    lenient.add((name, what))
    assert len(found) == 105
    # A scorer may fail at an answer; one that ran it would have ended.
    assert set(ends.values()) <= {"grader_failed"}
    assert {name for name, _ in lenient} <= LENIENT
    assert {name for name, score in found.items() if score is None} == WITHOUT_ANSWER
    assert {name for name, score in found.items() if score is not None and score != 1.0} == set()
