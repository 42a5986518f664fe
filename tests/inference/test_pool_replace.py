"""A policy's whole set of engines exchanged at once: either the old one or the new one, and never none."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from prorld.domain.versions import PolicyVersion
from prorld.errors import BackendError, BadRequest, Conflict, NoBackend
from prorld.inference.replacement import REPLACE_SECONDS_MAX
from prorld.testing.fake_backend import FakeBackend
from prorld.wire.ops import BackendSet, SetBackend, SetBackends
from tests.inference.pool_world import SECOND, Keeper, World, call, world


class Slow(FakeBackend):
    """Takes two seconds to answer its probe; for ever, if its address says so."""

    async def probe(self) -> Any:
        await trio.sleep(1e9 if "mute" in self.url else 2)
        return await super().probe()


def slow(url: str) -> FakeBackend:
    """What makes them."""
    return Slow(SECOND, url=url)


def wish(name: str, **options: Any) -> SetBackend:
    """One engine of a set."""
    return SetBackend(**{"url": f"http://{name}", "kind": "vllm", **options})


def urls(it: World, policy: str = "default") -> list[str]:
    """The addresses of those that are there and not about to leave."""
    items = it.pool.list(policy).items
    return [info.url.removeprefix("http://") for info in items if not info.details["leaving"]]


async def test_the_whole_set_is_exchanged(autojump_clock: MockClock) -> None:
    """Who stays keeps id and leases and gets its new settings; who is new is there; who is not named is gone."""
    async with world() as it:
        old, stays = await it.add("old"), await it.add("stays")
        async with it.pool.lease("default") as one, it.pool.lease("default") as two:
            assert {one.backend_id, two.backend_id} == {old, stays}
            answer = await it.replace(
                wish("stays", weight=3.0, max_inflight=7, node="n1"), wish("new", policy="default"), removed="migrate"
            )
            assert (answer.failed, answer.removed) == ([], [old])
            assert [item.url for item in answer.items] == ["http://stays", "http://new"]
            info = it.info(stays)
            assert (info.weight, info.max_inflight, info.call_limit, info.node, info.leases) == (3.0, 7, 7, "n1", 1)
            new = answer.items[1].backend_id
            held = next(lease for lease in (one, two) if lease.backend_id == old)
            with pytest.raises(NoBackend, match="removed"):
                await call(held)
            await held.migrate()
            assert held.backend_id in {stays, new}
        assert it.fakes["http://old"].is_closed is False
        await trio.sleep(2)
        assert it.fakes["http://old"].is_closed


async def test_drained_engines_are_left_by_their_last_lease(autojump_clock: MockClock) -> None:
    """They finish what they have, get nothing new, and are forgotten without a move of the generation."""
    async with world() as it:
        old = await it.add("old")
        async with it.pool.lease("default") as lease:
            answer = await it.replace("new")
            (new,) = [item.backend_id for item in answer.items if item.url == "http://new"]
            assert (it.state(old), it.info(old).details["leaving"]) == ("draining", True)
            await call(lease)
            async with it.pool.lease("default") as other:
                assert other.backend_id == new
            await call(lease)
            assert lease.backend_id == old
        assert it.ids() == [new]
        assert it.pool.list("default").generation == answer.generation
        await trio.sleep(2)
        assert it.fakes["http://old"].is_closed


async def test_who_was_leaving_can_be_named_again(autojump_clock: MockClock) -> None:
    """By a set or by itself, it keeps its id and the leases that it still has."""
    async with world() as it:
        first = await it.add("first")
        async with it.pool.lease("default") as lease:
            await it.replace("second")
            await it.replace("first")
            assert (it.state(first), urls(it), lease.backend_id) == ("up", ["first"], first)
            await call(lease)
            await it.replace("second")
            assert await it.add("first") == first
            assert (it.state(first), sorted(urls(it))) == ("up", ["first", "second"])
            await call(lease)
        assert it.state(first) == "up"


async def test_calls_on_a_removed_engine_go_on_elsewhere_with_the_same_tokens(autojump_clock: MockClock) -> None:
    """``migrate`` ends them at once; nothing of them is counted as sampled, and the engine has nobody left."""
    async with world() as it:
        await it.add("old")
        async with it.pool.lease("default") as lease:
            failed: list[BackendError] = []

            async def try_it() -> None:
                try:
                    await call(lease)
                except BackendError as exc:
                    failed.append(exc)
                    await lease.migrate()
                    await call(lease)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(try_it)
                await trio.sleep(0.5)
                await it.replace("new", removed="migrate")
                await wait_all_tasks_blocked()
                assert not it.fakes["http://old"].live
            assert [(exc.stable_code, exc.may_retry) for exc in failed] == [("engine_lost", True)]
            sent = [it.fakes[f"http://{name}"].requests[0].token_ids for name in ("old", "new")]
            assert sent[0] == sent[1]
            (info,) = it.pool.list().items
            assert (info.migrated_in_total, info.calls_total, info.errors_total) == (1, 1, 0)


async def test_a_failed_probe_rejects_nobody_else(autojump_clock: MockClock) -> None:
    """The answer says which and why; a known engine that does not answer stays, down, and comes back by itself."""
    async with world(make=slow) as it:
        known = await it.add("known")
        it.fakes["http://known"].die()
        await trio.sleep(5)
        assert it.state(known) == "down"
        it.fakes["http://dead"] = dead = slow("http://dead")
        dead.die()
        began = trio.current_time()
        answer = await it.replace("known", "dead", "good", "mute")
        assert trio.current_time() - began <= REPLACE_SECONDS_MAX
        assert {row.url: row.code for row in answer.failed} == {
            "http://known": "engine_unreachable",
            "http://dead": "engine_unreachable",
            "http://mute": "engine_failed",
        }
        assert all(row.message for row in answer.failed)
        assert urls(it) == ["known", "good"]
        assert dead.is_closed
        assert it.fakes["http://mute"].is_closed
        it.fakes["http://known"].revive()
        await trio.sleep(30)
        assert it.state(known) == "up"


async def test_a_set_of_nobody_changes_nothing(autojump_clock: MockClock) -> None:
    """Where no engine of the new set could take a lease, the old one stays as it is."""
    async with world() as it:
        old = await it.add("old")
        it.fakes["http://dead"] = FakeBackend(SECOND, url="http://dead")
        it.fakes["http://dead"].die()
        before = it.pool.list("default")
        with pytest.raises(NoBackend) as caught:
            await it.replace("dead")
        assert caught.value.details is not None
        assert [row["url"] for row in caught.value.details["failed"]] == ["http://dead"]
        assert (it.ids(), it.state(old)) == ([old], "up")
        assert it.pool.list("default").generation == before.generation


async def test_a_generation_that_moved_is_refused(autojump_clock: MockClock) -> None:
    """It moves with the set and with nothing else, each policy's by itself, and the refusal says which it is now."""
    async with world() as it:
        assert it.pool.list("default").generation == 0
        first = await it.add("first")
        await it.add("other", policy="another")
        assert [it.pool.list(policy).generation for policy in ("default", "another", None)] == [1, 1, 2]
        it.fakes["http://first"].die()
        await trio.sleep(4)
        it.fakes["http://first"].revive()
        await trio.sleep(8)
        await it.pool.drain(first)
        assert (it.state(first), it.pool.list("default").generation) == ("draining", 1)
        with pytest.raises(Conflict) as caught:
            await it.replace("second", generation=0)
        assert (caught.value.stable_code, caught.value.details) == ("generation_moved", {"generation": 1})
        assert (await it.replace("first", "second", generation=1)).generation == 2
        assert it.state(first) == "up"
        await it.pool.remove(first)
        assert it.pool.list("default").generation == 3
        assert it.pool.list("another").generation == 1


