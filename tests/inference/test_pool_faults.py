"""What becomes of the calls in an engine that goes wrong: each ends, by an error that sends its job elsewhere."""

from __future__ import annotations

from functools import partial

import pytest
import trio
from trio.testing import MockClock

from prorld.errors import BackendError, NoBackend
from prorld.inference.contract import EngineLoad
from prorld.inference.lease import Lease
from prorld.inference.pool_entry import DOWN_SECONDS_MIN, EngineRules
from prorld.inference.watch import ABANDON_SECONDS, HEALTH_SECONDS, HEALTH_SECONDS_MAX
from prorld.testing.scripted_engine.script import Fault
from tests.inference.pool_world import SECOND, Keeper, LoadedBackend, World, call, request, world

STALL = EngineRules(stall_s=60)


class Frozen(LoadedBackend):
    """As long as ``is_frozen``, it takes everything and answers nothing, not even its health check."""

    is_frozen = False

    async def healthy(self) -> bool:
        if self.is_frozen:
            await trio.sleep_forever()
        return await super().healthy()


def frozen(url: str) -> Frozen:
    """What makes them."""
    return Frozen(SECOND, url=url)


async def outcome(lease: Lease, ended: list[tuple[float, str]], number: int = 0) -> None:
    """One call; when it ended and how."""
    try:
        await lease.generate(request(number))
        ended.append((trio.current_time(), "ok"))
    except BackendError as exc:
        ended.append((trio.current_time(), exc.stable_code if exc.may_retry else "for good"))


async def test_an_engine_that_falls_silent_is_given_up_with_its_calls(autojump_clock: MockClock) -> None:
    """No answer to its health checks: no new calls soon, and those in it fail a little later, when there is no hope."""
    async with world(make=frozen) as it:
        name = await it.add("one")
        fake = it.fakes["http://one"]
        assert isinstance(fake, Frozen)
        fake.faults.arm(Fault(kind="hang"))
        ended: list[tuple[float, str]] = []
        async with it.pool.lease("default") as lease, trio.open_nursery() as nursery:
            nursery.start_soon(outcome, lease, ended)
            await trio.sleep(1.5)
            fake.is_frozen = True
            since = trio.current_time()
            await trio.sleep(3 * (HEALTH_SECONDS + HEALTH_SECONDS_MAX) + 1)
            assert (it.state(name), ended) == ("down", [])
            with pytest.raises(NoBackend):
                await call(lease, 1)
        ((at, code),) = ended
        assert code == "engine_lost"
        assert at - since <= ABANDON_SECONDS + 4 * (HEALTH_SECONDS + HEALTH_SECONDS_MAX)
        assert not fake.live


async def test_one_that_was_only_slow_keeps_its_calls(autojump_clock: MockClock) -> None:
    """A few checks are missed, and then it answers: what was in it ends well."""
    async with world(make=frozen) as it:
        name = await it.add("one")
        fake = it.fakes["http://one"]
        assert isinstance(fake, Frozen)
        fake.faults.arm(Fault(kind="slow", seconds=12))
        ended: list[tuple[float, str]] = []
        async with it.pool.lease("default") as lease, trio.open_nursery() as nursery:
            nursery.start_soon(outcome, lease, ended)
            fake.is_frozen = True
            await trio.sleep(9.5)
            assert it.state(name) == "down"
            fake.is_frozen = False
        assert [code for _, code in ended] == ["ok"]


async def test_an_engine_that_works_on_nothing_is_given_up(autojump_clock: MockClock) -> None:
    """It is cheerful and takes calls, but its count of tokens stands still while calls are in it."""
    async with world(STALL, make=frozen) as it:
        name = await it.add("one")
        fake = it.fakes["http://one"]
        assert isinstance(fake, Frozen)
        fake.said = EngineLoad(running=1, waiting=0, tokens_total=100)
        await trio.sleep(300)
        assert it.state(name) == "up"
        ended: list[tuple[float, str]] = []
        async with it.pool.lease("default") as lease:
            for round_ in range(3):
                fake.faults.arm(Fault(kind="hang"))
                began = trio.current_time()
                await outcome(lease, ended, round_)
                assert 60 <= trio.current_time() - began <= 70
                assert ended[-1][1] == "engine_lost"
                # It stays away for longer each time that it has come back and served nobody.
                lost = trio.current_time()
                await lease.migrate()
                assert trio.current_time() - lost >= DOWN_SECONDS_MIN * 2**round_
            await outcome(lease, ended)
            assert ended[-1][1] == "ok"


