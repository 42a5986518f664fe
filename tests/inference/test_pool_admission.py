"""How much an engine is given: slow start, pressure, the line before it, and the share of one that comes late."""

from __future__ import annotations

from collections import Counter

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from prorld.domain.admission import AdmissionRules
from prorld.errors import EngineBusy
from prorld.inference.contract import EngineLoad
from prorld.inference.pool_entry import EngineRules
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.scripted_engine.script import Fault, Latency, Script
from tests.inference.pool_world import Keeper, LoadedBackend, World, call, request, world

RULES = EngineRules(admission=AdmissionRules(start=8, floor=2))


def loaded(url: str) -> FakeBackend:
    """Answers after a second, and says of its load what the test wants."""
    return LoadedBackend(Script(latency=Latency(fixed_s=1.0)), url=url)


async def job(it: World, number: int, group: str | None = None, *, calls: int = 3, tool_s: float = 0.5) -> str:
    """A job of a few calls with tools between them; the engine that it had."""
    async with it.pool.lease("default", group_id=group) as lease:
        for turn in range(calls):
            await call(lease, number * 100 + turn)
            await trio.sleep(tool_s)
        return lease.backend_id


class Load:
    """So many jobs at any time, as a trainer keeps a rollout service busy."""

    def __init__(self, it: World, at_once: int, *, grouped: bool) -> None:
        self.it = it
        self.at_once = at_once
        self.grouped = grouped
        self.ended: list[tuple[float, str]] = []
        self._made = 0

    async def run(self) -> None:
        """For ever."""
        async with trio.open_nursery() as nursery:
            for worker in range(self.at_once):
                nursery.start_soon(self._worker, worker)

    async def _worker(self, worker: int) -> None:
        await trio.sleep(worker * 0.03)
        while True:
            number, self._made = self._made, self._made + 1
            group = f"g{number // 8}" if self.grouped else None
            engine = await job(self.it, number, group)
            self.ended.append((trio.current_time(), engine))

    def shares(self, since: float, until: float) -> Counter[str]:
        """Jobs that ended in that time, by engine."""
        return Counter(engine for at, engine in self.ended if since <= at < until)


@pytest.mark.parametrize("grouped", [False, True])
async def test_an_engine_that_comes_late_carries_its_share_within_a_minute(
    grouped: bool, autojump_clock: MockClock
) -> None:
    """Under load, with and without groups that stay together; and at no time more than its slow start allows."""
    async with world(make=loaded) as it:
        old = await it.add("old")
        load = Load(it, 128, grouped=grouped)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.run)
            await trio.sleep(30)
            late = await it.add("late")
            added = trio.current_time()
            peaks = []
            for _ in range(20):
                await trio.sleep(0.1)
                peaks.append(it.info(late).inflight)
            assert max(peaks[:5]) <= AdmissionRules().start
            await trio.sleep(60)
            last = load.shares(added + 30, added + 60)
            assert last[late] / (last[late] + last[old]) == pytest.approx(0.5, abs=0.08)
            whole = load.shares(added, added + 60)
            assert whole[late] / (whole[late] + whole[old]) >= 0.4
            nursery.cancel_scope.cancel()


async def test_a_full_engine_gets_fewer_new_leases(autojump_clock: MockClock) -> None:
    """A call that waits for a place counts as one more lease, so who has places gets the next job."""
    async with world() as it:
        small, large = await it.add("small", max_inflight=2), await it.add("large", max_inflight=100)
        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(job, it, number)
                await wait_all_tasks_blocked()
            leases = it.leases()
            assert leases[small] < leases[large]
            assert it.info(small).queued == leases[small] - 2
        assert it.info(small).queued == 0


async def test_the_limit_follows_pressure(autojump_clock: MockClock) -> None:
    """It doubles while it is used up, shrinks when the cache fills or calls queue, and comes back step by step."""
    async with world(RULES, make=loaded) as it:
        name = await it.add("one")
        fake = it.fakes["http://one"]
        assert isinstance(fake, LoadedBackend)
        load = Load(it, 64, grouped=False)
        async with trio.open_nursery() as nursery:
            assert it.info(name).call_limit == 8
            nursery.start_soon(load.run)
            await trio.sleep(10)
            full = it.info(name).call_limit
            assert full is not None
            assert full >= 40
            fake.said = EngineLoad(running=10, waiting=0, kv_usage=0.99)
            await trio.sleep(60)
            assert it.info(name).call_limit == 2
            assert it.info(name).inflight <= 2
            assert it.info(name).details["pressure"] == "kv_usage"
            ended = len(load.ended)
            await trio.sleep(60)
            assert len(load.ended) > ended
            fake.said = EngineLoad(running=10, waiting=1, kv_usage=0.4)
            await trio.sleep(30)
            again = it.info(name).call_limit
            assert again is not None
            assert 30 <= again <= 64 + RULES.admission.step
            assert it.info(name).details["pressure"] is None
            nursery.cancel_scope.cancel()


