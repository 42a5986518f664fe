"""The seven routes of the original ProRL Agent server, over a real socket and a real supervisor."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from prorld.ops.conditions import Parts, checks
from prorld.wire.ops import AddBackend
from tests.http.compat_support import ENGINE, OTHER, TENANT, TOKENS, compat_world, joined

ALL_PARAMS: dict[str, Any] = {
    "model": "hosted_vllm/policy", "api_key": "secret-of-an-engine", "temperature": 0.5, "top_p": 0.9,
    "max_output_tokens": 77, "max_iterations": 5, "token_level_generation": True, "custom_tokenizer": "Some/Model",
    "max_model_len": 4096, "enable_thinking": False, "ensure_thinking_end_properly": True, "strict_loop_detector": True,
}  # fmt: skip


async def test_start_and_stop_are_said_once_each():
    """Started twice is 400, stopped twice 503, and what needs a started server is 503 before."""
    async with compat_world() as world:
        for method, path in (("POST", "/stop"), ("GET", "/status")):
            reply = await world.call(method, path)
            assert (reply.status, reply.code) == (503, "not_started")
            assert "POST /start" in reply.json["detail"]
        assert (await world.process()).code == "not_started"
        reply = await world.call("POST", "/start")
        assert (reply.status, reply.json) == (200, {"status": "Server started successfully"})
        assert ((await world.call("POST", "/start")).status, (await world.call("GET", "/status")).status) == (400, 200)
        reply = await world.call("POST", "/stop")
        assert (reply.status, reply.json) == (200, {"status": "Server stopped successfully"})
        assert (await world.call("POST", "/stop")).status == 503


async def test_engines_are_buffered_added_kept_and_cleared():
    """Before the start an address is buffered; a second time changes nothing; start and stop leave them alone."""
    async with compat_world() as world:
        world.engine(ENGINE)
        world.engine(TOKENS)
        said = (await world.call("POST", "/add_llm_server", {"address": ENGINE})).json
        assert said == {"status": f"Buffered LLM server address: {ENGINE}"}
        await world.call("POST", "/start")
        for _ in range(2):
            reply = await world.call("POST", "/add_llm_server", {"address": TOKENS})
            assert (reply.status, reply.json) == (200, {"status": f"Added LLM server address: {TOKENS}"})
        engines = world.room.pool.list(TENANT).items
        assert [(info.url, info.kind) for info in engines] == [(ENGINE, "openai"), (TOKENS, "prorl")]
        await world.call("POST", "/stop")
        await world.call("POST", "/start")
        assert (await world.process()).status == 200
        reply = await world.call("POST", "/clear_llm_server")
        assert (reply.status, reply.json) == (200, {"status": "Cleared all LLM server addresses"})
        assert world.room.pool.list(TENANT).items == []
        assert (await world.process()).code == "no_backend"


async def test_an_engine_of_the_operator_is_left_alone():
    """Clearing forgets what was named here, and no engine that the policy got otherwise."""
    async with compat_world() as world:
        world.engine(ENGINE)

        await world.room.pool.add(AddBackend(url=ENGINE, kind="openai", policy=TENANT))
        await world.ready(ENGINE)
        await world.call("POST", "/clear_llm_server")
        assert len(world.room.pool.list(TENANT).items) == 1
        assert (await world.process()).status == 200


async def test_a_result_has_all_that_a_trainer_reads():
    """Each name of the result, and messages that make up the branch of the trajectory."""
    async with compat_world() as world:
        await world.ready()
        reply = await world.process(
            "a job", instance_id="i-1", trajectory_id=3, say=["go on", "and on"], params={"max_output_tokens": 50}
        )
        result = reply.json
        assert (reply.status, result["instance_id"], result["trajectory_id"], result["job_id"]) == (
            200,
            "i-1",
            3,
            "a job",
        )
        for name, value in (
            ("resolved", True), ("success", True), ("finish", True), ("error", None), ("critical_error", None),
            ("filter", False), ("reward", 1.0), ("git_patch", None), ("tools", []), ("ignored", []),
        ):  # fmt: skip
            assert result[name] == value, name
        timing = result["timing"]
        assert timing["counted_elapsed"] == pytest.approx(
            timing["init_time"] + timing["run_time"] + timing["eval_time"]
        )
        assert timing["timeout_triggered"] is False
        assert timing["others_time"] >= 0
        branch = await world.branch(result["prorld_job_id"])
        assert joined(result) == branch.token_ids
        roles = [message["role"] for message in result["messages"]]
        assert roles == ["user", "assistant"] * 3
        at = 0
        for message in result["messages"]:
            end = at + len(message["token_ids"])
            if message["role"] == "assistant":
                assert message["input_ids"] == branch.token_ids[:at]
                assert message["logprobs"] == branch.logprobs[at:end]
                assert branch.mask[at:end] == [1] * (end - at)
                assert message["content"] == "fine"
            else:
                assert (message["input_ids"], message["logprobs"]) == ([], [])
                assert not any(branch.mask[at:end])
            at = end


async def test_parameters_become_those_of_the_job_and_unknown_ones_are_told():
    """The known names do what they say, a key of an engine is kept nowhere, the rest is in ``ignored``."""
    async with compat_world() as world:
        await world.ready()
        result = (await world.process("a", params={**ALL_PARAMS, "modify_params": False, "zeta": {"x": 1}})).json
        assert result["ignored"] == ["modify_params", "zeta"]
        assert sorted(result["noted"]) == [
            "api_key", "custom_tokenizer", "ensure_thinking_end_properly", "strict_loop_detector"
        ]  # fmt: skip
        stored = await world.room.supervisor.stored("a", TENANT, "")
        spec = stored.spec
        assert (spec.sampling.temperature, spec.sampling.top_p, spec.sampling.max_tokens) == (0.5, 0.9, 77)
        assert spec.sampling.chat_template_kwargs == {"enable_thinking": False}
        assert (spec.agent.max_turns, spec.agent.max_context_tokens) == (5, 4096)
        assert (spec.timeouts.total_s, spec.policy, spec.tenant) == (300.0, TENANT, TENANT)

        assert b"secret-of-an-engine" not in msgspec.json.encode(stored)


async def test_what_the_original_does_not_know_is_taken_where_it_fits():
    """Some keys have a meaning here; in a shape that has none they are ignored as any other."""
    async with compat_world() as world:
        await world.ready()
        result = (await world.process("a", params={"seed": 7, "top_k": 20, "stop": "text", "min_p": None})).json
        assert result["ignored"] == ["min_p", "stop"]
        sampling = (await world.room.supervisor.stored("a", TENANT, "")).spec.sampling
        assert (sampling.seed, sampling.top_k, sampling.stop, sampling.min_p) == (7, 20, [], 0.0)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"instance": {"data_source": "unheard-of"}}, 400, "unknown_data_source"),
        ({"instance": {"data_source": "task", "reward": "much"}}, 422, "bad_instance"),
        ({"instance": {"data_source": "task"}, "sampling_params": {"temperature": -1}}, 422, "invalid_field"),
        ({"instance": {"data_source": "task"}, "sampling_params": {"max_iterations": "x"}}, 422, "invalid_field"),
        ({"instance": {"data_source": "task"}, "job_id": ""}, 422, "invalid_field"),
        ({"instance": {"data_source": "task"}, "job_id": 7}, 422, "invalid_field"),
        ({"instance": {"data_source": "task"}, "job_id": "x" * 600}, 422, "invalid_field"),
        ({"instance": [1]}, 422, "invalid_field"),
        ({}, 422, "invalid_field"),
        (b"", 422, "bad_json"),
        (b"{", 422, "bad_json"),
        (b"[1]", 422, "invalid_field"),
        (b'{"instance": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001, 422, None),
    ],
)
async def test_bad_bodies(body, status, code):
    """400 for a kind of task that nobody has, 422 for the rest; the detail is a list as FastAPI writes it."""
    async with compat_world() as world:
        await world.ready()
        reply = await world.call("POST", "/process", body)
        assert (reply.status, code in (None, reply.code)) == (status, True), reply.body
        if status == 422:
            assert {"loc", "msg", "type"} <= reply.json["detail"][0].keys()
        assert await world.jobs() == []


@pytest.mark.parametrize(
    "address",
    ["", "engine:8000", "ftp://engine/v1", "http://", "http://a b/v1", "http://me@there/v1", "http://[::1/v1"],
)
async def test_bad_addresses(address):
    """What can be no engine's address is refused and not kept."""
    async with compat_world() as world:
        reply = await world.call("POST", "/add_llm_server", {"address": address})
        assert reply.status == 422, reply.body
        assert world.engines.addresses == []


