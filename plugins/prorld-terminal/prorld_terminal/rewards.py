"""What tests have left: the reward files of Harbor, and the summary that pytest prints for Terminal-Bench."""

from __future__ import annotations

import ast
import json
import math
import re

from prorld.errors import GraderError

__all__ = ["combined", "parsed_tests", "rewards_of_json", "rewards_of_text", "test_names"]

REWARD_KEYS_MAX = 64
TESTS_MAX = 10_000
_SUMMARY = re.compile(r"^=+ *short test summary info *=+ *$", re.IGNORECASE | re.MULTILINE)
_LINE = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS):?\s+(\S.*)$")
_PASSING = frozenset({"PASSED", "XFAIL", "SKIPPED"})


def unreadable(name: str, why: str) -> GraderError:
    """A reward that is there and can't be used."""
    return GraderError(f"{name} of the tests {why}", code="bad_reward")


def rewards_of_text(raw: bytes) -> dict[str, float]:
    """The number in ``reward.txt``."""
    try:
        value = float(raw.decode().strip())
    except ValueError as exc:
        raise unreadable("reward.txt", "holds no number") from exc
    if not math.isfinite(value):
        raise unreadable("reward.txt", "holds no finite number")
    return {"reward": value}


def rewards_of_json(raw: bytes) -> dict[str, float]:
    """The numbers by name in ``reward.json``."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise unreadable("reward.json", "is no JSON") from exc
    if not isinstance(found, dict) or not 0 < len(found) <= REWARD_KEYS_MAX:
        raise unreadable("reward.json", "is no object with rewards")
    if any(not isinstance(value, int | float) or not math.isfinite(value) for value in found.values()):
        raise unreadable("reward.json", "holds something else than finite numbers")
    return {str(name): float(value) for name, value in found.items()}


def combined(rewards: dict[str, float], key: str | None) -> float:
    """One number: that under ``key``, else ``reward``, else the mean of all."""
    if key is not None and key in rewards:
        return rewards[key]
    if "reward" in rewards:
        return rewards["reward"]
    return sum(rewards.values()) / len(rewards)


def parsed_tests(output: str) -> dict[str, bool] | None:
    """Test by test whether it passed, by the last summary in the output; ``None`` where there is none.

    A program under test can print a summary of its own, but not one after that of the runner that it runs in.
    """
    heads = list(_SUMMARY.finditer(output))
    if not heads:
        return None
    found: dict[str, bool] = {}
    for line in output[heads[-1].end() :].splitlines():
        match = _LINE.match(line.strip())
        if match is None or len(found) >= TESTS_MAX:
            continue
        status, rest = match.groups()
        name = rest.split(" - ")[0] if status in {"FAILED", "ERROR"} else rest
        test = name.split("::", maxsplit=1)[-1].strip()
        found[test] = status in _PASSING and found.get(test, True)
    return found


def test_names(source: str) -> list[str]:
    """The names of the test functions in a Python file, in order; none in what is no Python."""
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found: list[str] = []
    for node in module.body:
        members = node.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test") else [node]
        found += [
            member.name
            for member in members
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and member.name.startswith("test")
        ]
    return found
