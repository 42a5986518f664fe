"""SWE-bench's own grader and ours say the same of every task, for the repair and for no repair.

``PRORLD_SWE_TASKS`` names a file of tasks whose packages were fetched (``prorld swe fetch``); without it, tasks are
made of a small package here. ``scripts/swebench`` brings the other grader, which runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from prorld.handlers import SandboxSpec
from prorld.sandbox.runtime import Runtime
from prorld.testing.jobs import run_handler
from prorld.testing.sandbox_opening import open_sandbox
from prorld_swe import command
from prorld_swe.environment import environment, roots
from prorld_swe.factory.plant import read_tasks
from prorld_swe.factory.tree import file_sha256
from prorld_swe.handler import SweHandler
from prorld_swe.instance import SweInstance
from prorld_swe.repository import ROOT, make_repository
from prorld_swe.sources import Tree, Trees

REPOSITORY = Path(__file__).resolve().parents[4]
PYTHON = REPOSITORY / ".tools/swebench/bin/python"
AT_ONCE = 3
LOG_BYTES = 64 << 20

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="scripts/swebench brings the grader of SWE-bench"),
]


@pytest.fixture
async def rows(kit, tmp_path, monkeypatch) -> list[dict[str, Any]]:
    """The tasks, with their packages in the cache."""
    named = os.environ.get("PRORLD_SWE_TASKS")
    if named:
        return read_tasks(Path(named))
    path = kit.sdist(tmp_path, kit.FILES)
    kept = tmp_path / "packages" / file_sha256(path)
    kept.mkdir(parents=True)
    (kept / path.name).write_bytes(path.read_bytes())
    monkeypatch.setenv("PRORLD_PACKAGES", str(kept.parent))
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    command.add_arguments(parser)
    output = tmp_path / "tasks.jsonl"
    words = ["make", str(path), "-o", str(output), "--per-package", "4", "--times", "2", "--load", "1"]
    assert await command.run(parser.parse_args(words), kit.Shop(tmp_path)) == 0
    return read_tasks(output)


class Renamed:
    """A runtime whose sandboxes have names of their own, so that several runs can be under way at once."""

    def __init__(self, inner: Runtime, name: str) -> None:
        self.name = inner.name
        self.list = inner.list
        self._inner = inner
        self._name = name

    async def run(self, spec: SandboxSpec, *, sandbox_id: str, job_id: str, task_status: Any) -> None:
        """As the inner one does."""
        await self._inner.run(spec, sandbox_id=f"{self._name}-{sandbox_id}", job_id=job_id, task_status=task_status)


async def log_of(runtime: Runtime, row: dict[str, Any], patch: str, number: str, tree: Tree) -> str:
    """What pytest prints in a fresh sandbox with the bug and this patch, between the marks that a harness looks for."""
    task = msgspec.convert(row, SweInstance).task
    async with open_sandbox(runtime, SandboxSpec(workdir=ROOT), sandbox_id=f"log-{number}") as sandbox:
        await make_repository(sandbox, task, tree, hide=False, limit_s=60)
        if patch:
            await sandbox.write_file("/tmp/gold.diff", patch.encode())
            assert (await sandbox.bash(f"cd {ROOT} && git apply /tmp/gold.diff")).exit_code == 0
        python = (await sandbox.bash("command -v python")).text.strip()
        env = {**environment(task, python), "PYTHONPATH": ":".join(roots(task))}
        argv = ["python", "-B", "-m", "pytest", *task.pytest_args, "-rA", "--color=no", "--tb=no", "-q"]
        argv += ["-p", "no:cacheprovider", *task.test_files]
        script = f"cd {ROOT} && env -i {shlex.join(f'{key}={value}' for key, value in env.items())} {shlex.join(argv)}"
        await sandbox.bash(f"({script}) >/tmp/log 2>&1 </dev/null", limit_s=task.limit_s * 2)
        printed = (await sandbox.read_file("/tmp/log", max_bytes=LOG_BYTES)).decode("utf-8", "replace")
    return f"+ : '>>>>> Start Test Output'\n{printed}\n+ : '>>>>> End Test Output'\n"


async def ours(handler: SweHandler, runtime: Renamed, row: dict[str, Any], play: str) -> float:
    """The reward of the handler, for a policy that was written down."""
    chosen = next(each for each in handler.plays(msgspec.convert(row, SweInstance)) if each.name == play)
    run = await run_handler(handler, row, turns=chosen, runtime=runtime)
    return run.grade.reward


def theirs(pairs: list[dict[str, Any]], place: Path) -> list[dict[str, Any]]:
    """What the other grader says, in a process of its own."""
    request = place / "pairs.json"
    request.write_text(json.dumps(pairs))
    child = Path(__file__).with_name("swebench_child.py")
    done = subprocess.run([PYTHON, child, request], capture_output=True, text=True, timeout=600, cwd=place, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


async def test_both_graders_agree(rows, runtime, tmp_path):
    """Repaired: fully resolved, and 1. Not repaired: not resolved, and 0."""
    logs: dict[tuple[int, str], str] = {}
    rewards: dict[tuple[int, str], float] = {}
    limit = trio.CapacityLimiter(AT_ONCE)
    trees = Trees(tmp_path)
    unpacked = [trees.get(msgspec.convert(row, SweInstance).task.sdist) for row in rows]
    handler = SweHandler()

    async def look(at: int, play: str) -> None:
        async with limit:
            patch = rows[at]["patch"] if play == "gold" else ""
            logs[at, play] = await log_of(runtime, rows[at], patch, f"{at}-{play}", unpacked[at])
            rewards[at, play] = await ours(handler, Renamed(runtime, f"{at}-{play}"), rows[at], play)

    async with handler.open(), trio.open_nursery() as nursery:
        for at in range(len(rows)):
            for play in ("gold", "empty"):
                nursery.start_soon(look, at, play)
    keys = sorted(logs)
    said = theirs([{"row": rows[at], "log": logs[at, play]} for at, play in keys], tmp_path)
    wanted = {"gold": ("RESOLVED_FULL", 1.0), "empty": ("RESOLVED_NO", 0.0)}
    wrong = [
        (rows[at]["instance_id"], play, verdict, rewards[at, play])
        for (at, play), verdict in zip(keys, said, strict=True)
        if (verdict["status"], rewards[at, play]) != wanted[play]
    ]
    assert len(said) == 2 * len(rows) > 0
    assert wrong == []
