"""Policy versions on real pools and sessions over fake engines, under a virtual clock: what jobs see of an update."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from prorld.domain.versions import PolicyVersion, parse_label
from prorld.errors import Conflict
from prorld.inference.contract import PauseMode
from prorld.wire.ops import AddBackend
from prorld.wire.policies import PausePolicy, PutPolicy, ResumePolicy, UpdatePolicy
from tests.inference.policy_world import (
    TOKENS,
    assert_sound,
    engine,
    ids,
    rebel,
    spans,
    states,
    uncontrolled,
    updated,
)
from tests.rollout.support import room

# --- what jobs see ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_an_update_in_mid_generation(autojump_clock, mode: PauseMode) -> None:
    """Every token is there once and knows its version, and prompts of the new one are salted anew."""
    async with room(backends=[engine()]) as here:
        await here.submit("j")
        await trio.sleep(10.5)
        update = await updated(here, 3, mode=mode)
        assert (update.state, [result.ok for result in update.backends]) == ("done", [True])
        record = await here.supervisor.wait_done("j", "tests")
        await assert_sound(here, record)
        requests = here.backends[0].requests
        if mode == "wait":
            assert await spans(here, "j") == [(0, 0, TOKENS)]
            assert record.timing.paused_s == 0.0
        else:
            assert await spans(here, "j") == [(0, 0, 10), (0, 3, TOKENS - 10)]
            assert record.timing.paused_s == pytest.approx(3.0, abs=0.1)
        if mode == "abort":
            assert [request.salt for request in requests] == ["prorld-0.0", "prorld-0.3"]
        assert record.policy_versions == ([0] if mode == "wait" else [0, 3])
        assert here.policies.get("default", None).version == 3
        here.assert_clean()


async def test_wait_becomes_abort_when_its_time_is_over(autojump_clock) -> None:
    """A long turn can't hold an update up for ever."""
    async with room(backends=[engine()]) as here:
        await here.submit("j")
        await trio.sleep(5.5)
        await updated(here, 1, mode="wait", timeout_s=4.0)
        await assert_sound(here, await here.supervisor.wait_done("j", "tests"))
        assert await spans(here, "j") == [(0, 0, 9), (0, 1, TOKENS - 9)]


@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_a_paused_policy_costs_a_job_nothing(autojump_clock, mode: PauseMode) -> None:
    """An hour of it, with a budget that the work alone fills nearly: RUN and total stand still."""
    async with room(backends=[engine()]) as here:
        await here.submit("j", timeouts={"run_s": TOKENS + 2, "total_s": TOKENS + 3})
        await trio.sleep(5.5)
        paused = await here.policies.pause("default", PausePolicy(mode=mode), "alice")
        await trio.sleep(3600)
        assert (await here.supervisor.get("j", "tests")).timing.paused_s == pytest.approx(3600, abs=1)
        await here.policies.resume("default", ResumePolicy(pause_id=paused.pause_id, version=1))
        record = await here.supervisor.wait_done("j", "tests")
        await assert_sound(here, record)
        assert record.timing.paused_s == pytest.approx(3600, abs=1)
        assert record.timing.run_s < TOKENS + 2
        assert record.timing.llm_s < TOKENS + 2


async def test_a_job_that_begins_while_its_policy_is_paused_waits(autojump_clock) -> None:
    """No engine is asked meanwhile; a budget that was used up before stays used up."""
    async with room(backends=[engine()]) as here:
        paused = await here.policies.pause("default", PausePolicy(), "alice")
        await here.submit("j", timeouts={"run_s": TOKENS / 2})
        await trio.sleep(500)
        assert here.backends[0].requests == []
        await here.policies.resume("default", ResumePolicy(pause_id=paused.pause_id, version=0))
        record = await here.supervisor.wait_done("j", "tests")
        assert record.outcome is not None
        assert record.outcome.kind.value == "timeout"
        assert record.timing.run_s == pytest.approx(TOKENS / 2)


