"""``POST /run`` as NeMo RL's environment calls an agent server of NeMo Gym's."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from prorld.rollout.compat.rows import LEFT_S, Runs
from prorld.testing.scripted_engine.script import Script
from tests.http.compat_support import ENGINE, TENANT, compat_world, running, slow
from tests.http.raw_client import until

PARAMS = {"input": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]}


async def run(world: Any, row: dict[str, Any] | None = None, **task: Any) -> Any:
    """A row of the task handler."""
    if not world.engines.addresses:
        if ENGINE not in world.room.engines:
            world.engine(ENGINE)
        await world.call("POST", "/add_llm_server", {"address": ENGINE})
    body = {"responses_create_params": PARAMS, "data_source": "task", "prompt": "Hi.", **task} if row is None else row
    return await world.call("POST", "/run", body)


def message_log(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """What NeMo RL makes of an answer: each prompt has to begin with every token seen so far."""
    log: list[dict[str, Any]] = []
    seen: list[int] = []
    for item in answer["response"]["output"]:
        if "generation_token_ids" not in item:
            continue
        prompt, sampled = item["prompt_token_ids"], item["generation_token_ids"]
        assert prompt[: len(seen)] == seen
        assert len(sampled) == len(item["generation_log_probs"])
        log += [{"role": "user", "ids": prompt[len(seen) :]}, {"role": "assistant", "ids": sampled}]
        seen = [*prompt, *sampled]
    return log


async def test_a_row_is_answered_with_tokens_and_a_reward():
    """No start is needed; the log that NeMo RL makes of the answer is the branch, and the row comes back."""
    async with compat_world() as world:
        reply = await run(world, say=["and now?"], extra={"kept": [1]}, agent_ref={"name": "other"})
        answer = reply.json
        assert (reply.status, answer["reward"], answer["extra"]) == (200, 1.0, {"kept": [1]})
        assert answer["responses_create_params"] == PARAMS
        log = message_log(answer)
        branch = await world.branch(answer["prorld_job_id"])
        assert [token for message in log for token in message["ids"]] == branch.token_ids
        assert len(log) == 4


async def test_parameters_and_the_prompt_of_the_response_are_used():
    """Sampling comes from the response's parameters; where the row has no prompt, its input is one."""
    async with compat_world() as world:
        world.engine(ENGINE)
        await world.call("POST", "/add_llm_server", {"address": ENGINE})
        params = {"input": "Say it.", "temperature": 0.25, "top_p": 0.5, "max_output_tokens": 9, "tools": []}
        answer = (await run(world, {"responses_create_params": params, "handler": "task"})).json
        spec = (await world.room.supervisor.stored(answer["prorld_job_id"], TENANT, "")).spec
        assert (spec.sampling.temperature, spec.sampling.top_p, spec.sampling.max_tokens) == (0.25, 0.5, 9)
        assert spec.instance["prompt"] == "Say it."


@pytest.mark.parametrize("name", ["task", "unheard-of"])
async def test_an_agent_may_name_the_handler(name):
    """Where the row does not, the name of its agent is the handler's; one that there is not is 400."""
    async with compat_world() as world:
        params = {"input": "x"}
        row = {"responses_create_params": params, "prompt": "Hi.", "agent_ref": {"type": "agents", "name": name}}
        world.engine(ENGINE)
        await world.call("POST", "/add_llm_server", {"address": ENGINE})
        assert (await run(world, row)).status == (200 if name == "task" else 400)


@pytest.mark.parametrize(("stage", "what"), [("init", "handler"), ("eval", "grader")])
async def test_a_failure_has_no_reward_and_is_no_answer(stage, what):
    """A zero in its place would be trained on: it is 503, with what went wrong."""
    async with compat_world() as world:
        reply = await run(world, fail={stage: what})
        assert (reply.status, reply.json["error"]["retryable"]) == (503, True)
        assert "as it was told to" in reply.json["detail"]
        assert "retry-after" in reply.headers


async def test_time_that_is_up_is_504():
    """The same budget as that of the other routes."""
    async with compat_world(scripts=[slow()], total_s=0.3) as world:
        reply = await run(world)
        assert (reply.status, reply.code) == (504, "total_timeout")


async def test_a_forked_rollout_answers_with_the_branch_it_ended_in():
    """One branch is what an answer has room for."""
    async with compat_world() as world:
        answer = (await run(world, rewrite="compaction")).json
        log = message_log(answer)
        branch = await world.branch(answer["prorld_job_id"], 1)
        assert [token for message in log for token in message["ids"]] == branch.token_ids


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"responses_create_params": {}},
        {"responses_create_params": {"input": 7}, "data_source": "task"},
        {"responses_create_params": {"input": "x", "temperature": -1}, "data_source": "task"},
        {"responses_create_params": {"input": "x"}},
        {"responses_create_params": {"input": "x"}, "handler": 7},
        {"responses_create_params": {"input": "x"}, "handler": ""},
        {"responses_create_params": {"input": [{"role": "user", "content": [{"image": 1}]}]}, "data_source": "task"},
        {"responses_create_params": {"input": [{"type": "function_call"}]}, "data_source": "task"},
    ],
)
async def test_rows_that_can_not_be_understood(row):
    """422 with the place, and no job."""
    async with compat_world() as world:
        world.engine(ENGINE)
        await world.call("POST", "/add_llm_server", {"address": ENGINE})
        reply = await world.call("POST", "/run", row)
        assert (reply.status, reply.json["detail"][0]["loc"][0]) == (422, "body")
        assert await world.jobs() == []


