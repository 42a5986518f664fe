"""One run of a package's tests: a fresh sandbox, the tree with its changes, pytest, and what it told.

What comes back is the word of whatever ran in there. It is decoded strictly and within bounds; a package that lies
about its tests makes bad tasks of itself, which the screens throw away, and can do no more.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final, Literal, Protocol, assert_never

import msgspec
import trio
from msgspec import Meta

from prorld.errors import leaves
from prorld.handlers import CommandResult, Sandbox, SandboxError, SandboxLimits, SandboxSpec

__all__ = ["ROOT", "Bench", "Outcome", "Runtime", "SuitePlan", "SuiteRun", "SuiteTest", "decode_report", "run_suite"]

ROOT: Final = "/testbed"
_PLACE: Final = "/tmp/.factory"  # noqa: S108 - of the sandbox
_REPORT_BYTES: Final = 32 << 20
_OUTPUT_BYTES: Final = 64 << 10
_START_S: Final = 120.0
_APPLY_S: Final = 30.0
# Beyond the limit of the tests: to upload, to end what is left over, to read.
_SPARE_S: Final = 120.0
_TRIES: Final = 3
_ENVIRONMENT: Final = {
    "HOME": "/tmp",  # noqa: S108 - of the sandbox
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "OMP_NUM_THREADS": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}

Outcome = Literal["passed", "failed", "error", "xfail", "skipped"]
Text = Annotated[str, Meta(max_length=8_000)]


class SuiteTest(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="test"):
    """What became of one test, over all its phases."""

    id: Text
    outcome: Outcome
    seconds: float
    message: Text = ""


class _Broken(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="broken"):
    id: Text
    message: Text = ""


class _Module(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="module"):
    id: Text
    file: Text


class _Lines(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="lines"):
    id: Text
    lines: list[int]


class _End(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="end"):
    status: int


_LINE = msgspec.json.Decoder(SuiteTest | _Broken | _Module | _Lines | _End)


class SuitePlan(msgspec.Struct, frozen=True, kw_only=True):
    """How the tests are run. ``tests`` are paths; ``trace`` asks which lines of the code they reach.

    ``patches`` are applied by git, one after the other, before the tests run.
    """

    tests: tuple[str, ...]
    args: tuple[str, ...]
    python_path: tuple[str, ...]
    limit_s: float
    modules: tuple[str, ...] = ()
    load: int = 0
    reversed: bool = False
    trace: bool = False
    failures_max: int | None = None
    patches: tuple[str, ...] = ()


class SuiteRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a run told. ``ended`` says that it came to its own end; ``trouble`` what else there is to say."""

    tests: dict[str, SuiteTest] = {}
    broken: dict[str, str] = {}
    modules: dict[str, str] = {}
    lines: dict[str, list[int]] = {}
    ended: bool = False
    timed_out: bool = False
    status: int | None = None
    seconds: float = 0.0
    trouble: str = ""

    def with_outcome(self, *outcomes: Outcome) -> set[str]:
        """The tests that ended in one of these ways."""
        return {name for name, test in self.tests.items() if test.outcome in outcomes}