async def test_engines_may_be_bound_to_hosts():
    """An operator may say where engines can be."""
    async with compat_world(allowed=["engine-*"]) as world:
        world.engine(ENGINE)
        assert (await world.call("POST", "/add_llm_server", {"address": ENGINE})).status == 200
        reply = await world.call("POST", "/add_llm_server", {"address": "http://169.254.169.254/v1"})
        assert (reply.status, reply.code) == (422, "host_not_allowed")


async def test_the_usual_data_source_is_swebench():
    """An instance that does not say what it is goes to the handler that takes ``swebench``."""
    async with compat_world() as world:
        await world.ready()
        result = (await world.call("POST", "/process", {"instance": {"expected": "patched"}})).json
        assert (result["git_patch"], result["resolved"], result["reward"]) == ("--- a\n+++ b\n", False, 0.0)
        record = await world.room.supervisor.get(result["prorld_job_id"], TENANT)
        assert record.handler == "task"


@pytest.mark.parametrize(("stage", "what"), [("init", "handler"), ("run", "handler"), ("eval", "grader")])
async def test_a_failure_is_no_success(stage, what):
    """What failed is named, there is no reward, and no messages that an old trainer would take for a success."""
    async with compat_world() as world:
        await world.ready()
        reply = await world.process("a", fail={stage: what})
        result = reply.json
        assert (reply.status, result["critical_error"], result["messages"], result["reward"]) == (200, stage, [], None)
        assert (result["resolved"], result["success"], result["finish"], result["filter"]) == (
            False,
            False,
            False,
            True,
        )
        assert "as it was told to" in result["error"]


