"""Engines that were named while the daemon ran: written down before the answer, and there in its next life."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from prorld.domain.versions import PolicyVersion
from prorld.errors import BackendError, Conflict, Impossible, NoBackend, NotFound, Overloaded
from prorld.inference.contract import Capabilities
from prorld.inference.kept_engines import KeptEngines
from prorld.inference.watch import FIRST_LOOK_SECONDS_MAX
from prorld.store.engine_file import ENGINES_MAX, EngineFile, KeptEngine
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.scripted_engine.script import Script
from prorld.wire.ops import AddBackend, BackendSet, SetBackend, SetBackends
from tests.inference.policy_world import Uncontrolled
from tests.inference.pool_world import SECOND, Keeper, World, world


class Disk:
    """What outlives a life of the daemon."""

    def __init__(self) -> None:
        self.kept: list[KeptEngine] = []
        self.writes = 0
        self.is_full = False
        self.seconds = 0.0

    async def save(self, engines: Iterable[KeptEngine]) -> None:
        """Keep these."""
        given = list(engines)
        await trio.sleep(self.seconds)
        if self.is_full:
            raise OSError(28, "No space left on device")
        self.kept = given
        self.writes += 1

    def urls(self) -> list[str]:
        """The addresses that are kept."""
        return [each.request.url.removeprefix("http://") for each in self.kept]


def request(name: str, **options: Any) -> AddBackend:
    """One engine."""
    return AddBackend(**{"url": f"http://{name}", "kind": "vllm", **options})


async def put(it: World, engines: KeptEngines, *names: str, **options: Any) -> BackendSet:
    """The whole set of the default policy."""
    wished = [SetBackend(url=f"http://{name}", kind="vllm") for name in names]
    generation = it.pool.list("default").generation
    return await engines.replace(SetBackends(backends=wished, **{"generation": generation, **options}))


def states(it: World) -> dict[str, str]:
    """The state of every engine."""
    return {info.url.removeprefix("http://"): info.state for info in it.pool.list().items}


async def test_the_next_life_has_what_was_named_and_not_what_was_removed(autojump_clock: MockClock) -> None:
    """With its settings; what is down in the meantime comes back, and what never answers stays down."""
    disk = Disk()
    async with world() as it:
        engines = KeptEngines(it.pool, disk)
        first = await engines.add(request("first", weight=2.0, max_inflight=3, node="n1"))
        assert disk.urls() == ["first"]
        second = await engines.add(request("second"))
        third = await engines.add(request("third"))
        await engines.add(request("drained"))
        await it.add("configured")
        await engines.drain(next(info.backend_id for info in it.pool.list().items if info.url == "http://drained"))
        await engines.remove(second.backend_id)
        assert disk.urls() == ["first", "third", "drained"]
        with pytest.raises(NotFound):
            await engines.remove(second.backend_id)
        with pytest.raises(Conflict, match="already"):
            await engines.add(request("third"))
        assert (first.weight, third.state, disk.writes) == (2.0, "up", 6)

    async with world(make=lambda url: _born_dead(url, "third")) as it:
        engines = KeptEngines(it.pool, disk)
        engines.restore(disk.kept)
        assert set(states(it).values()) == {"down"}
        assert it.pool.list("default").generation == 3
        async with it.pool.lease("default") as lease:
            info = it.info(lease.backend_id)
            assert (info.url, info.weight, info.max_inflight, info.node) == ("http://first", 2.0, 3, "n1")
        await trio.sleep(30)
        assert states(it) == {"first": "up", "third": "down", "drained": "draining"}
        it.fakes["http://third"].revive()
        await trio.sleep(30)
        assert states(it) == {"first": "up", "third": "up", "drained": "draining"}
        assert disk.writes == 6
        for info in engines.list(None).items:
            await engines.remove(info.backend_id)
        assert disk.kept == []


def _born_dead(url: str, *dead: str) -> FakeBackend:
    fake = FakeBackend(SECOND, url=url)
    if url.removeprefix("http://") in dead:
        fake.die()
    return fake


async def test_a_set_is_kept_as_it_became(autojump_clock: MockClock) -> None:
    """Without those that left, those that could not be had, and those that come by themselves."""
    disk = Disk()
    async with world(make=lambda url: _born_dead(url, "mute")) as it:
        engines = KeptEngines(it.pool, disk)
        await it.add("configured")
        await engines.add(request("old"))
        await engines.add(request("elsewhere", policy="other"))
        async with it.pool.lease("default"), it.pool.lease("default"):
            answer = await put(it, engines, "configured", "new", "mute")
            assert [failed.url for failed in answer.failed] == ["http://mute"]
            assert states(it)["old"] == "draining"
        assert disk.urls() == ["elsewhere", "new"]
        with pytest.raises(Conflict, match="generation"):
            await put(it, engines, "other", generation=0)
        with pytest.raises(NoBackend):
            await put(it, engines, "mute")
        assert (disk.urls(), disk.writes) == (["elsewhere", "new"], 3)


async def test_who_goes_away_in_the_middle_leaves_what_is_there_and_what_is_kept_alike(
    autojump_clock: MockClock,
) -> None:
    """At whatever moment the caller of a set, or of one more engine, is cancelled."""
    for steps in range(40):
        disk = Disk()
        disk.seconds = 1.0
        async with world() as it:
            engines = KeptEngines(it.pool, disk)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(put, it, engines, "a", "b")
                nursery.start_soon(engines.add, request("one", policy="other"))
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                if steps == 39:
                    await wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
            assert sorted(disk.urls()) == sorted(states(it))
        if steps == 39:
            assert sorted(disk.urls()) == ["a", "b", "one"]


async def test_one_that_is_removed_while_it_is_added_is_not_kept(autojump_clock: MockClock) -> None:
    """What is written last is what is there."""
    disk = Disk()
    disk.seconds = 1.0
    async with world() as it:
        engines = KeptEngines(it.pool, disk)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engines.add, request("one"))
            await trio.sleep(0.5)
            await engines.remove(it.ids()[0])
        assert (disk.urls(), states(it)) == ([], {})


async def test_a_disk_that_takes_nothing_is_told(autojump_clock: MockClock) -> None:
    """An engine is not added and not removed then; a set that is exchanged is said to hold until a restart."""
    disk = Disk()
    async with world() as it:
        engines = KeptEngines(it.pool, disk)
        kept = await engines.add(request("kept"))
        disk.is_full = True
        with pytest.raises(Overloaded, match="No space left") as caught:
            await engines.add(request("more"))
        assert caught.value.stable_code == "state_unwritable"
        with pytest.raises(Overloaded):
            await engines.remove(kept.backend_id)
        assert states(it) == {"kept": "up"}
        with pytest.raises(Overloaded):
            await put(it, engines, "set")
        assert states(it) == {"set": "up"}
        disk.is_full = False
        await engines.add(request("more"))
        assert disk.urls() == ["set", "more"]


async def test_the_configuration_s_word_holds_for_its_engines(autojump_clock: MockClock) -> None:
    """For the same policy and address, however it is spelt."""
    disk = Disk()
    async with world() as it:
        engines = KeptEngines(it.pool, disk)
        await engines.add(request("one"))
        await engines.add(request("one", policy="other"))
    async with world() as it:
        KeptEngines(it.pool, disk).restore(disk.kept, configured=[("default", "http://one/"), ("mine", "http://two")])
        assert [(info.url, info.policy) for info in it.pool.list().items] == [("http://one", "other")]


class Mute(FakeBackend):
    """It is well, and never says what it is."""

    async def probe(self) -> Capabilities:
        """Never."""
        await trio.sleep_forever()
        raise AssertionError


class Choosy(Keeper):
    """It has lost a policy, and lets nobody in who says less than it has."""

    def must_know(self, policy: str) -> None:
        """As the test says."""
        if policy == "lost":
            raise Impossible("there is no policy 'lost'")

    def objection(self, policy: str, found: Capabilities) -> str | None:
        """Its version, or none."""
        return None if found.weights == self.version else f"it says {found.version}"


async def test_what_is_of_no_use_now_is_kept_for_later(autojump_clock: MockClock) -> None:
    """An engine of a policy that is not there, or of a kind that is not; the others come."""
    disk = Disk()
    async with world() as it:
        engines = KeptEngines(it.pool, disk)
        await engines.add(request("one", policy="lost"))
        await engines.add(request("two"))
    three = request("three", kind="sglang")
    disk.kept.append(KeptEngine(backend_id="b-3", request=three, model="m", max_context_tokens=9))
    async with world() as it:
        it.pool.keeper = Choosy()
        engines = KeptEngines(it.pool, disk)
        engines.restore(disk.kept)
        assert states(it) == {"two": "down"}
        await engines.add(request("four"))
        assert disk.urls() == ["one", "three", "two", "four"]


async def test_what_is_of_no_use_now_gives_way_to_what_is_named_in_its_place(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """An engine at the same address, or a new set of its policy: else the file would name one twice, and be refused."""
    file = EngineFile(tmp_path)
    old = [
        KeptEngine(backend_id=f"b-{name}", request=request(name, kind="sglang"), model="m", max_context_tokens=9)
        for name in ("same/", "left", "elsewhere")
    ]
    old[2] = msgspec.structs.replace(old[2], request=msgspec.structs.replace(old[2].request, policy="other"))
    await file.save(old)
    async with world() as it:
        engines = KeptEngines(it.pool, file)
        engines.restore(file.load())
        await engines.add(request("same"))
        assert [each.request.url for each in file.load()] == ["http://left", "http://elsewhere", "http://same"]
        await engines.remove(it.ids()[0])
        assert [each.request.url for each in file.load()] == ["http://left", "http://elsewhere"]
        await put(it, engines, "new")
        assert [each.request.url for each in file.load()] == ["http://elsewhere", "http://new"]


async def test_no_more_is_written_than_the_next_life_reads(tmp_path: Path, autojump_clock: MockClock) -> None:
    """What is of no use gives way to what is there."""
    file = EngineFile(tmp_path)
    await file.save(
        KeptEngine(backend_id=f"old-{n}", request=request(f"old{n}", kind="sglang"), model="m", max_context_tokens=9)
        for n in range(ENGINES_MAX)
    )
    async with world() as it:
        engines = KeptEngines(it.pool, file)
        engines.restore(file.load())
        await engines.add(request("new"))
    urls = [each.request.url for each in file.load()]
    assert (len(urls), urls[0], urls[-1]) == (ENGINES_MAX, "http://old1", "http://new")


async def test_those_that_answer_are_up_when_the_pool_has_started(autojump_clock: MockClock) -> None:
    """A trainer that names its weights then would name them for none of them; one that hangs holds nobody up."""
    disk = Disk()
    async with world() as it:
        engines = KeptEngines(it.pool, disk)
        for name in ("one", "dead", "mute"):
            await engines.add(request(name))
    it = World(make=lambda url: Mute(SECOND, url=url) if "mute" in url else _born_dead(url, "dead"))
    KeptEngines(it.pool, disk).restore(disk.kept)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        await nursery.start(it.pool.run)
        assert states(it) == {"one": "up", "dead": "down", "mute": "down"}
        assert trio.current_time() - began <= FIRST_LOOK_SECONDS_MAX
        nursery.cancel_scope.cancel()


async def test_one_that_comes_back_as_another_is_kept_out(autojump_clock: MockClock) -> None:
    """With older weights, or with another model, as one that was away for a while."""
    disk = Disk()
    async with world() as it:
        engines = KeptEngines(it.pool, disk)
        for name in ("same", "older", "other"):
            await engines.add(request(name))

    def make(url: str) -> FakeBackend:
        fake = FakeBackend(Script(model="another") if "other" in url else SECOND, url=url)
        fake.engine.label = PolicyVersion(0, 2 if "older" in url else 3).label
        return fake

    async with world(make=make) as it:
        it.pool.keeper = keeper = Choosy()
        keeper.version = PolicyVersion(0, 3)
        KeptEngines(it.pool, disk).restore(disk.kept)
        await trio.sleep(5)
        assert states(it) == {"same": "up", "older": "quarantined", "other": "quarantined"}
        told = {info.url: str(info.details.get("quarantine")) for info in it.pool.list().items}
        assert "it says 2" in told["http://older"]
        assert "another" in told["http://other"]


class Told(Uncontrolled):
    """Its client says what it was told, which in a new life is nothing."""

    async def probe(self) -> Capabilities:
        """As clients of text do."""
        return msgspec.structs.replace(await super().probe(), weights=PolicyVersion())


@pytest.mark.parametrize("kind", [Uncontrolled, Told])
async def test_one_that_can_not_say_its_version_has_the_one_that_it_was_said_to_have(
    kind: type[Uncontrolled], autojump_clock: MockClock
) -> None:
    """Also where that came later than the engine. What one that was kept out has is not known, and stays so."""
    disk, three = Disk(), PolicyVersion(0, 3)

    def make(url: str) -> FakeBackend:
        return kind(SECOND, url=url)

    async with world(make=make) as it, trio.open_nursery() as nursery:
        engines = KeptEngines(it.pool, disk)
        await nursery.start(engines.run)
        for name in ("said", "out"):
            await engines.add(request(name))
        for entry in it.pool.entries("default"):
            it.pool.let_in(entry, three)
        await wait_all_tasks_blocked()
        assert [each.weights for each in disk.kept] == [three, three]
        it.pool.put_out(it.pool.entries("default")[1], "failed", "it did not load them")
        await wait_all_tasks_blocked()
        assert [each.weights for each in disk.kept] == [three, None]
        writes = disk.writes
        await trio.sleep(60)
        assert disk.writes == writes
        nursery.cancel_scope.cancel()

    async with world(make=make) as it:
        it.pool.keeper = keeper = Choosy()
        keeper.version = three
        KeptEngines(it.pool, disk).restore(disk.kept)
        await trio.sleep(5)
        assert states(it) == {"said": "up", "out": "quarantined"}
        assert it.info(it.ids()[0]).version == 3


async def test_what_could_not_be_written_is_written_later(autojump_clock: MockClock) -> None:
    """When the disk takes it again."""
    disk = Disk()
    async with world() as it, trio.open_nursery() as nursery:
        engines = KeptEngines(it.pool, disk)
        await nursery.start(engines.run)
        disk.is_full = True
        with pytest.raises(Overloaded):
            await put(it, engines, "set")
        disk.is_full = False
        await trio.sleep(60)
        assert disk.urls() == ["set"]
        nursery.cancel_scope.cancel()


async def test_one_that_was_paused_goes_on_when_the_pause_is_over(autojump_clock: MockClock) -> None:
    """Though it could not be asked when its policy went on."""
    disk = Disk()
    async with world() as it:
        await KeptEngines(it.pool, disk).add(request("one"))

    def make(url: str) -> FakeBackend:
        fake = _born_dead(url, "one")
        fake.engine.pause("keep", clear_cache=False)
        return fake

    async with world(make=make) as it:
        it.pool.keeper = keeper = Keeper(paused=True)
        KeptEngines(it.pool, disk).restore(disk.kept)
        await trio.sleep(5)
        keeper.paused = False
        fake = it.fakes["http://one"]
        fake.revive()
        async with it.pool.lease("default"):
            assert not fake.engine.is_paused


@pytest.mark.parametrize("error", [BackendError("the client can't be made", retryable=False), KeyError("a bug")])
async def test_a_plugin_that_breaks_does_not_end_the_start(error: Exception, autojump_clock: MockClock) -> None:
    """Its engine waits for a plugin that works."""
    disk = Disk()
    async with world() as it:
        await KeptEngines(it.pool, disk).add(request("one"))

    def make(url: str) -> FakeBackend:
        raise error

    async with world(make=make) as it:
        KeptEngines(it.pool, disk).restore(disk.kept)
        assert states(it) == {}