async def test_of_two_at_once_one_wins(autojump_clock: MockClock) -> None:
    """The other is told so and leaves nothing behind."""
    async with world(make=slow) as it:
        await it.add("old")
        ended: dict[str, object] = {}

        async def put(name: str) -> None:
            try:
                ended[name] = await it.replace(name, generation=1)
            except Conflict as exc:
                ended[name] = exc

        async with trio.open_nursery() as nursery:
            nursery.start_soon(put, "left")
            nursery.start_soon(put, "right")
        winner = next(name for name, what in ended.items() if isinstance(what, BackendSet))
        loser = next(name for name, what in ended.items() if isinstance(what, Conflict))
        assert (urls(it), it.fakes[f"http://{loser}"].is_closed) == ([winner], True)


async def test_an_addition_in_the_middle_moves_the_generation(autojump_clock: MockClock) -> None:
    """What came while the probes ran is not swept away by somebody who had not seen it."""
    async with world(make=slow) as it:
        await it.add("old")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(it.add, "late")
            await trio.sleep(1)
            with pytest.raises(Conflict):
                await it.replace("new")
        assert urls(it) == ["old", "late"]


async def test_one_that_both_add_is_there_once(autojump_clock: MockClock) -> None:
    """The addition finds that a set has brought it."""
    async with world(make=slow) as it:
        await it.add("old")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(it.replace, "both")
            await trio.sleep(1)
            with pytest.raises(Conflict):
                await it.add("both")
        assert urls(it) == ["both"]


