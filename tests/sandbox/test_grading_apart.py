"""Grading apart in real sandboxes: what a hostile rollout leaves behind does not reach its grader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec
import pytest

from prorld.domain.messages import Message, user
from prorld.domain.outcome import StopReason
from prorld.handlers import (
    USED_UP,
    AgentHandler,
    Grade,
    JobContext,
    RunResult,
    SandboxError,
    SandboxLimits,
    SandboxSpec,
)
from prorld.sandbox.runtime import Runtime
from prorld.testing.jobs import HandlerRun, run_handler

SEEN = "pwd; ls -A; ls -A /tmp; jobs; alias; trap; declare -F; ls; true; echo $?; ps -e -o comm= 2>/dev/null | sort -u"


class Deed(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy does in its sandbox, as a command."""

    command: str


class Patch(AgentHandler[Deed]):
    """Its work is ``fix.diff``; the grade says what the grader sees."""

    name = "patch"
    instance_type = Deed
    carried_files: ClassVar[tuple[str, ...]] = ("fix.diff",)
    carry_bytes_max: ClassVar[int] = 100_000
    seen = ""
    found: bytes | None = None

    def sandbox_spec(self, instance: Deed) -> SandboxSpec:
        return SandboxSpec()

    def grading_sandbox(self, instance: Deed) -> SandboxSpec:
        return SandboxSpec()

    def prompt(self, instance: Deed) -> Sequence[Message]:
        return [user("Repair it.")]

    async def run(self, job: JobContext[Deed]) -> RunResult:
        await job.sandbox.bash(job.instance.command, limit_s=20.0)
        return RunResult(stop=StopReason.FINISHED)

    async def evaluate(self, job: JobContext[Deed], result: RunResult) -> Grade:
        self.found = job.carried.get("fix.diff")
        self.seen = (await job.sandbox.bash(SEEN)).text
        return Grade(reward=float((await job.sandbox.bash("false")).exit_code))


async def graded(runtime: Runtime, command: str) -> tuple[Patch, HandlerRun]:
    handler = Patch()
    run = await run_handler(handler, {"command": command}, turns=[], runtime=runtime)
    assert runtime.list() == ()
    return handler, run


async def test_nothing_but_the_work_gets_across(runtime: Runtime) -> None:
    """Functions, traps, aliases, background processes, files elsewhere: the grader sees what it sees after no work."""
    clean, _ = await graded(runtime, "echo '+ right' > fix.diff")
    tricks = (
        "echo '+ right' > fix.diff; touch mark .hidden /tmp/mark; alias ls='echo fooled'; false() { return 0; }; "
        "trap 'echo trapped' DEBUG EXIT; export PROMPT_COMMAND='echo fooled'; setsid sleep 1000 & sleep 1000 & "
        "(while :; do touch mark; sleep 0.01; done) & ulimit -f 0"
    )
    hostile, run = await graded(runtime, tricks)
    assert hostile.found == clean.found == b"+ right\n"
    assert hostile.seen == clean.seen
    assert "fix.diff" in hostile.seen
    assert run.grade.reward == 1.0


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("true", None),
        ("mkdir fix.diff", None),
        ("ln -s /nowhere fix.diff", None),
        ("echo secret > fix.diff; chmod 0 fix.diff", None),
        ("ln -s /etc/hostname fix.diff; echo in-the-sandbox > other; ln -sf other fix.diff", b"in-the-sandbox\n"),
        ("head -c 100000 /dev/zero > fix.diff", b"\0" * 100_000),
        ("head -c 100001 /dev/zero > fix.diff", None),
        ("truncate -s 900M fix.diff", None),
        ("mkfifo fix.diff", None),
        ("ln -s /dev/zero fix.diff", None),
        ("ln -s fix.diff fix.diff", None),
        ("touch other; ln -s other/fix.diff fix.diff", None),
    ],
    ids=[
        "nothing",
        "directory",
        "dangling link",
        "closed",
        "link",
        "as large as allowed",
        "too large",
        "huge",
        "a pipe",
        "a device",
        "a link to itself",
        "behind a file",
    ],
)
async def test_what_a_policy_may_leave(command: str, found: bytes | None, runtime: Runtime) -> None:
    """What is not there as a file that can be read is left out at once, whatever is there instead, and graded so."""
    handler, run = await graded(runtime, command)
    assert handler.found == found
    assert run.grade.reward == 1.0


class Running(Patch):
    """Its grader runs what was carried, in a small sandbox."""

    def grading_sandbox(self, instance: Deed) -> SandboxSpec:
        return SandboxSpec(limits=SandboxLimits(memory_bytes=64 << 20))

    async def evaluate(self, job: JobContext[Deed], result: RunResult) -> Grade:
        try:
            done = await job.sandbox.bash("bash fix.diff", limit_s=20.0)
        except SandboxError as exc:
            if exc.stable_code not in USED_UP:
                raise
            return Grade(reward=0.0, parts={"used_up": 1.0})
        return Grade(reward=float(done.exit_code == 0))


@pytest.mark.slow
async def test_work_that_uses_the_grading_sandbox_up_can_be_graded(runtime: Runtime) -> None:
    """The grader hears of it at the call that it waits for, and its grade stands."""
    greedy = "head -c 200000000 /dev/zero >/dev/shm/held; sleep 15"
    for work, reward, parts in (("true", 1.0, {}), (greedy, 0.0, {"used_up": 1.0})):
        run = await run_handler(Running(), {"command": f"echo '{work}' >fix.diff"}, turns=[], runtime=runtime)
        assert (run.grade.reward, run.grade.parts) == (reward, parts)
        assert runtime.list() == ()
