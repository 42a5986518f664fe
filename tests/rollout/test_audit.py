"""The audit: the right share, one at a time, an alarm that is heard, and nothing that it holds up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from prorld.rollout import audit
from prorld.rollout.audit import DRIFT_SHOWN_S, Auditor, is_chosen
from prorld.testing.scripted_engine.script import Latency, Script
from tests.rollout.policy_backend import PolicyBackend, update
from tests.rollout.support import Room, room

TALK = Script(turns=["the answer is 42, as far as anybody can tell from here"])


@asynccontextmanager
async def audited(engine: PolicyBackend, *, share: float = 1.0, **options) -> AsyncIterator[tuple[Room, Auditor]]:
    """A room whose ended jobs are audited."""
    async with room(backends=[engine], **options) as here:
        auditor = Auditor(share=share, metrics=here.metrics)
        here.supervisor.listen(auditor.ended)
        async with trio.open_nursery() as nursery:
            await nursery.start(auditor.run, here.looks, here.supervisor.feed)
            yield here, auditor
            nursery.cancel_scope.cancel()


def counted(here: Room, result: str) -> float:
    """Audits with this result."""
    return here.metrics.value("prorld_audits_total", result=result) or 0.0


def test_a_share_is_chosen_by_the_id_alone() -> None:
    """About so many, always the same ones, a larger share includes a smaller, and tenants are apart."""
    names = [f"job-{n}" for n in range(4000)]
    few = {name for name in names if is_chosen("t", name, 0.05)}
    more = {name for name in names if is_chosen("t", name, 0.5)}
    assert 120 <= len(few) <= 280
    assert few < more
    assert few == {name for name in names if is_chosen("t", name, 0.05)}
    assert few != {name for name in names if is_chosen("u", name, 0.05)}
    assert not any(is_chosen("t", name, 0.0) for name in names)
    assert all(is_chosen("t", name, 1.0) for name in names)


async def test_sound_jobs_are_audited_without_a_word(autojump_clock: trio.testing.MockClock) -> None:
    """Counted with their tokens and their gap; no event, no drift."""
    async with audited(PolicyBackend(TALK)) as (here, auditor):
        records = [await here.finish(f"job-{n}") for n in range(3)]
        await trio.sleep(10)
        assert counted(here, "ok") == 3
        assert here.metrics.value("prorld_audit_tokens_total") == sum(record.tokens.sampled for record in records)
        assert here.metrics.value("prorld_audit_logprob_gap_bucket", le="1e-06") == 3
        assert auditor.drifts() == []
        assert not [e for e in here.supervisor.feed.after(0, 1000, None)[0] if e.event.startswith("audit.")]


async def test_an_engine_that_drifts_is_heard_of(autojump_clock: trio.testing.MockClock) -> None:
    """An event for admins, a count, and health for a quarter of an hour; the job itself stays as it was."""
    engine = PolicyBackend(TALK, stale_caches=True)
    async with audited(engine) as (here, auditor):
        await update(here, engine, 1)
        before = await here.finish("a")
        await trio.sleep(10)
        assert (counted(here, "drifted"), counted(here, "ok")) == (1, 0)
        (seen,) = auditor.drifts()
        assert seen.job_id == "a"
        assert here.pool.list().items[0].backend_id in seen.words
        events, _ = here.supervisor.feed.after(0, 1000, None)
        (told,) = [event for event in events if event.event == "audit.drifted"]
        assert (told.tenant, told.data["job_id"], told.data["code"]) == (None, "a", "logprob_drift")
        assert told.data["mean"] == pytest.approx(0.08, abs=1e-4)
        assert await here.supervisor.get("a", "tests") == before
        assert here.pool.list().items[0].state == "up"
        await trio.sleep(DRIFT_SHOWN_S)
        assert auditor.drifts() == []


async def test_jobs_that_sampled_nothing_or_were_not_chosen_are_left_alone(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A job that failed in INIT has nothing to compare; a share of 0 switches the audit off."""
    engine = PolicyBackend(TALK)
    async with audited(engine) as (here, auditor):
        await here.finish("a", {"fail": {"init": "handler"}})
        await trio.sleep(10)
        assert (auditor.waiting, engine.scored) == (0, [])
    async with audited(PolicyBackend(TALK), share=0.0) as (here, auditor):
        await here.finish("a")
        await trio.sleep(10)
        assert counted(here, "ok") == 0


async def test_jobs_are_held_by_name_and_so_many_only(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is over the bound is counted and left out; what the store forgot meanwhile is counted, too."""
    monkeypatch.setattr(audit, "WAITING_MAX", 2)
    async with room(backends=[PolicyBackend(TALK)]) as here:
        auditor = Auditor(share=1.0, metrics=here.metrics)
        here.supervisor.listen(auditor.ended)
        for n in range(4):
            await here.finish(f"job-{n}")
        assert (auditor.waiting, counted(here, "dropped")) == (2, 2)
        await here.forget("job-0", "job-1")
        async with trio.open_nursery() as nursery:
            await nursery.start(auditor.run, here.looks, here.supervisor.feed)
            await trio.sleep(10)
            nursery.cancel_scope.cancel()
        assert (auditor.waiting, counted(here, "forgotten")) == (0, 2)


async def test_a_client_that_breaks_does_not_end_the_audit(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in a plugin's client of an engine costs that one audit."""
    engine = PolicyBackend(TALK)
    sound = engine.score

    async def broken(token_ids, start):
        raise ZeroDivisionError

    async with audited(engine) as (here, _):
        monkeypatch.setattr(engine, "score", broken)
        await here.finish("a")
        await trio.sleep(10)
        monkeypatch.setattr(engine, "score", sound)
        await here.finish("b")
        await trio.sleep(10)
        assert (counted(here, "failed"), counted(here, "ok")) == (1, 1)


async def test_no_job_and_no_end_waits_for_an_audit(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one hangs in an engine, jobs go on as fast as without it, and the actor can be ended at once."""
    engine = PolicyBackend(Script(turns=["yes"], latency=Latency(fixed_s=1.0)))

    async def hang(token_ids, start):
        await trio.sleep_forever()

    monkeypatch.setattr(engine, "score", hang)
    async with audited(engine) as (here, auditor):
        await here.finish("a")
        began = trio.current_time()
        await here.finish("b")
        assert trio.current_time() - began == pytest.approx(1.0)
        assert auditor.waiting == 1
        ended = trio.current_time()
    assert trio.current_time() == ended
