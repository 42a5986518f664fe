"""How jobs of old trainers live: joined, left alone, cancelled, stopped, out of time, and after a restart."""

from __future__ import annotations

import pytest
import trio

from prorld.rollout.compat.request import Mark
from prorld.rollout.compat.tries import UNFETCHED_S, Tries, Try
from prorld.store.compat_file import CompatFile, CompatState
from prorld.testing.scripted_engine.script import Latency, Script
from prorld.wire.compat import ProcessRequest, ProcessResult
from prorld.wire.ops import StagePatch, StagesPatch
from tests.http.compat_support import ENGINE, OTHER, TENANT, compat_world, hang, joined, running, slow
from tests.http.raw_client import Reply, until

BODY = {"instance": {"data_source": "task", "seconds": {"run": 0.2}}, "job_id": "x"}


async def abandoned(world):
    """A call whose trainer hangs up, to the end of its job."""
    client = await world.connect()
    await client.send("POST", "/process", BODY)
    await until(lambda: len(world.service._jobs.tries) == 1)
    client.stream.socket.close()
    await until(lambda: len(world.service._jobs.tries) == 0)


async def test_an_engine_that_is_not_up_yet_joins_when_it_is(autojump_clock):
    """The address counts at once; jobs wait for its engine within their budget."""
    async with compat_world() as world:
        engine = world.engine(ENGINE)
        engine.die()
        results: list[ProcessResult] = []
        await world.service.start()
        assert await world.service.add_engine(ENGINE)
        async with trio.open_nursery() as nursery:

            async def ask() -> None:

                results.append(await world.service.process(ProcessRequest(instance={"data_source": "task"})))

            nursery.start_soon(ask)
            await trio.sleep(20)
            assert not results
            engine.revive()
        assert results[0].reward == 1.0


async def test_a_running_job_is_joined_and_an_ended_one_starts_anew():
    """Two calls of one name are one job; a third after their end is another job."""
    async with compat_world(scripts=[Script(turns=["fine"], latency=Latency(fixed_s=0.3))]) as world:
        await world.ready()
        replies: list[Reply] = []

        async def ask() -> None:
            replies.append(await world.process("same"))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask)
        assert [reply.status for reply in replies] == [200] * 3
        assert await world.jobs() == ["same"]
        again = (await world.process("same")).json
        assert again["job_id"] == "same"
        assert await world.jobs() == ["same", again["prorld_job_id"]]
        assert again["prorld_job_id"].startswith("same.")


async def test_a_name_that_is_no_id_of_ours_is_taken_all_the_same():
    """Blanks, slashes and reserved words are fine; what is answered is the trainer's own name."""
    async with compat_world() as world:
        await world.ready()
        for name in ("a b/c", "cancel", "\u00fc\n", "x" * 500):
            result = (await world.process(name)).json
            assert (result["job_id"], result["reward"]) == (name, 1.0)


async def test_who_hangs_up_finds_the_job_again():
    """The job goes on; a retry joins it, and one that comes after its end gets what nobody has got."""
    async with compat_world(scripts=[Script(turns=["fine"], latency=Latency(fixed_s=0.3))]) as world:
        await world.ready()
        body = {"instance": {"data_source": "task"}, "job_id": "x"}
        client = await world.connect()
        await client.send("POST", "/process", body)
        await running(world)
        client.stream.socket.close()
        assert (await world.call("POST", "/process", body)).status == 200
        assert await world.jobs() == ["x"]
        client = await world.connect()
        await client.send("POST", "/process", body | {"job_id": "y"})
        await running(world)
        client.stream.socket.close()
        await world.room.supervisor.wait_done("y", TENANT)
        other = await world.call("POST", "/process", {"instance": {"data_source": "task", "reward": 2}, "job_id": "y"})
        assert other.json["prorld_job_id"] != "y"


async def test_an_unfetched_result_is_given_once_and_not_beyond_a_change_of_engines():
    """The same body gets it; after new engines, or a stop, the job runs anew."""
    async with compat_world() as world:
        await world.ready()
        body = BODY
        await abandoned(world)
        assert (await world.call("POST", "/process", body)).json["prorld_job_id"] == "x"
        assert (await world.call("POST", "/process", body)).json["prorld_job_id"] != "x"
        await abandoned(world)
        count = len(await world.jobs())
        await world.call("POST", "/clear_llm_server")
        await world.call("POST", "/add_llm_server", {"address": ENGINE})
        assert (await world.call("POST", "/process", body)).status == 200
        assert len(await world.jobs()) == count + 1


