"""Engines that fall, leave and come back while their policy is paused: nothing waits for ever, nothing is lost."""

from __future__ import annotations

import pytest
import trio

from prorld.inference.pool_entry import EngineRules
from prorld.testing.fake_backend import FakeBackend
from prorld.wire.jobs import JobRecord
from prorld.wire.policies import PausePolicy, ResumePolicy
from tests.inference.test_policy_control import assert_sound, engine, ids, states, updated
from tests.rollout.support import Room, room


class Dull(FakeBackend):
    """Its health check and its calls have nothing to do with each other."""

    is_ill = False

    async def healthy(self) -> bool:
        await trio.lowlevel.checkpoint()
        return not self.is_ill


def dull(name: str = "dull") -> Dull:
    return Dull(engine().script, url=f"fake://{name}")


async def ended(here: Room, job_id: str, seconds: float = 500.0) -> JobRecord:
    """Its record, before long."""
    with trio.fail_after(seconds):
        return await here.supervisor.wait_done(job_id, "tests")


async def test_an_engine_is_removed_with_calls_frozen_in_it(autojump_clock) -> None:
    """Nobody will ever tell it to go on, so its calls end when the policy does, and are made elsewhere."""
    async with room(backends=[engine("one"), engine("two")]) as here:
        await here.submit("j", timeouts={"run_s": 100.0})
        await trio.sleep(3.5)
        paused = await here.policies.pause("default", PausePolicy(mode="keep"), "alice")
        (entry,) = [e for e in here.pool.entries("default") if e.row.leases]
        await here.pool.remove(entry.backend_id)
        await trio.sleep(10)
        await here.policies.resume("default", ResumePolicy(pause_id=paused.pause_id, version=0))
        await assert_sound(here, await ended(here, "j"))
        here.assert_clean()


@pytest.mark.parametrize("version", [0, 1])
async def test_an_engine_is_down_when_its_policy_goes_on(autojump_clock, version: int) -> None:
    """Frozen calls in it end; and it does not come back asleep."""
    ill = dull()
    async with room(backends=[ill]) as here:
        await here.submit("j", timeouts={"run_s": 100.0})
        await trio.sleep(3.5)
        paused = await here.policies.pause("default", PausePolicy(mode="keep"), "alice")
        ill.is_ill = True
        await trio.sleep(10)
        assert states(here) == {"dull": "down"}
        await here.policies.resume("default", ResumePolicy(pause_id=paused.pause_id, version=version))
        ill.is_ill = False
        await trio.sleep(20)
        if version:
            await updated(here, 1, how="none", backends=[ids(here)["dull"]])
        assert states(here) == {"dull": "up"}
        await assert_sound(here, await ended(here, "j"))
        await assert_sound(here, await here.finish("k", timeouts={"run_s": 100.0}))


async def test_a_pause_is_not_held_against_the_engine(autojump_clock) -> None:
    """A call that is frozen for longer than a call may take goes on from where it was."""
    async with room(backends=[engine()], rules=EngineRules(call_s=60.0)) as here:
        await here.submit("j")
        await trio.sleep(3.5)
        paused = await here.policies.pause("default", PausePolicy(mode="keep"), "alice")
        await trio.sleep(600)
        await here.policies.resume("default", ResumePolicy(pause_id=paused.pause_id, version=0))
        await assert_sound(here, await ended(here, "j"))
        assert len(here.backends[0].requests) == 1
        (info,) = here.pool.list().items
        assert (info.errors_total, info.strikes) == (0, 0)