async def test_without_an_engine_it_is_503():
    """As for the other routes."""
    async with compat_world() as world:
        reply = await world.call("POST", "/run", {"responses_create_params": PARAMS, "data_source": "task"})
        assert (reply.status, reply.code) == (503, "no_backend")


async def test_stop_is_not_for_rows():
    """What NeMo RL asks for goes on when an old trainer stops its server."""
    async with compat_world(scripts=[Script(turns=["fine"])]) as world:
        await world.ready()
        client = await world.connect()
        row = {"responses_create_params": PARAMS, "data_source": "task", "prompt": "x", "seconds": {"run": 0.4}}
        await client.send("POST", "/run", row)
        assert (await world.call("POST", "/stop")).status == 200
        assert (await client.reply()).status == 200


ROW = {"responses_create_params": PARAMS, "data_source": "task", "prompt": "x", "_rowidx": 3}
LONG = {"seconds": {"run": 0.4}}


async def left(world, row):
    """A call whose connection breaks while its job runs; returns when the server knows."""
    client = await world.connect()
    await client.send("POST", "/run", row)
    await until(lambda: any(run.waiting for run in runs(world)))
    client.stream.socket.close()
    await until(lambda: not any(run.waiting for run in runs(world)))


def runs(world):
    """All jobs of rows that are known."""
    return [run for alike in world.app._gym._runs._runs.values() for run in alike]


async def test_a_row_that_is_sent_again_is_not_run_again():
    """After a broken connection the same bytes find their job; another row, or one more that is alike, is another."""
    async with compat_world() as world:
        world.engine(ENGINE)
        await world.call("POST", "/add_llm_server", {"address": ENGINE})
        await left(world, ROW | LONG)
        replies = []

        async def ask(row):
            replies.append(await world.call("POST", "/run", row))

        async with trio.open_nursery() as nursery:
            for row in (ROW | LONG, ROW | LONG, ROW | LONG | {"_rowidx": 4}):
                nursery.start_soon(ask, row)
        assert [reply.status for reply in replies] == [200] * 3
        assert len({reply.json["prorld_job_id"] for reply in replies}) == 3
        assert len(await world.jobs()) == 3
        # Each was got, so a row like them is another one now.
        assert (await world.call("POST", "/run", ROW | LONG)).status == 200
        assert len(await world.jobs()) == 4


async def test_what_was_left_is_not_for_rows_after_a_change_of_engines():
    """It was sampled from those that were cleared; what is waited for goes on with the next ones."""
    async with compat_world() as world:
        world.engine(ENGINE)
        await world.call("POST", "/add_llm_server", {"address": ENGINE})
        await left(world, ROW | LONG)
        client = await world.connect()
        await client.send("POST", "/run", ROW | LONG | {"_rowidx": 4})
        await until(lambda: any(run.waiting for run in runs(world)))
        await world.call("POST", "/clear_llm_server")
        await world.call("POST", "/add_llm_server", {"address": ENGINE})
        before = await world.jobs()
        assert (await world.call("POST", "/run", ROW | LONG)).json["prorld_job_id"] not in before
        assert (await client.reply()).status == 200
        assert len(await world.jobs()) == len(before) + 1 == 3


async def test_a_row_with_an_id_of_its_own_has_one_job():
    """Joined while it runs, answered again when it is done; other fields with that id are another row."""
    async with compat_world() as world:
        world.engine(ENGINE)
        await world.call("POST", "/add_llm_server", {"address": ENGINE})
        named = ROW | LONG | {"_ng_rollout_id": "step-1-3"}
        replies = []

        async def ask():
            replies.append(await world.call("POST", "/run", named))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask)
        replies.append(await world.call("POST", "/run", named))
        assert {reply.json["prorld_job_id"] for reply in replies} == set(await world.jobs())
        assert len(await world.jobs()) == 1
        assert (await world.call("POST", "/run", named | {"_rowidx": 9})).status == 200
        assert len(await world.jobs()) == 2


async def test_a_row_that_failed_runs_anew():
    """With an id or without: what has no answer is tried again, and not told again."""
    async with compat_world() as world:
        for name in (None, "a"):
            for _ in range(2):
                assert (await run(world, fail={"eval": "grader"}, _ng_rollout_id=name)).status == 503
        assert len(await world.jobs()) == 4
        assert runs(world) == []


async def test_the_next_life_finds_the_jobs_of_rows(tmp_path):
    """A row whose call broke off with the daemon finds its job running again."""
    async with compat_world(state=tmp_path, scripts=[slow()]) as world:
        await world.call("POST", "/add_llm_server", {"address": ENGINE})
        client = await world.connect()
        await client.send("POST", "/run", ROW)
        await running(world)
    async with compat_world(state=tmp_path, scripts=[Script(turns=["fine"])]) as world:
        reply = await world.call("POST", "/run", ROW)
        assert [reply.json["prorld_job_id"]] == await world.jobs()


async def test_what_was_left_is_kept_for_a_while(autojump_clock):
    """And not beyond that, nor without bound."""
    known = Runs()
    first, second = known.begin("row"), known.begin("row")
    assert known.join("row", named=False) is None
    known.leave(first, keep=True)
    await trio.sleep(LEFT_S - 1)
    assert known.join("row", named=False) is first
    known.leave(first, keep=True)
    known.leave(second, keep=True)
    await trio.sleep(LEFT_S + 1)
    assert known.join("row", named=True) is None
    assert len(known) == 0