async def test_cancel():
    """The blocked call answers 200 and says so; a name that does not run is 404."""
    async with compat_world(scripts=[slow()]) as world:
        await world.ready()
        replies: dict[str, Reply] = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hang, world, "x", replies)
            await running(world)
            reply = await world.call("POST", "/cancel", {"job_id": "x"})
            assert (reply.status, reply.json) == (200, {"status": "Job x canceled successfully"})
            # It is gone by the time that this is said.
            world.room.assert_clean()
        result = replies["x"].json
        assert (replies["x"].status, result["critical_error"], result["filter"]) == (200, "cancelled", True)
        assert (result["messages"], result["resolved"], result["reward"]) == ([], False, None)
        for name in ("x", "never heard of"):
            assert (await world.call("POST", "/cancel", {"job_id": name})).status == 404
        assert (await world.call("POST", "/cancel", {})).status == 422


async def test_stop_ends_its_own_jobs_and_no_others():
    """All blocked calls are answered, nothing is left of their jobs, and a job of another tenant goes on."""
    async with compat_world(scripts=[slow()]) as world:
        await world.ready()
        replies: dict[str, Reply] = {}
        await world.room.submit("other", {"seconds": {"init": 3600.0}})
        async with trio.open_nursery() as nursery:
            for name in ("a", "b", "c"):
                nursery.start_soon(hang, world, name, replies)
            await running(world, 3)
            status = (await world.call("GET", "/status")).json
            assert status == {
                "status": "running", "pending_jobs": 3, "init_queue": 0, "run_queue": 0, "eval_queue": 0,
                "active_init": 0, "active_run": 3, "active_eval": 0, "total": 3,
            }  # fmt: skip
            assert (await world.call("POST", "/stop")).status == 200
            assert not any(backend.live for backend in world.room.backends)
        assert {name: reply.json["critical_error"] for name, reply in replies.items()} == dict.fromkeys(
            "abc", "cancelled"
        )
        assert (await world.room.supervisor.get("other", "tests")).state == "initialising"
        assert (await world.process()).code == "not_started"


async def test_stops_and_starts_at_once():
    """However they mix, each answer is one of those that there are, and a last start and stop work."""
    async with compat_world(scripts=[slow()]) as world:
        await world.ready()
        replies: dict[str, Reply] = {}
        statuses: list[int] = []

        async def say(path: str) -> None:
            statuses.append((await world.call("POST", path)).status)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hang, world, "a", replies)
            await running(world)
            for path in ("/stop", "/stop", "/start", "/stop", "/start"):
                nursery.start_soon(say, path)
        assert set(statuses) <= {200, 400, 503}
        assert replies["a"].json["critical_error"] == "cancelled"
        with trio.move_on_after(5):
            await world.call("POST", "/stop")
        assert (await world.call("POST", "/start")).status == 200
        world.room.assert_clean()


async def test_a_job_waits_for_the_next_engine():
    """Engines that are cleared away under a job leave it waiting; it ends on the next one, with the same tokens."""
    async with compat_world(scripts=[Script(turns=["fine"], latency=Latency(fixed_s=0.3))]) as world:
        await world.ready()
        world.engine(OTHER)
        replies: dict[str, Reply] = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: hang(world, "x", replies, say=["again", "and again"]))
            await running(world)
            await world.call("POST", "/clear_llm_server")
            await until(lambda: not any(backend.live for backend in world.room.backends))
            await trio.sleep(0.05)
            assert not replies
            await world.call("POST", "/add_llm_server", {"address": OTHER})
        result = replies["x"].json
        assert (result["critical_error"], result["reward"]) == (None, 1.0)
        assert joined(result) == (await world.branch("x")).token_ids


@pytest.mark.parametrize("without_engine", [False, True])
async def test_a_job_whose_time_is_up_is_504(without_engine):
    """The body says so in both languages; waiting for an engine counts as well."""
    async with compat_world(scripts=[slow()], total_s=0.4) as world:
        await world.ready()
        if without_engine:
            replies: dict[str, Reply] = {}
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: hang(world, "x", replies, seconds={"init": 0.1}))
                await until(lambda: len(world.service._jobs.tries) == 1)
                await world.call("POST", "/clear_llm_server")
            reply = replies["x"]
        else:
            reply = await world.process("x", instance_id="i")
            assert reply.json["instance_id"] == "i"
        assert (reply.status, reply.code, reply.json["critical_error"]) == (504, "job_timeout", "timeout")
        assert reply.json["timing"]["timeout_triggered"] is True
        assert (reply.json["resolved"], reply.json["messages"], reply.json["filter"]) == (False, [], True)


