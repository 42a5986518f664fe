"""The pool of engines, on fakes and a virtual clock."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from prorld.errors import BackendError, BadRequest, Conflict, EngineBusy, NoBackend, NotFound
from prorld.inference.pool import BackendPool
from prorld.inference.pool_entry import DOWN_SECONDS_MIN
from prorld.inference.watch import FORGIVE_SECONDS, PROBE_SECONDS_MAX
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.scripted_engine.script import Fault
from tests.inference.pool_world import World, call, request, world


async def test_leases_spread_by_weight_and_come_back(autojump_clock: MockClock) -> None:
    """Live leases are shared out by weight, stick to their engine, and are given back at the end."""
    async with world() as it:
        light, heavy = await it.add("light"), await it.add("heavy", weight=2.0)
        async with trio.open_nursery() as nursery:
            for _ in range(9):
                nursery.start_soon(_hold, it.pool, None)
            await wait_all_tasks_blocked()
            assert it.leases() == {light: 3, heavy: 6}
            nursery.cancel_scope.cancel()
        assert it.leases() == {light: 0, heavy: 0}


async def test_a_group_stays_together_within_the_bound(autojump_clock: MockClock) -> None:
    """Members share an engine until it is busier than the others by a group; then they share the next."""
    async with world() as it:
        for number in range(3):
            await it.add(f"e{number}")
        async with trio.open_nursery() as nursery:
            for group in ("g1", "g2"):
                for _ in range(8):
                    nursery.start_soon(_hold, it.pool, group)
                    await wait_all_tasks_blocked()
            assert sorted(it.leases().values()) == [0, 8, 8]
            for _ in range(4):
                nursery.start_soon(_hold, it.pool, "g1")
                await wait_all_tasks_blocked()
            assert sorted(it.leases().values()) == [2, 8, 10]
            nursery.cancel_scope.cancel()


async def test_a_lease_waits_for_the_first_engine(autojump_clock: MockClock) -> None:
    """A policy without an engine keeps its jobs waiting, and the first engine that comes is theirs."""
    async with world() as it:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_hold, it.pool, None)
            await wait_all_tasks_blocked()
            assert not it.pool.has_engine("default")
            name = await it.add("late")
            await wait_all_tasks_blocked()
            assert it.leases() == {name: 1}
            nursery.cancel_scope.cancel()
        with trio.move_on_after(5) as scope:
            async with it.pool.lease("another"):
                raise AssertionError("there is no such policy")
        assert scope.cancelled_caught


async def test_calls_over_the_bound_wait_their_turn(autojump_clock: MockClock) -> None:
    """No more calls than ``max_inflight`` are in an engine at once."""
    async with world() as it:
        name = await it.add("small", max_inflight=2)
        peak = 0

        async def job(number: int) -> None:
            async with it.pool.lease("default") as lease:
                await lease.generate(request(number))

        async def watch() -> None:
            nonlocal peak
            for _ in range(25):
                peak = max(peak, it.fakes["http://small"].engine.running)
                await trio.sleep(0.1)

        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(job, number)
            nursery.start_soon(watch)
        assert trio.current_time() - started == pytest.approx(3.0)
        assert peak == 2
        assert it.pool.list().items[0].calls_total == 6
        assert it.leases() == {name: 0}


async def test_a_dead_engine_is_lost_and_its_jobs_move(autojump_clock: MockClock) -> None:
    """The job whose engine dies in the middle of its call goes on elsewhere, without waiting for a health check."""
    async with world() as it:
        first, second = await it.add("one"), await it.add("two")
        async with it.pool.lease("default") as lease:
            assert lease.backend_id == first
            it.fakes["http://one"].die()
            with pytest.raises(BackendError):
                await call(lease)
            assert it.state(first) == "down"
            await lease.migrate()
            assert (lease.backend_id, lease.migrations) == (second, 1)
            await call(lease)
            assert it.leases() == {first: 0, second: 1}


async def test_an_engine_that_was_lost_comes_back_through_its_probe(autojump_clock: MockClock) -> None:
    """It is told from its health, stays away for a while, and is asked anew what it is."""
    async with world() as it:
        name = await it.add("one")
        it.fakes["http://one"].die()
        await trio.sleep(4)
        assert it.state(name) == "down"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_hold, it.pool, None)
            await trio.sleep(10)
            assert it.leases() == {name: 0}
            it.fakes["http://one"].revive()
            it.fakes["http://one"].engine.set_label("prorld-0.4")
            await trio.sleep(DOWN_SECONDS_MIN + 2)
            assert (it.state(name), it.leases()) == ("up", {name: 1})
            assert it.pool.list().items[0].version == 4
            nursery.cancel_scope.cancel()


async def test_faults_are_counted_and_forgiven(autojump_clock: MockClock) -> None:
    """One fault makes an engine the last choice, three make it down, quiet time makes it good again."""
    async with world() as it:
        sick, well = await it.add("sick"), await it.add("well")
        it.fakes["http://sick"].faults.arm(Fault(kind="status", status=500, count=1))
        async with it.pool.lease("default") as lease:
            assert lease.backend_id == sick
            with pytest.raises(BackendError):
                await call(lease)
        assert it.state(sick) == "suspect"
        async with it.pool.lease("default") as one, it.pool.lease("default") as two:
            assert {one.backend_id, two.backend_id} == {well}
        await trio.sleep(FORGIVE_SECONDS + 2)
        assert it.state(sick) == "up"
        await it.pool.drain(well)
        it.fakes["http://sick"].faults.arm(Fault(kind="lengths", count=3))
        async with it.pool.lease("default") as lease:
            for _ in range(3):
                with pytest.raises(BackendError):
                    await call(lease)
            assert it.state(sick) == "down"
            with pytest.raises(NoBackend):
                await call(lease)


@pytest.mark.parametrize("fault", [Fault(kind="status", status=503), Fault(kind="status", status=400)])
async def test_a_busy_engine_and_a_bad_request_are_no_strikes(autojump_clock: MockClock, fault: Fault) -> None:
    """Being paused or full is no fault of the engine, nor is a request that it refuses."""
    async with world() as it:
        name = await it.add("one")
        for _ in range(5):
            it.fakes["http://one"].faults.arm(fault)
        async with it.pool.lease("default") as lease:
            for _ in range(5):
                with pytest.raises(BackendError) as caught:
                    await call(lease)
                assert isinstance(caught.value, EngineBusy) == (fault.status == 503)
        assert it.state(name) == "up"


async def test_the_only_engine_is_come_back_to(autojump_clock: MockClock) -> None:
    """With one engine, migrating after a hiccup is staying; after its death it is waiting, while the caller does."""
    async with world() as it:
        name = await it.add("one")
        async with it.pool.lease("default") as lease:
            await lease.migrate()
            assert (lease.backend_id, lease.migrations, it.leases()) == (name, 0, {name: 1})
            it.fakes["http://one"].die()
            await trio.sleep(4)
            with trio.move_on_after(1000) as scope:
                await lease.migrate()
            assert scope.cancelled_caught
            assert it.leases() == {name: 1}


async def test_draining_gives_no_new_leases(autojump_clock: MockClock) -> None:
    """Leases on a draining engine go on to their end; new ones go elsewhere; it stays so over a health fault."""
    async with world() as it:
        old = await it.add("old")
        async with it.pool.lease("default") as lease:
            assert (await it.pool.drain(old)).state == "draining"
            await call(lease)
            new = await it.add("new")
            async with it.pool.lease("default") as other:
                assert other.backend_id == new
            it.fakes["http://old"].die()
            await trio.sleep(4)
            assert it.state(old) == "down"
            it.fakes["http://old"].revive()
            await trio.sleep(DOWN_SECONDS_MIN + 2)
            assert it.state(old) == "draining"


async def test_removing_moves_leases_at_their_next_call(autojump_clock: MockClock) -> None:
    """A call that runs on a removed engine ends well; the next one says that the engine is gone."""
    async with world() as it:
        first, second = await it.add("one"), await it.add("two")
        async with it.pool.lease("default") as lease, trio.open_nursery() as nursery:
            nursery.start_soon(call, lease)
            await trio.sleep(0.5)
            await it.pool.remove(first)
            await trio.sleep(1)
            with pytest.raises(NoBackend):
                await call(lease)
            await lease.migrate()
            assert lease.backend_id == second
        with pytest.raises(NotFound):
            await it.pool.remove(first)


async def test_adding_refuses_what_can_not_be(autojump_clock: MockClock) -> None:
    """Unknown kinds, bad addresses, doubles and engines that do not answer are refused, each by its own error."""
    async with world() as it:
        with pytest.raises(BadRequest, match="kind 'sglang'"):
            await it.add("one", kind="sglang")
        with pytest.raises(BadRequest, match="plain"):
            await it.add("bad")
        await it.add("one")
        with pytest.raises(Conflict):
            await it.add("one")
        await it.add("one", policy="another")
        it.fakes["http://dead"] = FakeBackend(url="http://dead")
        it.fakes["http://dead"].die()
        with pytest.raises(BackendError):
            await it.add("dead")
        assert it.fakes["http://dead"].is_closed
        it.fakes["http://mute"] = Mute(url="http://mute")
        started = trio.current_time()
        with pytest.raises(BackendError, match="probe"):
            await it.add("mute")
        assert trio.current_time() - started == PROBE_SECONDS_MAX
        assert len(it.pool.list().items) == 2
        assert [info.policy for info in it.pool.list("another").items] == ["another"]


class Mute(FakeBackend):
    """An engine that takes the connection and says nothing."""

    async def probe(self) -> Any:
        await trio.sleep_forever()


async def test_one_engine_that_hangs_keeps_no_other_from_its_check(autojump_clock: MockClock) -> None:
    """A probe that never answers is that engine's trouble alone."""
    async with world() as it:
        it.fakes["http://mute"] = mute = Mute(url="http://mute")
        mute.probe = FakeBackend.probe.__get__(mute)  # type: ignore[method-assign]
        first, second = await it.add("mute"), await it.add("two")
        del mute.probe
        mute.die()
        await trio.sleep(4)
        mute.revive()
        await trio.sleep(DOWN_SECONDS_MIN + 2)
        it.fakes["http://two"].die()
        await trio.sleep(5)
        assert (it.state(first), it.state(second)) == ("down", "down")


