"""``prorld terminal list``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from prorld.testing.workshop import FakeWorkshop
from prorld_terminal import command
from prorld_terminal.handler import examples_dir


async def listed(place: Path, *words: str) -> tuple[int, FakeWorkshop]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    shop = FakeWorkshop(place)
    return await command.run(parser.parse_args(["list", *words]), shop), shop


async def test_the_examples_become_instances(tmp_path: Path) -> None:
    """One line each, with names below the directory and digests."""
    code, shop = await listed(tmp_path, str(examples_dir()), "--relative", "-o", str(tmp_path / "tasks.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert (code, shop.warned, shop.said[-1]) == (0, [], "7 tasks, 0 folders that can't be used")
    assert [row["task_dir"] for row in rows] == sorted(path.name for path in examples_dir().iterdir() if path.is_dir())
    assert all(len(row["digest"]) == 64 for row in rows)
    assert {row["data_source"] for row in rows} == {"harbor", "terminal-bench"}


async def test_a_folder_that_can_not_be_used_is_told(tmp_path: Path) -> None:
    """And the exit code says so."""
    (tmp_path / "tasks" / "task").mkdir(parents=True)
    (tmp_path / "tasks" / "task" / "task.toml").write_text("[agent\n")
    code, shop = await listed(tmp_path, str(tmp_path / "tasks"))
    assert code == 1
    assert "task.toml" in shop.warned[0]