async def test_a_limit_of_the_policy_is_graded_and_no_error():
    """A policy that used up its turns is a success without a finish."""
    async with compat_world() as world:
        await world.ready()
        result = (await world.process("a", say=["more"], params={"max_iterations": 1})).json
        assert (result["success"], result["finish"], result["critical_error"], result["error"]) == (
            True,
            False,
            None,
            None,
        )
        assert (result["stop_reason"], result["filter"]) == ("max_turns", False)
        assert result["messages"]


async def test_forks_give_the_branch_that_was_sampled_last():
    """A rewritten history: messages are those of the branch it went on in. A sub-agent's branch is not taken for it."""
    async with compat_world() as world:
        await world.ready()
        result = (await world.process("fork", rewrite="compaction")).json
        assert joined(result) == (await world.branch("fork", 1)).token_ids
        result = (await world.process("sub", sub_agent=True, say=["and now?"])).json
        assert joined(result) == (await world.branch("sub", 0)).token_ids


async def test_a_huge_body_is_refused():
    """413 in the same shape; the listener goes on."""
    async with compat_world(body_bytes_max=4096) as world:
        await world.ready()
        reply = await world.process("x", prompt="y" * 10_000)
        assert (reply.status, reply.code, "detail" in reply.json) == (413, "too_large", True)
        assert (await world.call("GET", "/status")).status == 200


