"""Versions that fall, policies that come, and what a restart keeps of them, under a virtual clock."""

from __future__ import annotations

import pytest
import trio

from prorld.errors import Conflict, Impossible, NotFound, Overloaded
from prorld.wire.ops import AddBackend
from prorld.wire.policies import PausePolicy, PutPolicy, ResumePolicy, UpdatePolicy
from tests.inference.policy_world import (
    TOKENS,
    assert_sound,
    engine,
    rebel,
    spans,
    updated,
)
from tests.rollout.support import KeptPolicies, room

# --- versions that fall, and what is too old --------------------------------------------------------------------------


async def test_a_rollback_is_an_epoch_of_its_own(autojump_clock) -> None:
    """In every span and in the salt; what was sampled above it is stale, what was below is not."""
    async with room(backends=[engine()]) as here:
        await updated(here, 2)
        await here.submit("below")
        await trio.sleep(3.5)
        await updated(here, 4)
        await here.submit("above")
        await trio.sleep(3.5)
        with pytest.raises(Conflict, match="not above"):
            await updated(here, 2, path="/other")
        await updated(here, 2, rollback=True)
        assert here.policies.get("default", None).epoch == 1
        above = await here.supervisor.wait_done("above", "tests")
        assert above.outcome is not None
        assert (above.outcome.kind.value, above.outcome.code, above.verdict) == ("cancelled", "stale", "drop")
        below = await here.supervisor.wait_done("below", "tests")
        assert below.outcome is not None
        # It sampled under 4 as well, before the way back.
        assert below.outcome.code == "stale"
        await here.finish("anew")
        assert await spans(here, "anew") == [(1, 2, TOKENS)]
        assert here.backends[0].requests[-1].salt == "prorld-1.2"


@pytest.mark.parametrize(("limit", "code"), [(1, "stale"), (2, "ok"), (None, "ok")])
async def test_a_job_that_falls_too_far_behind_ends(autojump_clock, limit: int | None, code: str) -> None:
    """Before its next call: the engine is not asked for what nobody may train on."""
    async with room(backends=[engine()]) as here:
        await here.submit("j", max_staleness=limit)
        await trio.sleep(5.5)
        await updated(here, 2)
        record = await here.supervisor.wait_done("j", "tests")
        assert record.outcome is not None
        assert record.outcome.code == code
        assert len(here.backends[0].requests) == (1 if code == "stale" else 2)
        assert (record.verdict == "use") is (code == "ok")
        here.assert_clean()


async def test_staleness_counts_at_the_end_of_run_too(autojump_clock) -> None:
    """The policy may have gone on after the last call; the policy's own limit holds where the job has none."""
    async with room(backends=[engine()]) as here:
        await here.policies.put("default", PutPolicy(max_staleness=0), None)
        await here.submit("j", {"seconds": {"run": 30.0}})
        await here.submit("k", {"seconds": {"run": 30.0}}, max_staleness=None)
        await trio.sleep(TOKENS + 2)
        await updated(here, 1)
        stale = await here.supervisor.wait_done("j", "tests")
        fine = await here.supervisor.wait_done("k", "tests")
        assert stale.outcome is not None
        assert (stale.outcome.code, stale.outcome.stage, stale.reward) == ("stale", "run", None)
        assert len(stale.attempts) == 1
        assert fine.outcome is not None
        assert fine.outcome.kind.value == "ok"


# --- more policies, restarts ------------------------------------------------------------------------------------------


async def test_policies_are_made_while_the_daemon_runs(autojump_clock) -> None:
    """Before that their jobs and engines are refused; each has its own versions and pauses."""
    async with room(backends=[engine()]) as here:
        here.engines["fake://mine"] = engine("mine")
        mine = AddBackend(url="fake://mine", kind="vllm", policy="mine")
        with pytest.raises(Impossible):
            await here.submit("early", policy="mine")
        with pytest.raises(Impossible):
            await here.pool.add(mine)
        with pytest.raises(NotFound):
            await here.policies.pause("mine", PausePolicy(), "alice")
        info, is_new = await here.policies.put("mine", PutPolicy(model="m"), None)
        assert (info.name, info.model, is_new) == ("mine", "m", True)
        assert (await here.policies.put("mine", PutPolicy(), None))[1] is False
        await here.pool.add(mine)
        await here.policies.pause("default", PausePolicy(), "alice")
        await here.finish("j", policy="mine")
        assert [info.name for info in here.policies.list(None).items] == ["default", "mine"]