async def test_a_job_can_be_cancelled_while_its_policy_is_paused(autojump_clock) -> None:
    """At the gate, and frozen in an engine."""
    async with room(backends=[engine()]) as here:
        await here.submit("frozen")
        await trio.sleep(3)
        await here.policies.pause("default", PausePolicy(mode="keep"), "alice")
        await here.submit("waiting")
        await trio.sleep(3)
        for name in ("frozen", "waiting"):
            await here.supervisor.cancel(name, "tests", "not needed")
            record = await here.supervisor.wait_done(name, "tests")
            assert record.outcome is not None
            assert record.outcome.code == "cancelled"
        here.assert_clean()


async def test_calls_that_wait_for_a_place_do_not_slip_through(autojump_clock) -> None:
    """The gate is passed last: with one place, those that stood behind it wait for the new version."""
    async with room(backends=[engine()]) as here:
        for info in here.pool.list().items:
            await here.pool.remove(info.backend_id)
        await here.pool.add(AddBackend(url="fake://one", kind="vllm", max_inflight=1))
        for n in range(3):
            await here.submit(f"j{n}")
        await trio.sleep(4.5)
        await updated(here, 1)
        for n in range(3):
            await assert_sound(here, await here.supervisor.wait_done(f"j{n}", "tests"))
        assert sorted(await spans(here, "j1") + await spans(here, "j2")) == [(0, 1, TOKENS)] * 2


# --- pauses -----------------------------------------------------------------------------------------------------------


async def test_a_trainer_moves_the_weights_itself(autojump_clock) -> None:
    """Pause, transfer, resume: cleared, named, read back; a repeat of the resume gets the same answer."""
    async with room(backends=[engine("one"), engine("two")]) as here:
        await here.submit("j")
        await trio.sleep(7.5)
        paused = await here.policies.pause("default", PausePolicy(mode="abort"), "alice")
        assert [result.ok for result in paused.backends] == [True, True]
        for backend in here.backends:
            assert backend.engine.is_paused
            assert not backend.live
        assert [(name, pause.holder) for name, pause in here.book.paused()] == [("default", "alice")]
        wish = ResumePolicy(pause_id=paused.pause_id, version=4)
        done = await here.policies.resume("default", wish)
        assert [(result.ok, result.version) for result in done.backends] == [(True, 4), (True, 4)]
        assert {backend.engine.label for backend in here.backends} == {"prorld-0.4"}
        assert await here.policies.resume("default", wish) == done
        await assert_sound(here, await here.supervisor.wait_done("j", "tests"))
        assert await spans(here, "j") == [(0, 0, 7), (0, 4, TOKENS - 7)]
        assert here.book.paused() == []


async def test_a_resume_without_a_change_keeps_the_version(autojump_clock) -> None:
    """A pause for the trainer's own sake."""
    async with room(backends=[engine()]) as here:
        paused = await here.policies.pause("default", PausePolicy(mode="keep"), "alice")
        done = await here.policies.resume("default", ResumePolicy(pause_id=paused.pause_id, version=0))
        assert [(result.ok, result.version) for result in done.backends] == [(True, 0)]
        await assert_sound(here, await here.finish("j"))


async def test_an_engine_that_came_during_a_pause_did_not_get_the_weights(autojump_clock) -> None:
    """It stays out of a new version, although it said the old one when it came."""
    async with room(backends=[engine("one")]) as here:
        paused = await here.policies.pause("default", PausePolicy(), "alice")
        here.engines["fake://late"] = engine("late")
        await here.pool.add(AddBackend(url="fake://late", kind="vllm"))
        assert states(here)["late"] == "up"
        await here.policies.resume("default", ResumePolicy(pause_id=paused.pause_id, version=1))
        assert states(here) == {"one": "up", "late": "quarantined"}


