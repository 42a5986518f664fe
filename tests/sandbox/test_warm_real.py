"""Warm sandboxes behind a real wall: the contract, take-over, limits after it, and what is left."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import trio

from prorld.errors import SandboxError
from prorld.sandbox.apptainer import Apptainer
from prorld.sandbox.contract import SandboxLimits, SandboxSpec
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.warden_client import Warden
from prorld.sandbox.warm import WarmRuntime
from prorld.sandbox.warm_plan import WarmRules
from prorld.testing.sandbox_contract import SandboxCheck, open_sandbox, sandbox_checks
from tests.sandbox.support import (
    BOOT_ID,
    children,
    descendants_named,
    lives,
    on_disk,
    real_apptainer,
    real_image,
)

KEPT = 2
READY_S = 20.0


@pytest.fixture
async def warm(runtime: Runtime) -> AsyncIterator[WarmRuntime]:
    """Two of the plain spec are ready; after the test none is left."""
    made = WarmRuntime(runtime, WarmRules(images={"": KEPT}), boot_id=BOOT_ID)
    async with trio.open_nursery() as nursery:
        await nursery.start(made.keep)
        await ready(made)
        yield made
        nursery.cancel_scope.cancel()
    assert runtime.list() == ()


async def ready(warm: WarmRuntime, count: int = KEPT) -> None:
    """So many wait."""
    with trio.fail_after(READY_S):
        while warm.idle < count:  # noqa: ASYNC110 - nothing in it waits for the pool to be full
            await trio.sleep(0.01)


@pytest.mark.parametrize("check", sandbox_checks(), ids=lambda check: check.name)
async def test_warm_bubblewrap_keeps_the_contract(check: SandboxCheck, warm: WarmRuntime) -> None:
    """What jobs are lent answers as what is started for them."""
    await check.run(warm)


@pytest.mark.parametrize("check", sandbox_checks(), ids=lambda check: check.name)
async def test_cold_bubblewrap_keeps_the_contract(check: SandboxCheck, runtime: Runtime) -> None:
    """Under admission alone, too."""
    await check.run(WarmRuntime(runtime, WarmRules(total=0), boot_id=BOOT_ID, starts_max=1))


async def test_a_warm_sandbox_may_begin_with_an_interpreter(runtime: Runtime) -> None:
    """The check of it leaves no trace there, and starts no shell."""
    warm, spec = WarmRuntime(runtime, WarmRules(), boot_id=BOOT_ID), SandboxSpec(kernel="ipython", first="python")
    async with trio.open_nursery() as nursery:
        await nursery.start(warm.keep)
        warm.expect(spec)
        await ready(warm, 1)
        async with open_sandbox(warm, spec) as sandbox:
            assert (await sandbox.python("In, len(Out)")).output == b"(['', 'In, len(Out)'], 0)\n"
            running = await sandbox.python(
                "import glob\nsorted(open(f).read() for f in glob.glob('/proc/[0-9]*/comm'))"
            )
            assert running.output.count(b"bash") == 1
        nursery.cancel_scope.cancel()


async def test_a_warm_interpreter_says_what_a_cold_one_says(runtime: Runtime) -> None:
    """Rollouts of a group must not differ by which of them got a sandbox that waited: tracebacks name their cell."""
    said, spec = list[str](), SandboxSpec(kernel="plain", first="python")
    warm = WarmRuntime(runtime, WarmRules(), boot_id=BOOT_ID)
    async with trio.open_nursery() as nursery:
        await nursery.start(warm.keep)
        warm.expect(spec)
        await ready(warm, 1)
        for kind in (warm, runtime):
            async with open_sandbox(kind, spec) as sandbox:
                said.append((await sandbox.python("1 / 0")).text)
        nursery.cancel_scope.cancel()
    assert said[0] == said[1]
    assert '"<cell 1>"' in said[0]


@pytest.mark.real
@pytest.mark.parametrize("check", sandbox_checks(), ids=lambda check: check.name)
async def test_warm_apptainer_keeps_the_contract(check: SandboxCheck, warden: Warden, runtime_dir: Path) -> None:
    """So does another wall, on an image."""
    wall, image = Apptainer(real_apptainer()), str(real_image("directory"))
    inner = Runtime(wall, warden, runtime_dir=runtime_dir, boot_id=BOOT_ID, default_image=image)
    warm = WarmRuntime(inner, WarmRules(images={"": KEPT}), boot_id=BOOT_ID)
    async with trio.open_nursery() as nursery:
        await nursery.start(warm.keep)
        await ready(warm)
        await check.run(warm)
        nursery.cancel_scope.cancel()
    assert inner.list() == ()


async def test_it_waits_under_the_boots_name(warm: WarmRuntime, runtime_dir: Path) -> None:
    """Listed without a job, with memory and age, and with a directory that the reaper knows by its boot."""
    rows = warm.list()
    assert [row.job_id for row in rows] == [""] * KEPT
    assert all(row.sandbox_id.startswith(f"{BOOT_ID}-warm-") for row in rows)
    assert all(row.rss_bytes > 1 << 20 and row.age_s > 0 and row.state == "up" for row in rows)
    assert set(on_disk(runtime_dir)) == {row.sandbox_id for row in rows}


async def test_a_lent_one_is_gone_when_its_job_is(warm: WarmRuntime, runtime_dir: Path) -> None:
    """Every process and the directory of it, at the moment the job's block has been left; the other one lives on."""
    before = on_disk(runtime_dir)
    async with open_sandbox(warm, sandbox_id="job-1") as sandbox:
        assert {row.sandbox_id for row in warm.list()} >= {"job-1"}
        await sandbox.bash("sleep 1000 & setsid sleep 1000 & sleep 0.2")
        sleepers = descendants_named(os.getpid(), "sleep")
        assert len(sleepers) == 2
    assert not any(lives(pid) for pid in sleepers)
    left = set(before) & set(on_disk(runtime_dir))
    assert len(left) == KEPT - 1