async def test_a_restart_keeps_everything(autojump_clock) -> None:
    """Versions, pauses with their holder, policies that were made, updates that were done."""
    kept = KeptPolicies()
    async with room(backends=[engine()], kept=kept) as here:
        await here.policies.put("mine", PutPolicy(max_staleness=3), None)
        first = await updated(here, 2)
        paused = await here.policies.pause("default", PausePolicy(), "alice")
        backend = here.backends[0]
    async with room(backends=[backend], kept=kept) as there:
        assert there.policies.get("mine", None).max_staleness == 3
        assert [(name, pause.holder) for name, pause in there.book.paused()] == [("default", "alice")]
        await there.submit("j")
        await trio.sleep(100)
        assert backend.requests == []
        assert (await updated(there, 2)).update_id == first.update_id
        await there.policies.resume("default", ResumePolicy(pause_id=paused.pause_id, version=3))
        await assert_sound(there, await there.supervisor.wait_done("j", "tests"))
        assert await spans(there, "j") == [(0, 3, TOKENS)]


@pytest.mark.parametrize("keyed", [True, False], ids=["with the key", "the same request once more"])
async def test_an_update_that_a_restart_met_has_failed_and_stays_paused(keyed: bool, autojump_clock) -> None:
    """Which engines have which weights is not known, so nothing runs until its holder says."""
    kept = KeptPolicies()
    async with room(backends=[rebel("load", "hang")], kept=kept) as here:
        begun = await here.policies.update("default", UpdatePolicy(version=1, how="reload", path="/w"), "alice")
        await trio.sleep(5)
        assert here.book.paused() == []
    async with room(backends=[engine()], kept=kept) as there:
        found = there.policies.get_update("default", begun.update_id)
        assert (found.state, found.code) == ("failed", "interrupted")
        view = there.policies.get("default", None).pause
        assert view is not None
        assert view.holder == "alice"
        with pytest.raises(Conflict):
            await there.policies.update("default", UpdatePolicy(version=1, how="reload", path="/w"), "bob")
        again = await updated(there, 1, path="/w", pause_id=view.pause_id if keyed else None)
        assert again.state == "done"
        await assert_sound(there, await there.finish("j"))


async def test_what_can_t_be_written_down_is_not_begun(autojump_clock) -> None:
    """The gate opens again, and nothing was done to an engine."""
    async with room(backends=[engine()]) as here:
        here.kept.broken = OSError(28, "No space left on device")
        for attempt in (
            lambda: here.policies.pause("default", PausePolicy(), "alice"),
            lambda: updated(here, 1),
            lambda: here.policies.put("mine", PutPolicy(), None),
        ):
            with pytest.raises(Overloaded) as refused:
                await attempt()
            assert refused.value.stable_code == "state_unwritable"
        assert not here.backends[0].engine.is_paused
        assert [info.name for info in here.policies.list(None).items] == ["default"]
        await assert_sound(here, await here.finish("j"))


async def test_events_and_numbers_tell_of_it(autojump_clock) -> None:
    """What an operator sees afterwards."""
    async with room(backends=[engine()]) as here:
        paused = await here.policies.pause("default", PausePolicy(), "alice")
        await trio.sleep(10)
        await here.policies.resume("default", ResumePolicy(pause_id=paused.pause_id, version=1))
        await updated(here, 2)
        events, _ = here.supervisor.feed.after(0, 100, None)
        told = [(event.event, event.data.get("version")) for event in events if event.event.startswith("policy.")]
        assert told == [("policy.paused", None), ("policy.resumed", 1), ("policy.updated", 2)]
        assert here.metrics.value("prorld_policy_version", policy="default") == 2
        assert here.metrics.value("prorld_policy_updates_total", how="reload", result="done") == 1
        assert here.book.closed_s()["default"] == pytest.approx(13, abs=0.5)
