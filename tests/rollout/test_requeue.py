"""Requeueing: a new job with the old one's request, under rules that keep groups honest."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from prorld.errors import Conflict, Forgotten, NotFound
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.scripted_engine.script import Latency, Script
from tests.rollout.support import room


async def test_a_requeued_job_is_a_new_one(autojump_clock: trio.testing.MockClock) -> None:
    """Same request, new id, ``requeued_from``; the old one stays; with an id the call may be repeated."""
    async with room() as here:
        old = await here.finish("a", {"expected": "x"}, metadata={"k": 1}, priority=3)
        record, is_new = await here.supervisor.requeue("a", "tests", "b")
        assert (record.job_id, record.requeued_from, record.metadata, is_new) == ("b", "a", {"k": 1}, True)
        again, is_new_again = await here.supervisor.requeue("a", "tests", "b")
        assert (again.job_id, is_new_again) == ("b", False)
        other, _ = await here.supervisor.requeue("a", "tests", None)
        assert other.job_id not in ("a", "b")
        done = await here.supervisor.wait_done("b", "tests")
        assert done.requeued_from == "a"
        assert (await here.stored("b")).spec.instance == {"expected": "x"}
        assert await here.supervisor.get("a", "tests") == old


async def test_what_can_not_be_requeued(autojump_clock: trio.testing.MockClock) -> None:
    """A living job, another tenant's, an unknown one, one that is forgotten, and an id that is taken."""
    slow = [FakeBackend(Script(latency=Latency(fixed_s=5.0)))]
    async with room(backends=slow) as here:
        await here.submit("a")
        with pytest.raises(Conflict) as caught:
            await here.supervisor.requeue("a", "tests", None)
        assert caught.value.stable_code == "not_done"
        for job_id, tenant in (("a", "others"), ("none", "tests")):
            with pytest.raises(NotFound):
                await here.supervisor.requeue(job_id, tenant, None)
        await here.supervisor.wait_done("a", "tests")
        await here.submit("b")
        with pytest.raises(Conflict) as caught:
            await here.supervisor.requeue("a", "tests", "b")
        assert caught.value.stable_code == "job_exists"
        await here.forget("a")
        with pytest.raises(Forgotten):
            await here.supervisor.requeue("a", "tests", None)


async def test_a_group_that_has_ended_takes_nobody_back(autojump_clock: trio.testing.MockClock) -> None:
    """While a member lives the group is open; when the last has ended its baseline is settled."""
    slow = [FakeBackend(Script(latency=Latency(fixed_s=5.0)))]
    async with room(backends=slow) as here:
        await here.finish("a", group_id="g")
        await here.submit("b", group_id="g")
        record, _ = await here.supervisor.requeue("a", "tests", "c")
        assert record.group_id == "g"
        for name in "bc":
            await here.supervisor.wait_done(name, "tests")
        with pytest.raises(Conflict) as caught:
            await here.supervisor.requeue("a", "tests", None)
        assert caught.value.stable_code == "group_ended"


async def test_an_admin_requeues_for_the_tenant(autojump_clock: trio.testing.MockClock) -> None:
    """The new job belongs to whom the old one belonged."""
    async with room() as here:
        await here.finish("a")
        record, _ = await here.supervisor.requeue("a", None, "b")
        assert record.tenant == "tests"
