"""Engines that fall, leave and come back while their policy is paused: nothing waits for ever, nothing is lost."""

from __future__ import annotations

import pytest
import trio

from prorld.errors import BadRequest, Overloaded
from prorld.inference.policies import Policies, PolicySource
from prorld.inference.pool_entry import EngineRules
from prorld.testing.fake_backend import FakeBackend
from prorld.wire.codec import convert
from prorld.wire.jobs import JobRecord
from prorld.wire.ops import AddBackend, SetBackends
from prorld.wire.policies import PausePolicy, PutPolicy, ResumePolicy, UpdatePolicy
from tests.inference.policy_world import Uncontrolled, assert_sound, engine, ids, rebel, states, updated
from tests.rollout.support import KeptPolicies, Room, room


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


async def test_an_engine_that_slept_through_one_pause_wakes_after_the_next(autojump_clock) -> None:
    """It was down when the first one ended, and came back while nobody was to be woken."""
    ill = dull()
    async with room(backends=[engine("one"), ill]) as here:
        first = await here.policies.pause("default", PausePolicy(), "alice")
        ill.is_ill = True
        await trio.sleep(10)
        await here.policies.resume("default", ResumePolicy(pause_id=first.pause_id, version=0))
        second = await here.policies.pause("default", PausePolicy(), "alice")
        ill.is_ill = False
        await trio.sleep(20)
        await here.policies.resume("default", ResumePolicy(pause_id=second.pause_id, version=0))
        assert states(here) == {"one": "up", "dull": "up"}
        assert not ill.engine.is_paused


@pytest.mark.parametrize("by", ["resume", "update"])
async def test_an_engine_that_comes_while_the_others_wake_has_old_weights(autojump_clock, by: str) -> None:
    """It was judged by the version of before; served, its tokens would be called those of the new one."""
    async with room(backends=[engine("one"), rebel("resume", "hang")]) as here, trio.open_nursery() as nursery:
        if by == "resume":
            paused = await here.policies.pause("default", PausePolicy(), "alice")
            wish = ResumePolicy(pause_id=paused.pause_id, version=1)
            nursery.start_soon(here.policies.resume, "default", wish)
        else:
            nursery.start_soon(updated, here, 1)
        await trio.sleep(20)
        late = here.engines["fake://late"] = Uncontrolled(engine().script, url="fake://late")
        await here.pool.add(AddBackend(url=late.url, kind="vllm"))
        await trio.sleep(100)
        assert here.policies.get("default", None).version == 1
        assert states(here) == {"one": "up", "rebel": "quarantined", "late": "quarantined"}


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


async def test_whoever_waits_is_told_that_the_daemon_ends(autojump_clock) -> None:
    """Not that it has a bug."""
    here = Room(backends=[engine()])
    told: list[str] = []

    async def ask() -> None:
        try:
            await here.policies.pause("default", PausePolicy(mode="wait"), "alice")
        except Overloaded as exc:
            told.append(exc.stable_code)

    async with trio.open_nursery() as askers, trio.open_nursery() as nursery:
        await nursery.start(here.run)
        await here.submit("j")
        await trio.sleep(2)
        askers.start_soon(ask)
        await trio.sleep(2)
        nursery.cancel_scope.cancel()
    assert told == ["closing"]


async def test_a_pause_that_a_kill_cut_short_is_made_whole_by_its_repeat(autojump_clock) -> None:
    """The trainer never had an answer: it asks again, and the engines stand still and get their version."""
    kept = KeptPolicies()
    async with room(backends=[engine()], kept=kept) as here:
        await here.submit("j")
        await trio.sleep(2.5)
        with trio.move_on_after(1):
            await here.policies.pause("default", PausePolicy(mode="wait", pause_id="step-1"), "alice")
    async with room(backends=[engine()], kept=kept) as there:
        paused = await there.policies.pause("default", PausePolicy(mode="wait", pause_id="step-1"), "alice")
        assert [result.ok for result in paused.backends] == [True]
        assert there.backends[0].engine.is_paused
        done = await there.policies.resume("default", ResumePolicy(pause_id="step-1", version=1))
        assert [(result.ok, result.version) for result in done.backends] == [(True, 1)]
        assert states(there) == {"one": "up"}


async def test_two_changes_of_settings_at_once(autojump_clock, monkeypatch) -> None:
    """Both are in force afterwards: the slower one does not write over the quicker."""
    async with room(backends=[engine()]) as here:

        async def check(_self: Policies, source: PolicySource) -> None:
            await trio.sleep(1 if source.max_staleness else 5)

        monkeypatch.setattr(Policies, "check", check)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.policies.put, "default", PutPolicy(model="m"), None)
            nursery.start_soon(here.policies.put, "default", PutPolicy(max_staleness=3), None)
        info = here.policies.get("default", None)
        assert (info.model, info.max_staleness) == ("m", 3)


def test_a_set_has_no_version_that_a_policy_can_t_leave() -> None:
    """Versions only rise, and one beyond what an update may ask for would be the last one."""
    engines = [{"url": "http://engine", "kind": "vllm"}]
    highest = 10**15
    assert convert({"generation": 0, "backends": engines, "version": highest}, SetBackends, what="it").version
    for kind, body in (
        (SetBackends, {"generation": 0, "backends": engines, "version": highest + 1}),
        (UpdatePolicy, {"how": "none", "version": highest + 1}),
        (ResumePolicy, {"pause_id": "p", "version": highest + 1}),
    ):
        with pytest.raises(BadRequest):
            convert(body, kind, what="it")
