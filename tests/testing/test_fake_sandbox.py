"""The fake's own extras: scripts, delays, faults, deaths."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from prorld.errors import SandboxError
from prorld.sandbox.contract import CommandResult
from prorld.testing.fake_sandbox import After, Answer, FakeRuntime, SessionName
from prorld.testing.sandbox_contract import open_sandbox


async def test_script(autojump_clock: trio.testing.MockClock) -> None:
    """The script decides what a call answers, how long it takes and what it raises."""

    def answer(session: SessionName, code: str) -> Answer:
        if code == "slow":
            return After(5.0, CommandResult(exit_code=7, output=b"done"))
        return ValueError("on purpose") if code == "raise" else 3.0

    runtime = FakeRuntime(answer)
    async with open_sandbox(runtime) as sandbox:
        result = await sandbox.bash("slow")
        assert (result.exit_code, result.output, result.duration_s) == (7, b"done", 5.0)
        assert (await sandbox.python("other")).duration_s == 3.0
        assert (await sandbox.bash("slow", limit_s=4)).timed_out
        with pytest.raises(ValueError, match="on purpose"):
            await sandbox.bash("raise")
        assert runtime.live["contract-1"].calls == [
            ("bash", "slow"),
            ("python", "other"),
            ("bash", "slow"),
            ("bash", "raise"),
        ]


async def test_faults(autojump_clock: trio.testing.MockClock) -> None:
    """The named starts and calls fail, the others don't, and nothing stays alive."""
    runtime = FakeRuntime(fail_starts={2}, fail_calls={2})
    async with open_sandbox(runtime) as sandbox:
        await sandbox.bash("echo a")
        with pytest.raises(SandboxError):
            await sandbox.bash("echo b")
        await sandbox.bash("echo c")
    with pytest.raises(SandboxError):
        await runtime.run(sandbox.spec, sandbox_id="x", job_id="j")  # type: ignore[attr-defined]  # the fake has it
    assert runtime.live == {}


async def test_death(autojump_clock: trio.testing.MockClock) -> None:
    """A sandbox that dies by itself ends its actor, and a call that is under way hears of it."""
    runtime = FakeRuntime(die_after_s=1.0)
    with pytest.RaisesGroup(SandboxError, flatten_subgroups=True):
        async with open_sandbox(runtime) as sandbox:
            await sandbox.bash("sleep 100", limit_s=200)
    assert runtime.live == {}