async def test_time_in_queues_does_not_count():
    """Jobs that wait long for their turn have their whole budget when it comes."""
    script = Script(turns=["fine"], latency=Latency(fixed_s=0.3))
    async with compat_world(scripts=[script], total_s=0.8) as world:
        world.room.supervisor.set_stages(StagesPatch(run=StagePatch(workers=1)))
        await world.ready()
        replies: dict[str, Reply] = {}
        async with trio.open_nursery() as nursery:
            for name in "abcde":
                nursery.start_soon(hang, world, name, replies)
        assert [reply.status for reply in replies.values()] == [200] * 5


async def test_the_next_life_goes_on(tmp_path):
    """Started, engines and running jobs are there again; a retry under the same name joins its job."""
    async with compat_world(state=tmp_path, scripts=[slow()]) as world:
        await world.ready()
        client = await world.connect()
        await client.send("POST", "/process", {"instance": {"data_source": "task"}, "job_id": "x"})
        await running(world)
    async with compat_world(state=tmp_path, scripts=[Script(turns=["fine"])]) as world:
        assert world.engines.addresses == [ENGINE]
        reply = await world.call("POST", "/process", {"instance": {"data_source": "task"}, "job_id": "x"})
        assert (reply.status, reply.json["prorld_job_id"]) == (200, "x")
        assert await world.jobs() == ["x"]
        assert (await world.call("POST", "/start")).status == 400
        assert (await world.call("POST", "/stop")).status == 200
    async with compat_world(state=tmp_path, scripts=[Script()]) as world:
        assert (await world.call("GET", "/status")).status == 503


async def test_the_next_life_has_the_results_that_nobody_has_got(tmp_path):
    """The same body gets it and nothing runs twice; another body of that name is another job, as ever."""
    async with compat_world(state=tmp_path, scripts=[Script(turns=["fine"])]) as world:
        await world.ready()
        await abandoned(world)
    async with compat_world(state=tmp_path, scripts=[Script(turns=["fine"])]) as world:
        other = {"instance": {"data_source": "task", "reward": 0.5}, "job_id": "x"}
        result = (await world.call("POST", "/process", BODY)).json
        assert (result["prorld_job_id"], result["reward"]) == ("x", 1.0)
        assert await world.jobs() == ["x"]
        assert (await world.call("POST", "/process", other)).json["prorld_job_id"] != "x"


@pytest.mark.parametrize("what", ["fetched", "cleared", "stopped", "forgotten", "old"])
async def test_the_next_life_gives_no_result_that_it_must_not_give(tmp_path, what, monkeypatch):
    """One that was got, of engines that were cleared, of a batch that was stopped, or of too long ago."""
    async with compat_world(state=tmp_path, scripts=[Script(turns=["fine"])]) as world:
        await world.ready()
        if what == "fetched":
            assert (await world.call("POST", "/process", BODY)).json["prorld_job_id"] == "x"
            await until(lambda: CompatFile(tmp_path).load().fetched == ["x"])
        else:
            await abandoned(world)
        if what == "cleared":
            await world.call("POST", "/clear_llm_server")
            await world.call("POST", "/add_llm_server", {"address": ENGINE})
        elif what == "stopped":
            await world.call("POST", "/stop")
            await world.call("POST", "/start")
        elif what == "forgotten":
            # As a version wrote it that knew nothing of this.
            kept = CompatFile(tmp_path).load()
            await CompatFile(tmp_path).save(CompatState(started=kept.started, addresses=kept.addresses))
    if what == "old":
        monkeypatch.setattr("prorld.rollout.compat.earlier.UNFETCHED_S", -1.0)
    async with compat_world(state=tmp_path, scripts=[Script(turns=["fine"])]) as world:
        result = (await world.call("POST", "/process", BODY)).json
        assert (result["prorld_job_id"] != "x", result["reward"]) == (True, 1.0)


async def test_a_result_that_was_got_twice_is_written_down_once_and_for_a_while(autojump_clock):
    """What is known of results that were got is bounded in time and number, as the results are."""
    tries = Tries()
    left = []
    for n in range(3):
        one = Try(Mark(job_id=f"n{n}", body="b", total_s=1.0))
        one.job_id = f"j{n}"
        left.append((one, 10.0 * n))
    tries.restore(left, ["earlier"])
    assert [tries.unfetched(one.mark) for one, _ in left] == [one for one, _ in left]
    assert [tries.fetch(left[0][0]) for _ in range(2)] == [True, False]
    assert tries.fetched == ["earlier", "j0"]
    await trio.sleep(UNFETCHED_S - 15)
    assert [tries.unfetched(one.mark) is one for one, _ in left] == [False, True, False]
    await trio.sleep(20)
    assert tries.fetched == []
