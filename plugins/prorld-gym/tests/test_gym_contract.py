"""The contract of handlers, and the command."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from prorld.testing.handler_contract import HANDLER_CONTRACT, HandlerCheck, HandlerUnderTest
from prorld.testing.workshop import FakeWorkshop
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


async def called(place: Path, *words: str) -> tuple[int, FakeWorkshop]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    shop = FakeWorkshop(place)
    return await command.run(parser.parse_args(list(words)), shop), shop


@pytest.mark.slow
async def test_rows_are_made_and_checked(tmp_path: Path) -> None:
    """A generator that is not there is told, and takes nothing from the others."""
    path = tmp_path / "rows.jsonl"
    code, shop = await called(tmp_path, "make", "--env", "chain_sum", "--env", "none", "--n", "60", "-o", str(path))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert (code, len(rows), len(shop.warned)) == (1, 60, 1)
    assert len({row["question"] for row in rows}) > 50
    assert all(row["metadata"]["source_dataset"] == "chain_sum" for row in rows)
    code, shop = await called(tmp_path, "check", "--env", "gcd", "--n", "2")
    assert (code, shop.said[-1]) == (0, "1 of 1 generators agree with themselves")


@pytest.mark.parametrize("words", [("make", "--env", "gcd"), ("check",), ("check", "--all", "--n", "0")])
async def test_what_is_missing_is_told(words: tuple[str, ...], tmp_path: Path) -> None:
    code, shop = await called(tmp_path, *words, "--keywords", "[]")
    assert (code, len(shop.warned)) == (64, 1)