async def test_one_that_works_slowly_is_left_to_it(autojump_clock: MockClock) -> None:
    """Tokens that come, a pause that was asked for, or an engine that does not count: none of these is a stall."""
    async with world(STALL, make=frozen) as it:
        names = [await it.add(name) for name in ("counts", "paused", "mute")]
        fakes = [it.fakes[f"http://{name}"] for name in ("counts", "paused", "mute")]
        for fake in fakes:
            fake.faults.arm(Fault(kind="slow", seconds=500))
        counts, paused, _ = fakes
        assert isinstance(counts, Frozen)
        assert isinstance(paused, Frozen)
        paused.said = EngineLoad(tokens_total=7)
        it.pool.keeper = Keeper(paused=True)
        ended: list[tuple[float, str]] = []
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(_leased, it, ended, number)
            for tokens in range(50):
                counts.said = EngineLoad(tokens_total=float(tokens))
                await trio.sleep(10)
                assert {it.state(name) for name in names} == {"up"}
        assert [code for _, code in ended] == ["ok"] * 3


async def _leased(it: World, ended: list[tuple[float, str]], number: int) -> None:
    async with it.pool.lease("default") as lease:
        await outcome(lease, ended, number)


async def test_a_call_may_have_a_bound(autojump_clock: MockClock) -> None:
    """Past it the call is ended and counted as a fault, whatever the engine says of itself."""
    async with world(EngineRules(call_s=30)) as it:
        name = await it.add("one")
        it.fakes["http://one"].faults.arm(Fault(kind="hang", count=3))
        ended: list[tuple[float, str]] = []
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(_leased, it, ended, number)
        assert ended == [(30.0, "engine_slow")] * 3
        assert (it.state(name), it.info(name).errors) == ("down", {"engine_slow": 3})
        assert it.metrics.value("prorld_engine_call_seconds_count", kind="vllm", result="engine_slow") == 3


async def test_calls_in_line_go_elsewhere_at_once(autojump_clock: MockClock) -> None:
    """Those in an engine that is removed run to their end; those that wait for a place there do not wait for that."""
    async with world() as it:
        name = await it.add("one", max_inflight=1)
        ended: list[tuple[float, str]] = []
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(_leased, it, ended, number)
            await trio.sleep(0.25)
            assert (it.info(name).inflight, it.info(name).queued) == (1, 2)
            await it.pool.remove(name)
        assert ended == [(0.25, "no_backend"), (0.25, "no_backend"), (1.0, "ok")]


async def test_a_straggler_does_not_bring_an_engine_back(autojump_clock: MockClock) -> None:
    """A call that fails on an engine that is down already leaves it down."""
    async with world() as it:
        name = await it.add("one")
        fake = it.fakes["http://one"]
        fake.faults.arm(Fault(kind="slow", seconds=1))
        ended: list[tuple[float, str]] = []
        async with trio.open_nursery() as nursery:
            for number in range(2):
                nursery.start_soon(_leased, it, ended, number)
            await trio.sleep(0.5)
            fake.die()
        assert [code for _, code in ended] == ["engine_unreachable"] * 2
        assert it.state(name) == "down"


async def test_what_is_counted_of_an_engine(autojump_clock: MockClock) -> None:
    """Calls, errors by code, tokens, moves, busy time: in the list and for Prometheus, gone when the engine is."""
    async with world() as it:
        one, two = await it.add("one"), await it.add("two")
        it.fakes["http://one"].faults.arm(Fault(kind="garbage"))
        async with it.pool.lease("default") as lease:
            with pytest.raises(BackendError):
                await call(lease)
            await lease.migrate()
            for number in (1, 2):
                await call(lease, number)
            await trio.sleep(10)
            it.metrics.engines_seen(it.pool.samples())
            value = partial(it.metrics.value, policy="default")
            assert value("prorld_backend_errors_total", backend=one, code="malformed_engine_reply") == 1
            assert value("prorld_backend_calls_total", backend=two) == 2
            assert value("prorld_backend_tokens_total", backend=two, origin="prompted") == 6
            assert value("prorld_backend_tokens_total", backend=two, origin="sampled") == 8
            assert value("prorld_backend_migrations_total", backend=one, direction="away") == 1
            assert value("prorld_backend_migrations_total", backend=two, direction="in") == 1
            assert value("prorld_backend_busy_seconds_total", backend=two) == 2.0
            assert value("prorld_backend_leases", backend=two) == 1
        info = it.info(two)
        assert (info.calls_total, info.tokens_prompted_total, info.tokens_sampled_total) == (2, 6, 8)
        assert (info.busy_s, info.migrated_in_total, it.info(one).migrated_away_total) == (2.0, 1, 1)
        cached = it.metrics.value("prorld_tokens_cached_total", policy="default")
        assert cached == info.tokens_cached_total + it.info(one).tokens_cached_total
        await it.pool.remove(two)
        it.metrics.engines_seen(it.pool.samples())
        assert value("prorld_backend_calls_total", backend=two) is None