@pytest.mark.slow
async def test_jobs_get_what_others_have_not_touched(warm: WarmRuntime) -> None:
    """Files, variables, jobs, the directory and the last exit code of a session: as those of a cold one."""
    ask = "pwd; ls -A; jobs; echo $?; env | sort; set -o; shopt; trap; alias; declare -F"
    with_name = SandboxSpec(env={"PLAIN": "1"})
    async with open_sandbox(warm, with_name, sandbox_id="cold") as sandbox:
        wanted = (await sandbox.bash(ask)).text.replace("PLAIN=1\n", "")
    for number in range(3):
        await ready(warm, 1)
        async with open_sandbox(warm, sandbox_id=f"job-{number}") as sandbox:
            assert (await sandbox.bash(ask)).text == wanted
            await sandbox.bash("touch mark; x=1; sleep 1000 & cd /tmp; trap 'echo bye' EXIT; alias ls=false; set -u")
            await sandbox.write_file("more", b"1")


def too_large(error: SandboxError) -> bool:
    return error.stable_code == "sandbox_out_of_memory"


@pytest.mark.slow
async def test_limits_hold_after_take_over(runtime: Runtime) -> None:
    """A lent sandbox that holds too much memory ends its job with the code."""
    spec = SandboxSpec(limits=SandboxLimits(memory_bytes=64 << 20))
    warm = WarmRuntime(runtime, WarmRules(), boot_id=BOOT_ID)
    async with trio.open_nursery() as nursery:
        await nursery.start(warm.keep)
        warm.expect(spec)
        await ready(warm, 1)
        with pytest.RaisesGroup(pytest.RaisesExc(SandboxError, check=too_large)):
            async with open_sandbox(warm, spec, sandbox_id="job-1") as sandbox:
                await sandbox.bash("head -c 100000000 /dev/zero > /tmp/big")
                await trio.sleep(20.0)
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_the_warden_dies_under_warm_ones(warm: WarmRuntime) -> None:
    """They die with it, no job gets a dead one, and the pool fills again."""
    old = {row.sandbox_id for row in warm.list()}
    os.kill(min(children()), signal.SIGKILL)
    with trio.fail_after(READY_S):
        while old & {row.sandbox_id for row in warm.list()}:  # noqa: ASYNC110 - as above
            await trio.sleep(0.01)
    await ready(warm)
    async with open_sandbox(warm) as sandbox:
        assert (await sandbox.bash("echo on")).text == "on\n"


@pytest.mark.slow
async def test_random_cancels_leave_nothing(runtime: Runtime, runtime_dir: Path) -> None:
    """Eighty jobs on three warm ones, most given up at any moment: the patient are served, and nothing is left."""
    draw = random.Random(11)
    warm = WarmRuntime(runtime, WarmRules(images={"": 3}), boot_id=BOOT_ID, starts_max=3)
    served: list[str] = []

    async def job(name: str, *, patient: bool) -> None:
        with trio.move_on_after(60.0 if patient else draw.choice([0.0, 0.001, 0.003, 0.01, 0.03, 0.1])):
            async with open_sandbox(warm, sandbox_id=name) as sandbox:
                result = await sandbox.bash(f"ls mark; (setsid sleep 1000 &); echo {name} > mark; cat mark")
                assert result.text.endswith(f"No such file or directory\n{name}\n"), result
                served.append(name)
        assert name not in {row.sandbox_id for row in warm.list()}

    async with trio.open_nursery() as nursery:
        await nursery.start(warm.keep)
        async with trio.open_nursery() as jobs:
            for number in range(80):
                jobs.start_soon(partial(job, f"job-{number}", patient=number % 4 == 0))
                await trio.sleep(draw.random() / 50)
        assert {f"job-{number}" for number in range(0, 80, 4)} <= set(served)
        await ready(warm, 3)
        assert not descendants_named(os.getpid(), "sleep")
        nursery.cancel_scope.cancel()
    seen = warm.admission.statistics()
    assert (seen.peak, seen.starting, seen.waiting) == (3, 0, 0)
    assert on_disk(runtime_dir) == []
