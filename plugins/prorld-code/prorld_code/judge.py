"""EVAL: a solution is run in the grading sandbox, and what came out is compared here.

What the tests want never leaves this side. Where they are code, that code goes into the sandbox, but not where the
solution can reach it; ``guest.runner`` says how. All that comes back is data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
import trio

from prorld.handlers import GraderError, Sandbox
from prorld_code.comparing import is_right
from prorld_code.guest.plain import pack
from prorld_code.guest.runner import READY
from prorld_code.problem import Problem, Test

__all__ = ["Assignment", "Judge", "Outcome", "Trouble"]

PLACE: Final = "/tmp/prorld-code"  # noqa: S108 - of a sandbox that nobody else is in
# A batch is one call of the sandbox. The first is small: what is wrong mostly shows at once.
FIRST_BATCH: Final = 8
BATCH_GROWTH: Final = 4
BATCH_MAX: Final = 128
BATCH_BYTES: Final = 16 << 20
OUTPUT_BYTES_MIN: Final = 64 << 10
# Beside all limits of the runs themselves.
CALL_GRACE_S: Final = 180.0
STACK_KIB: Final = 256 << 10
STACK_BYTES: Final = 1 << 30
TAIL_CHARS: Final = 300
_MISSING = frozenset({126, 127})


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """A solution, its tests and its limits."""

    problem: Problem
    tests: list[Test]
    code: str
    python: str
    stop: bool
    cpu_s: float
    wall_s: float
    total_s: float
    memory_bytes: int
    timeouts_max: int
    tolerance: float


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as the runner tells of it."""

    status: Literal["ok", "crashed", "time", "memory", "output", "passed", "failed", "judge"]
    cpu_s: float
    wall_s: float
    out: str = ""
    note: str = ""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What the runner writes down."""

    runs: list[Run] = []
    syntax: str | None = None
    trouble: str | None = None


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """The first test that went wrong: which one, in what way, and the last line of what the solution complained."""

    test: int
    kind: str
    note: str = ""


class Outcome(msgspec.Struct, kw_only=True):
    """What is known so far."""

    tests: int
    passed: int = 0
    run: int = 0
    timeouts: int = 0
    wall_s: float = 0.0
    syntax: str | None = None
    first: Trouble | None = None

    def take(self, run: Run, *, right: bool) -> None:
        """Count a run."""
        self.passed += right
        self.timeouts += run.status == "time"
        self.wall_s += run.wall_s
        if not right and self.first is None:
            kind = "wrong" if run.status == "ok" else run.status
            self.first = Trouble(test=self.run, kind=kind, note=run.note)
        self.run += 1


class Judge:
    """Runs solutions; it holds nothing but the runner's bytes."""

    def __init__(self, bundle: bytes) -> None:
        self._bundle = bundle

    async def judge(self, sandbox: Sandbox, work: Assignment) -> Outcome:
        """All tests, or as many as it takes. Raises ``GraderError`` for what says nothing about the solution."""
        await _write(sandbox, f"{PLACE}/runner.zip", self._bundle)
        outcome = Outcome(tests=1 if work.problem.kind == "check" else len(work.tests))
        if work.problem.kind == "check":
            for run in await self._batch(sandbox, work, [], outcome):
                outcome.take(run, right=run.status == "passed")
            return outcome
        size = FIRST_BATCH
        while outcome.run < outcome.tests:
            batch = _batch_of(work.tests[outcome.run :], size if work.stop else BATCH_MAX)
            runs = await self._batch(sandbox, work, batch, outcome)
            # In a thread: long outputs take their time, in proportion to their length.
            rights = await trio.to_thread.run_sync(_compare, work, batch, runs)
            for run, right in zip(runs, rights, strict=True):
                outcome.take(run, right=right)
            if len(runs) < len(batch) or (work.stop and outcome.first is not None) or _is_over(work, outcome):
                break
            size = min(size * BATCH_GROWTH, BATCH_MAX)
        return outcome

    async def _batch(self, sandbox: Sandbox, work: Assignment, tests: Sequence[Test], outcome: Outcome) -> list[Run]:
        job = _job(work, tests, timeouts=outcome.timeouts, spent_s=outcome.wall_s)
        # Not msgspec: texts out of JSON within JSON may hold half of a surrogate pair.
        await _write(sandbox, f"{PLACE}/job.json", json.dumps(job).encode())
        if work.problem.kind == "check":
            await _write(sandbox, f"{PLACE}/checks.json", json.dumps({"tests": work.problem.checks}).encode())
        limit_s = work.total_s + work.wall_s + CALL_GRACE_S
        done = await sandbox.bash(_command(work.python), limit_s=limit_s)
        if READY not in done.text:
            why = "there is no such interpreter" if done.exit_code in _MISSING else "the runner did not begin"
            message = f"{work.python}: {why}: {done.text.strip()[-TAIL_CHARS:]}"
            raise GraderError(message, code="grader_not_started")
        body = await _read(sandbox, f"{PLACE}/result.json", _result_bytes(tests))
        try:
            result = msgspec.json.decode(body, type=Result)
        except msgspec.DecodeError as exc:
            raise GraderError("the runner wrote what can't be read", code="grader_bad_output") from exc
        if result.trouble is not None:
            raise GraderError(f"the tests could not be run: {result.trouble[:TAIL_CHARS]}", code="grader_failed")
        outcome.syntax = result.syntax
        return result.runs[: max(1, len(tests))]