async def test_a_resume_that_no_engine_takes_says_so(autojump_clock) -> None:
    """Every one of them is not ok, and the policy has no engine."""
    async with room(backends=[rebel("other")]) as here:
        paused = await here.policies.pause("default", PausePolicy(), "alice")
        done = await here.policies.resume("default", ResumePolicy(pause_id=paused.pause_id, version=1))
        assert [(result.ok, result.code) for result in done.backends] == [(False, "other_version")]
        assert states(here) == {"rebel": "quarantined"}
        assert not here.pool.has_engine("default")


async def test_while_one_holds_it_the_others_are_refused(autojump_clock) -> None:
    """Also while engines are only being paused; the holder's own update ends the pause."""
    slow = engine()
    async with room(backends=[slow]) as here, trio.open_nursery() as nursery:
        await here.submit("j")
        await trio.sleep(2.5)
        nursery.start_soon(here.policies.pause, "default", PausePolicy(mode="wait", timeout_s=10), "alice")
        await wait_all_tasks_blocked()
        view = here.policies.get("default", "alice").pause
        assert view is not None
        assert view.pause_id is not None
        shown = here.policies.get("default", "bob").pause
        assert shown is not None
        assert (shown.holder, shown.pause_id) == ("alice", None)
        for _ in range(2):
            for attempt in (
                lambda: here.policies.pause("default", PausePolicy(), "bob"),
                lambda: updated(here, 1),
                lambda: here.policies.put("default", PutPolicy(model="m"), None),
                lambda: here.policies.resume("default", ResumePolicy(pause_id="mine", version=1)),
            ):
                with pytest.raises(Conflict) as refused:
                    await attempt()
                assert refused.value.stable_code == "policy_busy"
            await trio.sleep(20)
        update = await updated(here, 1, pause_id=view.pause_id)
        assert (update.state, here.policies.get("default", None).pause) == ("done", None)
        await assert_sound(here, await here.supervisor.wait_done("j", "tests"))


async def test_a_failed_update_under_a_pause_leaves_the_pause(autojump_clock) -> None:
    """The holder tries again; nothing has run meanwhile."""
    broken = rebel("load")
    async with room(backends=[broken]) as here:
        paused = await here.policies.pause("default", PausePolicy(), "alice")
        assert (await updated(here, 1, pause_id=paused.pause_id)).state == "failed"
        view = here.policies.get("default", None).pause
        assert view is not None
        assert view.pause_id == paused.pause_id
        broken.breaks = ""
        assert (await updated(here, 1, pause_id=paused.pause_id)).state == "done"
        assert here.policies.get("default", None).pause is None
        assert states(here) == {"rebel": "up"}
        await assert_sound(here, await here.finish("j"))


async def test_whoever_asked_may_leave(autojump_clock) -> None:
    """An update goes on without its client, and so does a pause."""
    async with room(backends=[engine()]) as here:
        with trio.move_on_after(1) as scope:
            await updated(here, 1)
        assert scope.cancelled_caught
        await trio.sleep(10)
        assert here.policies.get("default", None).version == 1
        await here.submit("j")
        await trio.sleep(1)
        with trio.move_on_after(1) as scope:
            await here.policies.pause("default", PausePolicy(mode="wait"), "alice")
        assert scope.cancelled_caught
        await trio.sleep(100)
        assert here.backends[0].engine.is_paused
        assert not here.book.gate("default").is_open


# --- adapters ---------------------------------------------------------------------------------------------------------