@pytest.mark.parametrize("step", range(1, 30))
async def test_a_cancel_at_any_step_gives_everything_back(step: int, autojump_clock: MockClock) -> None:
    """Whatever a job of the pool is doing when it is cancelled, no lease, place or call is left."""
    async with world() as it:
        await it.add("one", max_inflight=1)
        await it.add("two", max_inflight=1)
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(_job, it.pool, number)
            for _ in range(step):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert set(it.leases().values()) == {0}
        assert [info.inflight for info in it.pool.list().items] == [0, 0]
        async with it.pool.lease("default") as lease:
            await call(lease)


async def test_the_end_of_the_pool_is_told_to_those_who_wait(autojump_clock: MockClock) -> None:
    """Nobody waits for an engine of a pool that has ended."""
    it = World()
    async with trio.open_nursery() as outer, trio.open_nursery() as nursery:
        await nursery.start(it.pool.run)
        outer.start_soon(_refused, it.pool)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


async def _refused(pool: BackendPool) -> None:
    with pytest.raises(NoBackend) as caught:
        async with pool.lease("default"):
            raise AssertionError("there is no engine")
    assert not caught.value.may_retry


async def _hold(pool: BackendPool, group_id: str | None) -> None:
    async with pool.lease("default", group_id=group_id):
        await trio.sleep_forever()


async def _job(pool: BackendPool, number: int) -> None:
    async with pool.lease("default", group_id="g") as lease:
        await call(lease, number)
        await lease.migrate()
        await call(lease, number)