async def test_an_engine_that_is_paused_keeps_its_limit(autojump_clock: MockClock) -> None:
    """503 from all its calls is no pressure: nothing can be learned of an engine that stands still."""
    async with world(RULES, make=loaded) as it:
        name = await it.add("one")
        keeper = it.pool.keeper = Keeper(paused=True)
        fake = it.fakes["http://one"]
        assert isinstance(fake, LoadedBackend)
        fake.said = EngineLoad(running=50, waiting=50, kv_usage=1.0)
        fake.faults.arm(Fault(kind="status", status=503, count=20))
        async with it.pool.lease("default") as lease:
            for _ in range(20):
                with pytest.raises(EngineBusy):
                    await call(lease)
                await trio.sleep(0.5)
            assert it.info(name).call_limit == 8
            # What was said to calls just before it went on is no pressure either.
            it.fakes["http://one"].faults.arm(Fault(kind="status", status=503, count=3))
            fake.said = EngineLoad()
            for _ in range(3):
                with pytest.raises(EngineBusy):
                    await call(lease)
            keeper.paused = False
            await call(lease)
            await trio.sleep(6)
            assert it.info(name).call_limit == 8
            fake.said = EngineLoad(running=50, waiting=50, kv_usage=1.0)
            await trio.sleep(6)
            limit = it.info(name).call_limit
            assert limit is not None
            assert limit < 8


async def test_an_engine_that_turns_calls_away_gets_fewer(autojump_clock: MockClock) -> None:
    """429 to some while others are served: it is full."""
    async with world(RULES, make=loaded) as it:
        name = await it.add("one")
        it.fakes["http://one"].faults.arm(Fault(kind="status", status=429, count=None, rate=0.3))
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(_insist, it, number)
            await trio.sleep(20)
            limit = it.info(name).call_limit
            assert limit is not None
            assert limit < 8
            assert it.state(name) == "up"
            nursery.cancel_scope.cancel()


async def _insist(it: World, number: int) -> None:
    async with it.pool.lease("default") as lease:
        for turn in range(10_000):
            try:
                await call(lease, number * 10_000 + turn)
            except EngineBusy:
                await trio.sleep(0.2)


async def test_the_line_goes_by_priority(autojump_clock: MockClock) -> None:
    """Higher first, then first come, first served; who gives up makes room."""
    async with world() as it:
        await it.add("one", max_inflight=1)
        order: list[int] = []

        async def ask(number: int, priority: int, within: float = 100) -> None:
            with trio.move_on_after(within):
                async with it.pool.lease("default") as lease:
                    await lease.generate(request(number, priority=priority))
                    order.append(number)

        async with trio.open_nursery() as nursery:
            for number, priority in enumerate((0, 0, 5, 0, 5, 9)):
                nursery.start_soon(ask, number, priority, 2.5 if number == 4 else 100)
                await wait_all_tasks_blocked()
        assert order == [0, 5, 2, 1, 3]


async def test_a_lease_tells_that_it_waits_for_a_place(autojump_clock: MockClock) -> None:
    """While it does, and not before or after."""
    async with world() as it:
        await it.add("one", max_inflight=1)
        async with it.pool.lease("default") as first, it.pool.lease("default") as second:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(call, first, 1)
                await wait_all_tasks_blocked()
                nursery.start_soon(call, second, 2)
                await wait_all_tasks_blocked()
                assert (first.lacking, second.lacking) == (None, "engine_busy")
                await trio.sleep(1.5)
                assert (first.lacking, second.lacking) == (None, None)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(call, first, 3)
                await wait_all_tasks_blocked()
                with trio.move_on_after(0.5):
                    await call(second, 4)
                assert second.lacking == "engine_busy"
            await call(second, 5)
            assert second.lacking is None


async def test_switched_off_nothing_is_held_back(autojump_clock: MockClock) -> None:
    """Whatever the engine says."""
    async with world(EngineRules(admission=AdmissionRules(enabled=False)), make=loaded) as it:
        name = await it.add("one")
        fake = it.fakes["http://one"]
        assert isinstance(fake, LoadedBackend)
        fake.said = EngineLoad(running=50, waiting=50, kv_usage=1.0)
        async with trio.open_nursery() as nursery:
            for number in range(300):
                nursery.start_soon(job, it, number)
            await trio.sleep(0.5)
            info = it.info(name)
            assert (info.call_limit, info.inflight, info.queued) == (None, 300, 0)