def _is_over(work: Assignment, outcome: Outcome) -> bool:
    return outcome.syntax is not None or outcome.timeouts >= work.timeouts_max or outcome.wall_s > work.total_s


def _compare(work: Assignment, tests: Sequence[Test], runs: Sequence[Run]) -> list[bool]:
    return [
        run.status == "ok" and is_right(work.problem.kind, test, run.out, work.tolerance)
        for test, run in zip(tests, runs, strict=False)
    ]


def _batch_of(tests: Sequence[Test], size: int) -> list[Test]:
    batch: list[Test] = []
    total = 0
    for test in tests[:size]:
        total += test.size + _cap(test)
        if batch and total > BATCH_BYTES:
            break
        batch.append(test)
    return batch


def _cap(test: Test) -> int:
    """What a run may say: several times what is wanted, as a power of two so that it tells nothing more."""
    wanted = test.wanted if isinstance(test.wanted, str) else json.dumps(test.wanted)
    return max(OUTPUT_BYTES_MIN, 1 << (4 * len(wanted)).bit_length())


def _result_bytes(tests: Sequence[Test]) -> int:
    # A byte of output is six of JSON at worst; what says more than all its runs may is no result.
    return 6 * sum(_cap(test) for test in tests) + 4096 * (len(tests) + 4)


def _job(work: Assignment, tests: Sequence[Test], *, timeouts: int, spent_s: float) -> dict[str, Any]:
    problem = work.problem
    given = [test.given if problem.kind == "program" else [pack(value) for value in test.given] for test in tests]
    return {
        "kind": problem.kind,
        "code": work.code,
        "name": problem.name,
        "prompt": problem.prompt,
        "checks": f"{PLACE}/checks.json",
        "inputs": given,
        "caps": [_cap(test) for test in tests],
        "stop": work.stop,
        "cpu_s": work.cpu_s,
        "wall_s": work.wall_s,
        "judge_s": work.cpu_s + work.wall_s,
        "judge_bytes": work.memory_bytes + STACK_BYTES,
        "total_s": max(0.0, work.total_s - spent_s),
        "memory_bytes": work.memory_bytes,
        "address_bytes": work.memory_bytes + STACK_BYTES,
        "timeouts_max": max(1, work.timeouts_max - timeouts),
    }


def _command(python: str) -> str:
    """A large stack, for deep recursion, and nothing of this shell's environment but where programs are found."""
    return (
        f"(cd / && {{ ulimit -s {STACK_KIB} 2>/dev/null || ulimit -s $(ulimit -Hs); }}; rm -f {PLACE}/result.json; "
        'exec env -i PATH="$PATH" ${LD_LIBRARY_PATH:+LD_LIBRARY_PATH="$LD_LIBRARY_PATH"} LC_ALL=C.UTF-8 TMPDIR=/tmp '
        "PYTHONHASHSEED=0 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 "
        f"{python} -s -B {PLACE}/runner.zip {PLACE}/job.json {PLACE}/result.json)"
    )


async def _write(sandbox: Sandbox, path: str, data: bytes) -> None:
    try:
        await sandbox.write_file(path, data)
    except OSError as exc:
        raise GraderError(f"{path} can't be written in the grading sandbox: {exc}", code="grader_not_started") from exc


async def _read(sandbox: Sandbox, path: str, max_bytes: int) -> bytes:
    try:
        return await sandbox.read_file(path, max_bytes=max_bytes)
    except (OSError, ValueError) as exc:
        raise GraderError(f"the runner left no result: {exc}", code="grader_lost", retryable=True) from exc