async def test_plain_clients_need_not_say_what_they_send():
    """A body is read as JSON whatever its type is said to be; a body where none is wanted is left alone."""
    async with compat_world() as world:
        world.engine(ENGINE)
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        assert (await world.call("POST", "/add_llm_server", {"address": ENGINE}, headers)).status == 200
        assert (await world.call("POST", "/start", b"whatever", headers)).status == 200


async def test_web_pages_are_kept_out():
    """A page in somebody's browser can reach loopback, too; it is refused by its origin, and by a foreign name."""
    async with compat_world() as world:
        reply = await world.call("POST", "/start", headers={"Origin": "http://evil.example"})
        assert (reply.status, reply.code) == (403, "foreign_origin")
        assert (await world.call("POST", "/start", headers={"Host": "evil.example"})).code == "foreign_host"
    async with compat_world(is_public=True) as world:
        assert (await world.call("POST", "/start", headers={"Host": "node-7:8006"})).status == 200


async def test_unknown_routes_and_methods():
    """Answered in the same shape."""
    async with compat_world() as world:
        for method, path, status in (("GET", "/nothing", 404), ("GET", "/start", 405), ("GET", "/v1/jobs", 404)):
            reply = await world.call(method, path)
            assert (reply.status, isinstance(reply.json["detail"], str)) == (status, True)
        assert (await world.call("GET", "/healthz")).json == {"status": "ok"}


async def test_readiness_knows_that_a_trainer_changes_its_engines():
    """Between two steps the policy has no engine and nothing is wrong; an engine that was named and is down is."""
    async with compat_world() as world:

        def broken() -> list[str]:
            parts = Parts(
                supervisor=world.room.supervisor, auditor=None, pool=world.room.pool,  # type: ignore[arg-type]
                policies=world.room.book.policies, book=world.room.book, registry=world.room.registry,
                warden=None, lag=None, disk=None, breakers=None, compat=world.service,  # type: ignore[arg-type]
            )  # fmt: skip
            looks = [check for check in checks(parts) if check.kind.code in ("no_backend", "policy_unused")]
            return [str(trouble.policy) for check in looks for trouble in check.look() if trouble.policy == TENANT]

        assert broken() == []
        await world.ready()
        assert broken() == []
        await world.call("POST", "/clear_llm_server")
        assert broken() == []
        world.engine(OTHER).die()
        await world.call("POST", "/add_llm_server", {"address": OTHER})
        assert broken() == [TENANT]


async def test_a_disk_that_refuses_is_told():
    """What could not be written down is not said to be done."""
    async with compat_world() as world:
        await world.ready()
        (world.room.state / ".compat.json.half").mkdir()
        reply = await world.call("POST", "/add_llm_server", {"address": TOKENS, "engine": world.engine(TOKENS).url})
        assert (reply.status, reply.code) == (503, "journal_failing")
        # The jobs are ended all the same.
        assert (await world.call("POST", "/stop")).status == 200
        assert (await world.call("POST", "/start")).code == "journal_failing"
        (world.room.state / ".compat.json.half").rmdir()
        # A repetition writes what the first call could not.
        assert (await world.call("POST", "/add_llm_server", {"address": TOKENS})).status == 200
        assert TOKENS in (world.room.state / "compat.json").read_text()
        assert (await world.call("POST", "/start")).status == 200


async def test_an_unheard_of_kind_of_task_is_told_before_the_engines_are_asked_for():
    """400 for what will never be, also where there is no engine yet."""
    async with compat_world() as world:
        assert (await world.call("POST", "/start")).status == 200
        reply = await world.call("POST", "/process", {"instance": {"data_source": "unheard-of"}})
        assert (reply.status, reply.code) == (400, "unknown_data_source")
        assert (await world.process()).code == "no_backend"
