"""The contract of handlers, and the command."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from prorld.testing.handler_contract import HANDLER_CONTRACT, HandlerCheck, HandlerUnderTest
from prorld_gym import command
from prorld_gym.handler import GymHandler
from prorld_gym.instance import GymConfig

SUM = {"question": "1 + 1 =", "answer": "2", "metadata": {"source_dataset": "chain_sum"}}


@pytest.mark.slow
@pytest.mark.parametrize("check", HANDLER_CONTRACT, ids=lambda check: check.__name__)
async def test_the_handler_contract(check: HandlerCheck) -> None:
    """On a ready row."""
    handler = GymHandler(GymConfig(children=1, score_s=30.0))
    await check(HandlerUnderTest(handler=handler, instances=[SUM]))


class Shop:
    """What a command is lent, kept for looking at."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.warned: list[str] = []

    def say(self, *lines: str) -> None:
        self.said += lines

    def warn(self, line: str) -> None:
        self.warned.append(line)

    def progress(self, line: str) -> None:
        assert line


async def called(*words: str) -> tuple[int, Shop]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    shop: Any = Shop()
    return await command.run(parser.parse_args(list(words)), shop), shop


@pytest.mark.slow
async def test_rows_are_made_and_checked(tmp_path: Path) -> None:
    """A generator that is not there is told, and takes nothing from the others."""
    path = tmp_path / "rows.jsonl"
    code, shop = await called("make", "--env", "chain_sum", "--env", "none", "--n", "60", "-o", str(path))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert (code, len(rows), len(shop.warned)) == (1, 60, 1)
    assert len({row["question"] for row in rows}) > 50
    assert all(row["metadata"]["source_dataset"] == "chain_sum" for row in rows)
    code, shop = await called("check", "--env", "gcd", "--n", "2")
    assert (code, shop.said[-1]) == (0, "1 of 1 generators agree with themselves")


@pytest.mark.parametrize("words", [("make", "--env", "gcd"), ("check",), ("check", "--all", "--n", "0")])
async def test_what_is_missing_is_told(words: tuple[str, ...]) -> None:
    code, shop = await called(*words, "--keywords", "[]")
    assert (code, len(shop.warned)) == (2, 1)


async def test_without_the_library_nothing_is_written(tmp_path: Path) -> None:
    """What helps is told once, and tasks that were made before stay."""
    # The system's, which graders' users can run; what this environment has is not beside it.
    bare = shutil.which("python3", path="/usr/bin:/bin")
    if bare is None:
        pytest.skip("the system has no Python of its own")
    path = tmp_path / "rows.jsonl"
    path.write_text("mine\n")
    code, shop = await called("make", "--env", "gcd", "--env", "chain_sum", "--python", bare, "-o", str(path))
    assert (code, len(shop.warned), path.read_text()) == (1, 1, "mine\n")
    assert "prorld-gym[reasoning-gym]" in shop.warned[0]