class Runtime(Protocol):
    """What makes sandboxes, as a workshop lends it."""

    async def run(
        self,
        spec: SandboxSpec,
        *,
        sandbox_id: str,
        job_id: str,
        task_status: trio.TaskStatus[Sandbox] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Make one and keep it until cancelled."""
        ...


class Bench:
    """Sandboxes for runs: at most ``jobs`` at once, each fresh."""

    def __init__(self, runtime: Runtime, *, image: str | None, jobs: int, limits: SandboxLimits | None = None) -> None:
        self.spec = SandboxSpec(
            image=image,
            workdir=ROOT,
            env=_ENVIRONMENT,
            kernel="plain",
            limits=limits or SandboxLimits(memory_bytes=2 << 30, output_bytes=_OUTPUT_BYTES),
        )
        self.runs = 0
        self._runtime = runtime
        self._limit = trio.CapacityLimiter(jobs)
        self._made = 0

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        """One for the length of a block. Raises ``SandboxError``, also for what the block raises when it is gone."""
        self._made += 1
        name = f"factory-{self._made}"
        try:
            async with self._limit, trio.open_nursery() as nursery:

                async def run(*, task_status: trio.TaskStatus[Sandbox] = trio.TASK_STATUS_IGNORED) -> None:
                    await self._runtime.run(self.spec, sandbox_id=name, job_id="factory", task_status=task_status)

                with trio.fail_after(_START_S):
                    sandbox: Sandbox = await nursery.start(run, name=name)
                yield sandbox
                nursery.cancel_scope.cancel("the run is over")
        except BaseExceptionGroup as group:
            found = _one_of(group)
            if found is None:
                raise
            raise found from group


def _one_of(group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    """What a caller can act upon: a failed sandbox is one error, however many tasks saw it."""
    found = list(leaves(group))
    for kind in (SandboxError, trio.TooSlowError):
        for each in found:
            if isinstance(each, kind) and all(isinstance(other, (kind, trio.Cancelled)) for other in found):
                return each
    return None


@cache
def _runner() -> bytes:
    return files("prorld_swe.factory.guest").joinpath("suite_runner.py").read_bytes()


async def run_suite(bench: Bench, place: Path, changes: Mapping[str, bytes], plan: SuitePlan) -> SuiteRun:
    """Run the tests of the tree at ``place``, with these files in place of its own.

    A run that used its sandbox up is one that did not end; a sandbox that can't be had is tried again, then raised.
    """
    for left in reversed(range(_TRIES)):
        try:
            async with bench.sandbox() as sandbox:
                with trio.fail_after(plan.limit_s + _SPARE_S):
                    return await _run(bench, sandbox, place, changes, plan)
        except trio.TooSlowError:
            return SuiteRun(timed_out=True, trouble="the sandbox did not answer in time")
        except SandboxError as exc:
            if exc.stable_code in {"sandbox_out_of_memory", "sandbox_out_of_disk"}:
                return SuiteRun(trouble=exc.message)
            if not left or not exc.may_retry:
                raise
    raise AssertionError("the last try returns or raises")


async def _run(bench: Bench, sandbox: Sandbox, place: Path, changes: Mapping[str, bytes], plan: SuitePlan) -> SuiteRun:
    bench.runs += 1
    await sandbox.upload(place, ROOT)
    for path, data in changes.items():
        await sandbox.write_file(f"{ROOT}/{path}", data)
    for number, patch in enumerate(plan.patches):
        await sandbox.write_file(f"{_PLACE}/{number}.diff", patch.encode())
        done = await sandbox.bash(
            f"cd {ROOT} && git apply --whitespace=nowarn {_PLACE}/{number}.diff", limit_s=_APPLY_S
        )
        if done.exit_code or done.timed_out:
            return SuiteRun(trouble=f"git can't apply the patch: {_end_of(done)}")
    report = f"{_PLACE}/report.jsonl"
    args = [*plan.args, "-q", "--tb=short", "--show-capture=no", "-p", "no:cacheprovider"]
    args += [] if plan.failures_max is None else [f"--maxfail={plan.failures_max}"]
    request = {
        "path": [ROOT if path == "." else f"{ROOT}/{path}" for path in plan.python_path],
        "args": [*args, *plan.tests],
        "report": report,
        "reversed": plan.reversed,
        "modules": list(plan.modules),
        "trace": f"{ROOT}/" if plan.trace else "",
        "load": plan.load,
    }
    await sandbox.write_file(f"{_PLACE}/request.json", msgspec.json.encode(request))
    await sandbox.write_file(f"{_PLACE}/runner.py", _runner())
    command = f"cd {ROOT} && python -I -B {_PLACE}/runner.py {_PLACE}/request.json </dev/null"
    done = await sandbox.bash(
        f"timeout -s KILL {plan.limit_s:.1f} bash -c {shlex.quote(command)}", limit_s=plan.limit_s + 30
    )
    if done.timed_out or done.exit_code == 137:
        return SuiteRun(timed_out=done.timed_out or done.duration_s >= plan.limit_s - 1, seconds=done.duration_s)
    try:
        written = await sandbox.read_file(report, max_bytes=_REPORT_BYTES)
    except (OSError, ValueError) as exc:
        return SuiteRun(seconds=done.duration_s, trouble=f"no report: {exc}; {_end_of(done)}")
    return decode_report(written, done.duration_s, _end_of(done))


def _end_of(done: CommandResult) -> str:
    return done.text[-2000:].strip()


def decode_report(written: bytes, seconds: float, said: str) -> SuiteRun:
    """The report of a run; one that can't be read is a run that did not end."""
    tests: dict[str, SuiteTest] = {}
    broken: dict[str, str] = {}
    modules: dict[str, str] = {}
    lines: dict[str, list[int]] = {}
    status: int | None = None
    for number, line in enumerate(written.split(b"\n"), 1):
        if not line:
            continue
        try:
            told = _LINE.decode(line)
        except msgspec.DecodeError as exc:
            return SuiteRun(seconds=seconds, trouble=f"line {number} of the report: {exc}; {said}")
        match told:
            case SuiteTest():
                tests[told.id] = told
            case _Broken():
                broken[told.id] = told.message
            case _Module():
                modules[told.id] = told.file
            case _Lines():
                lines[told.id.removeprefix(f"{ROOT}/")] = told.lines
            case _End(status=ended):
                status = ended
            case _:
                assert_never(told)
    return SuiteRun(
        tests=tests,
        broken=broken,
        modules=modules,
        lines=lines,
        # 0 and 1: all passed, some failed. Anything else is no run of the tests.
        ended=status in {0, 1},
        status=status,
        seconds=seconds,
        trouble=said if status not in {0, 1} else "",
    )