@pytest.mark.parametrize("removed", ["drain", "migrate"])
@pytest.mark.parametrize("step", range(1, 24))
async def test_a_cancel_at_any_step_leaves_the_old_or_the_new_set(
    step: int, removed: str, autojump_clock: MockClock
) -> None:
    """Whoever waits for an engine all the while is never without one."""
    async with world() as it:
        await it.add("old")
        sets = ({"old"}, {"new", "third"})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: it.replace("new", "third", removed=removed))
            for _ in range(step):
                await trio.lowlevel.checkpoint()
                assert set(urls(it)) in sets
                assert it.pool.has_engine("default")
            nursery.cancel_scope.cancel()
        assert set(urls(it)) in sets
        async with it.pool.lease("default") as lease:
            await call(lease)
        await trio.sleep(2)
        closed = {url.removeprefix("http://") for url, fake in it.fakes.items() if fake.is_closed}
        assert not closed & set(urls(it))


async def test_other_clients_for_the_same_engine(autojump_clock: MockClock) -> None:
    """Another model name needs another client: the engine keeps its id, and a call on the old one ends well."""
    async with world() as it:
        known = await it.add("one")
        old = it.fakes.pop("http://one")
        async with it.pool.lease("default") as lease, trio.open_nursery() as nursery:
            nursery.start_soon(call, lease)
            await trio.sleep(0.5)
            answer = await it.replace(wish("one", model="adapter"))
            assert (answer.failed, it.ids()) == ([], [known])
            assert old.live
        await trio.sleep(2)
        assert (old.is_closed, it.fakes["http://one"].is_closed) == (True, False)
        it.fakes.pop("http://one")
        it.fakes["http://one"] = broken = FakeBackend(SECOND, url="http://one")
        broken.die()
        answer = await it.replace(wish("one", model="missing"), "two")
        assert [row.url for row in answer.failed] == ["http://one"]
        assert (it.state(known), broken.is_closed) == ("up", True)


async def test_a_version_is_read_back(autojump_clock: MockClock) -> None:
    """An engine that says another one is quarantined, one that says none is told, and a lower one is refused."""
    async with world() as it:
        keeper = it.pool.keeper = Keeper()
        known = await it.add("known")
        for name, label in (("good", "prorld-0.5"), ("stale", "prorld-0.4"), ("silent", "anything")):
            it.fakes[f"http://{name}"] = fake = FakeBackend(SECOND, url=f"http://{name}")
            fake.engine.set_label(label)
        it.fakes["http://known"].engine.set_label("prorld-0.5")
        answer = await it.replace("known", "good", "stale", "silent", version=5)
        assert [(row.url, row.code) for row in answer.failed] == [("http://stale", "version_differs")]
        states = {info.url.removeprefix("http://"): info.state for info in it.pool.list().items}
        assert states == {"known": "up", "good": "up", "stale": "quarantined", "silent": "up"}
        assert it.info(known).version == 5
        with pytest.raises(Conflict) as caught:
            await it.replace("stale", version=4)
        assert caught.value.stable_code == "version_too_low"
        it.fakes["http://stale"].engine.set_label("prorld-0.6")
        await it.replace("stale", version=6)
        assert keeper.kept == [PolicyVersion(0, 5), PolicyVersion(0, 6)]
        assert [info.state for info in it.pool.list().items] == ["up"]


async def test_a_slash_at_the_end_makes_no_other_engine(autojump_clock: MockClock) -> None:
    """However an address is spelt, it keeps its id and its leases."""
    async with world() as it:
        name = await it.add("one")
        async with it.pool.lease("default"):
            await it.replace(wish("one/"))
            assert (it.ids(), it.info(name).leases) == ([name], 1)
        with pytest.raises(Conflict):
            await it.add("one")
        with pytest.raises(BadRequest, match="twice"):
            await it.replace("two", "two/")


async def test_what_can_not_be_is_refused_before_anybody_is_asked(autojump_clock: MockClock) -> None:
    """Doubles, another policy's engine, unknown kinds and bad addresses."""
    async with world() as it:
        await it.add("old")
        for bad in (
            [wish("a"), wish("a")],
            [wish("a", policy="another")],
            [wish("a", kind="sglang")],
            [wish("bad")],
        ):
            with pytest.raises(BadRequest):
                await it.pool.replace(SetBackends(generation=1, backends=bad))
        assert urls(it) == ["old"]