async def test_an_adapter_needs_no_pause(autojump_clock) -> None:
    """A running call ends on the old one, which goes when nobody is on it; the next one asks for the new."""
    async with room(backends=[engine()]) as here:
        backend = here.backends[0]
        first = await updated(here, 1, how="lora")
        assert (first.state, first.version) == ("done", 1)
        await here.submit("j")
        await trio.sleep(4.5)
        await updated(here, 2, how="lora")
        assert [ref.name for ref in backend.loaded] == ["prorld-0.1", "prorld-0.2"]
        await here.submit("k")
        for name in ("j", "k"):
            record = await here.supervisor.wait_done(name, "tests")
            await assert_sound(here, record)
            assert record.timing.paused_s == 0.0
        assert (await spans(here, "j"), await spans(here, "k")) == ([(0, 1, TOKENS)], [(0, 2, TOKENS)])
        assert [request.adapter for request in backend.requests] == ["prorld-0.1", "prorld-0.2"]
        assert [request.salt for request in backend.requests] == ["prorld-0.1", "prorld-0.2"]
        await wait_all_tasks_blocked()
        assert [ref.name for ref in backend.loaded] == ["prorld-0.2"]
        assert here.policies.get("default", None).adapter == "prorld-0.2"


async def test_an_adapter_that_has_gone_is_unloaded_from_an_engine_that_is_down_too(autojump_clock) -> None:
    """It may only be slow, and what it is not told now it keeps."""
    async with room(backends=[engine("one"), engine("two")]) as here:
        away = here.backends[1]
        await updated(here, 1, how="lora")
        here.pool._engines.lose(here.book.entries("default")[1], "too slow in its health checks")
        await updated(here, 2, how="lora")
        await wait_all_tasks_blocked()
        assert [list(backend.engine.adapters) for backend in here.backends] == [["prorld-0.2"], []]
        assert not away.is_dead


async def test_policies_that_share_an_engine_have_adapters_of_their_own(autojump_clock) -> None:
    """Of the same version, beside each other: the tokens of one are never sampled from that of the other."""
    async with room(backends=[engine()], also=("second",)) as here:
        backend = here.backends[0]
        await here.pool.add(AddBackend(url="fake://one", kind="vllm", policy="second"))
        for policy in ("default", "second"):
            wish = UpdatePolicy(version=1, how="lora", path=f"/of/{policy}")
            begun = await here.policies.update(policy, wish, "alice")
            assert (await here.policies.wait_update(policy, begun.update_id)).state == "done"
        asked = {name: here.book.gate(name).adapter for name in ("default", "second")}
        assert {name: backend.engine.adapters[adapter] for name, adapter in asked.items() if adapter} == {
            "default": "/of/default", "second": "/of/second",
        }  # fmt: skip
        assert {parse_label(adapter) for adapter in asked.values()} == {PolicyVersion(0, 1)}
        begun = await here.policies.update("second", UpdatePolicy(version=2, how="lora", path="/of/second/2"), "alice")
        await here.policies.wait_update("second", begun.update_id)
        await wait_all_tasks_blocked()
        assert list(backend.engine.adapters.values()) == ["/of/default", "/of/second/2"]


async def test_an_engine_without_the_adapter_stays_out(autojump_clock) -> None:
    """One that can't load it, one that comes later, and one that was away."""
    async with room(backends=[engine("one"), engine("two"), uncontrolled()]) as here:
        await updated(here, 1, how="lora")
        assert states(here) == {"one": "up", "two": "up", "plain": "quarantined"}
        here.backends[1].die()
        await trio.sleep(10)
        here.backends[1].revive()
        here.engines["fake://late"] = engine("late")
        await here.pool.add(AddBackend(url="fake://late", kind="vllm"))
        await trio.sleep(20)
        assert states(here) == {"one": "up", "two": "quarantined", "plain": "quarantined", "late": "quarantined"}
        brought = [ids(here)["two"], ids(here)["late"]]
        update = await updated(here, 1, how="lora", path="/weights/1", backends=brought)
        assert [result.ok for result in update.backends] == [True, True]
        assert states(here) == {"one": "up", "two": "up", "plain": "quarantined", "late": "up"}
        await updated(here, 2, how="reload")
        await wait_all_tasks_blocked()
        assert here.policies.get("default", None).adapter is None
