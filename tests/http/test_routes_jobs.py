"""The routes of jobs, over a real socket."""

from __future__ import annotations

import msgspec
import pytest
import trio

from prorld.domain.outcome import OutcomeKind
from prorld.export.formats import export
from prorld.export.names import FORMATS
from prorld.wire.jobs import JobRecord
from prorld.wire.trajectory import Trajectory
from tests.export.documents import compacted
from tests.http.raw_client import open_fds, until

JOB = {"job_id": "a", "handler": "math", "instance": {"q": "1+1"}, "group_id": "g", "metadata": {"k": [1]}}


@pytest.fixture
async def client(nursery, world):
    """An admin's connection to a running server."""
    await world.serve(nursery)
    return await world.connect()


async def test_submit_is_201_then_200_then_409(client, world):
    """The same id with the same body is the same job, whatever the order of its keys; another body is a conflict."""
    first = await client.call("POST", "/v1/jobs", JOB)
    assert first.status == 201
    record = msgspec.json.decode(first.body, type=JobRecord)
    assert (record.job_id, record.handler, record.state, record.tenant) == ("a", "math", "queued", "default")
    again = b'{ "metadata": {"k": [1]}, "group_id": "g",\n "instance": {"q": "1+1"}, "handler": "math", "job_id": "a"}'
    assert (await client.call("POST", "/v1/jobs", again)).status == 200
    # A default that is written out is another body: the comparison is made before defaults.
    for change in ({"instance": {"q": "2"}}, {"policy": "default"}):
        reply = await client.call("POST", "/v1/jobs", JOB | change)
        assert (reply.status, reply.code) == (409, "job_exists")
    assert len(world.service.jobs) == 1


async def test_a_seed_may_be_as_large_as_63_bits(client):
    """The largest seed of the contract is accepted and the next one refused by name."""
    assert (await client.call("POST", "/v1/jobs", JOB | {"sampling": {"seed": 2**63 - 1}})).status == 201
    reply = await client.call("POST", "/v1/jobs", JOB | {"sampling": {"seed": 2**63}})
    assert (reply.status, reply.json["error"]["details"]) == (400, {"path": "$.sampling.seed"})


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({}, "$"),
        ({"instance": 3}, "$.instance"),
        ({"instance": {}, "sampling": {"temperature": -1}}, "$.sampling.temperature"),
        ({"instance": {}, "timeouts": {"init_s": "1"}}, "$.timeouts.init_s"),
        ({"instance": {}, "what": 1}, "$"),
        ({"instance": {}, "job_id": "../x"}, "$.job_id"),
        ({"instance": {}, "capture": [1]}, "$.capture[0]"),
        (b"", "$"),
        (b"{", "$"),
        (b"[]", "$"),
        (b'{"instance": {"a": \xff}}', "$"),
        (b'{"instance": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001, "$"),
        (b'{"instance": {"a": NaN}}', "$"),
    ],
)
async def test_a_wrong_body_is_400_with_the_path_of_the_field(client, world, body, path):
    """Nothing is accepted, and the answer names the field."""
    reply = await client.call("POST", "/v1/jobs", body)
    assert (reply.status, reply.json["error"]["details"]) == (400, {"path": path})
    assert reply.code in ("invalid_field", "bad_json")
    assert not world.service.jobs


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""])
async def test_a_body_that_is_not_json_by_its_own_word_is_415(client, kind):
    """A browser's form can't be taken for a submit."""
    reply = await client.call("POST", "/v1/jobs", JOB, headers={"Content-Type": kind})
    assert (reply.status, reply.code) == (415, "unsupported_media_type")


async def test_json_with_a_charset_is_json(client):
    """Parameters of the media type do not matter."""
    reply = await client.call("POST", "/v1/jobs", JOB, headers={"Content-Type": "application/json; charset=utf-8"})
    assert reply.status == 201


async def test_draining_is_503_with_retry_after(client, world):
    """Overload says when to come back, in whole seconds and never too early."""
    world.service.drain()
    reply = await client.call("POST", "/v1/jobs", JOB)
    assert (reply.status, reply.code, reply.headers["retry-after"]) == (503, "draining", "8")
    assert reply.json["error"]["retryable"] is True


async def test_a_long_poll_ends_with_the_job(client, world, nursery):
    """``wait_s`` holds the request until the job is done, and not longer."""
    await client.call("POST", "/v1/jobs", JOB)
    assert (await client.call("GET", "/v1/jobs/a")).json["state"] == "queued"
    await client.send("GET", "/v1/jobs/a?wait_s=30")
    await until(lambda: world.service.waiting == 1)
    world.service.find("a", None).finish()
    with trio.fail_after(2):
        reply = await client.reply()
    assert (reply.status, reply.json["state"], reply.json["outcome"]["kind"]) == (200, "done", "ok")
    assert world.service.waiting == 0
    assert (await client.call("GET", "/v1/jobs/a?wait_s=30")).json["state"] == "done"


async def test_a_submit_can_wait_for_the_end(client, world):
    """A rollout in one request: 201 with the record as it is at the end, or when the time is over."""
    await client.send("POST", "/v1/jobs?wait_s=30", JOB)
    await until(lambda: world.service.waiting == 1)
    world.service.find("a", None).finish()
    with trio.fail_after(2):
        reply = await client.reply()
    assert (reply.status, reply.json["state"], reply.json["outcome"]["kind"]) == (201, "done", "ok")
    reply = await client.call("POST", "/v1/jobs?wait_s=0.05", {**JOB, "job_id": "b"})
    assert (reply.status, reply.json["state"]) == (201, "queued")


async def test_a_submit_that_waits_is_never_told_that_nothing_was_accepted(client, world):
    """When the room closes meanwhile the job is accepted, and the answer says so."""
    await client.send("POST", "/v1/jobs?wait_s=30", JOB)
    await until(lambda: world.service.waiting == 1)
    world.app.holds.close()
    with trio.fail_after(2):
        reply = await client.reply()
    assert (reply.status, reply.json["state"]) == (201, "queued")


async def test_a_long_poll_that_runs_out_gives_the_record_as_it_is(client, world):
    """No end in time is not an error."""
    await client.call("POST", "/v1/jobs", JOB)
    reply = await client.call("GET", "/v1/jobs/a?wait_s=0.05")
    assert (reply.status, reply.json["state"]) == (200, "queued")
    assert (world.service.waiting, len(world.app.holds)) == (0, 0)


@pytest.mark.parametrize(
    ("query", "path"),
    [
        ("wait_s=61", "$.wait_s"),
        ("wait_s=-1", "$.wait_s"),
        ("wait_s=nan", "$.wait_s"),
        ("wait_s=", "$.wait_s"),
        ("wait_s=1&wait_s=2", "wait_s"),
        ("wait=1", "wait"),
        ("%00=1", "\x00"),
    ],
)
async def test_wrong_parameters_are_refused_by_name(client, query, path):
    """Unknown, repeated and impossible parameters are 400; none is passed over in silence."""
    await client.call("POST", "/v1/jobs", JOB)
    reply = await client.call("GET", f"/v1/jobs/a?{query}")
    assert (reply.status, reply.json["error"]["details"]) == (400, {"path": path})


async def test_lists_are_paged_and_filtered(client, world):
    """Newest first, ``next`` leads through everything exactly once, filters combine."""
    for i in range(7):
        await client.call(
            "POST", "/v1/jobs", {"job_id": f"j{i}", "handler": "ab"[i % 2], "instance": {}, "group_id": "g"}
        )
    world.service.find("j2", None).finish()
    page = (await client.call("GET", "/v1/jobs?limit=3")).json
    seen = [item["job_id"] for item in page["items"]]
    while page["next"] is not None:
        page = (await client.call("GET", f"/v1/jobs?limit=3&next={page['next']}")).json
        seen += [item["job_id"] for item in page["items"]]
    assert seen == [f"j{i}" for i in reversed(range(7))]
    found = (await client.call("GET", "/v1/jobs?state=queued&handler=a&group_id=g")).json["items"]
    assert [item["job_id"] for item in found] == ["j6", "j4", "j0"]
    for wrong in ("state=over", "limit=0", "limit=501", "limit=x", "order=up"):
        assert (await client.call("GET", f"/v1/jobs?{wrong}")).status == 400, wrong


async def test_cancel_is_202_at_once(client, world):
    """One job, with and without a body; a job that is done stays as it is."""
    await client.call("POST", "/v1/jobs", JOB)
    reply = await client.call("POST", "/v1/jobs/a/cancel")
    assert (reply.status, reply.json["job_id"]) == (202, "a")
    assert world.service.find("a", None).record.outcome.kind is OutcomeKind.CANCELLED
    assert (await client.call("POST", "/v1/jobs/a/cancel", {"reason": "again"})).status == 202
    assert (await client.call("POST", "/v1/jobs/a/cancel", {"reason": 1})).status == 400
    assert (await client.call("POST", "/v1/jobs/b/cancel", {})).status == 404


async def test_cancel_of_many_takes_exactly_one_selector(client):
    """By ids or by group; none, two, and batches that do not exist are refused."""
    for i in range(4):
        await client.call("POST", "/v1/jobs", {"job_id": f"j{i}", "instance": {}, "group_id": "g"})
    reply = await client.call("POST", "/v1/jobs/cancel", {"job_ids": ["j0", "j1", "none"]})
    assert (reply.status, reply.json) == (202, {"cancelling": 2})
    assert (await client.call("POST", "/v1/jobs/cancel", {"group_id": "g"})).json == {"cancelling": 2}
    for wrong in ({}, {"job_ids": [], "group_id": "g"}):
        assert (await client.call("POST", "/v1/jobs/cancel", wrong)).status == 400
    assert (await client.call("POST", "/v1/jobs/cancel", {"batch_id": "b"})).code == "unknown_batch"


async def test_a_trajectory_arrives_bit_for_bit(client, world):
    """409 while the job runs; then ids and log-probabilities exactly as the service has them."""
    await client.call("POST", "/v1/jobs", JOB)
    assert (await client.call("GET", "/v1/jobs/a/trajectory")).status == 409
    world.service.find("a", None).finish()
    reply = await client.call("GET", "/v1/jobs/a/trajectory")
    assert msgspec.json.decode(reply.body, type=Trajectory) == await world.service.trajectory("a", None)
    assert (await client.call("GET", "/v1/jobs/a/trajectory?what=verl")).code == "unknown_parameter"


async def test_a_trajectory_in_a_trainers_format(client, world):
    """The rows of the exporter, in JSON or MessagePack; a format that there is not is refused by name."""
    await client.call("POST", "/v1/jobs", JOB)
    assert (await client.call("GET", "/v1/jobs/a/trajectory?format=verl")).code == "not_done"
    world.service.find("a", None).finish()
    document = await world.service.trajectory("a", None)
    for form in FORMATS:
        reply = await client.call("GET", f"/v1/jobs/a/trajectory?format={form}")
        said = {"format": form, "job_id": "a", "verdict": "use", "rows": export(document, form)}
        assert reply.json == msgspec.json.decode(msgspec.json.encode(said))
    packed = await client.call("GET", "/v1/jobs/a/trajectory?format=verl", headers={"Accept": "application/msgpack"})
    assert msgspec.msgpack.decode(packed.body)["rows"] == export(document, "verl")
    wrong = await client.call("GET", "/v1/jobs/a/trajectory?format=verk")
    assert (wrong.status, wrong.code, wrong.json["error"]["details"]) == (400, "invalid_field", {"path": "$.format"})


async def test_a_rollout_that_a_format_has_no_place_for_is_409(client, world, monkeypatch):
    """By a code of its own, and with words that say why."""
    await client.call("POST", "/v1/jobs", JOB)
    world.service.find("a", None).finish()

    async def fork(job_id, tenant):
        return compacted()

    monkeypatch.setattr(world.service, "trajectory", fork)
    reply = await client.call("GET", "/v1/jobs/a/trajectory?format=openrlhf")
    assert (reply.status, reply.code) == (409, "several_branches")
    assert "2 branches" in reply.json["error"]["message"]
    assert len((await client.call("GET", "/v1/jobs/a/trajectory?format=verl")).json["rows"]) == 2


async def test_events_long_poll_and_resume(client, world):
    """Events come in order after a number; waiting ends with the next event, and at once when the job is over."""
    await client.call("POST", "/v1/jobs", JOB)
    job = world.service.find("a", None)
    assert [e["event"] for e in (await client.call("GET", "/v1/jobs/a/events")).json["items"]] == ["job.queued"]
    await client.send("GET", "/v1/jobs/a/events?after=1&wait_s=30")
    await until(lambda: len(world.app.holds) == 1)
    job.tell("job.stage")
    with trio.fail_after(2):
        assert [e["seq"] for e in (await client.reply()).json["items"]] == [2]
    job.finish()
    page = (await client.call("GET", "/v1/jobs/a/events?limit=2")).json
    assert ([e["seq"] for e in page["items"]], page["next"]) == ([1, 2], "2")
    with trio.fail_after(2):
        assert (await client.call("GET", "/v1/jobs/a/events?after=3&wait_s=30")).json == {"items": [], "next": None}
    assert (await client.call("GET", "/v1/jobs/b/events?wait_s=30")).status == 404


async def test_a_client_that_leaves_ends_its_own_request_only(client, world):
    """The held request goes away with its client; the job, and another client's wait for it, do not."""
    await client.call("POST", "/v1/jobs", JOB)
    leaver = await world.connect()
    for one in (client, leaver):
        await one.send("GET", "/v1/jobs/a?wait_s=30")
    await until(lambda: world.service.waiting == 2)
    await leaver.stream.aclose()
    await until(lambda: world.service.waiting == 1)
    world.service.find("a", None).finish()
    with trio.fail_after(2):
        assert (await client.reply()).json["state"] == "done"


@pytest.mark.slow
async def test_five_hundred_abandoned_long_polls_leave_nothing(client, world):
    """No wait, no connection, no task and no descriptor stays of clients that went away."""
    await client.call("POST", "/v1/jobs", JOB)
    await until(lambda: world.server.count.live == 1)
    tasks, fds = trio.lowlevel.current_statistics().tasks_living, open_fds()
    leavers = [await world.connect() for _ in range(500)]
    for leaver in leavers:
        await leaver.send("GET", "/v1/jobs/a?wait_s=60")
    await until(lambda: world.service.waiting == 500)
    assert (await client.call("GET", "/healthz")).status == 200
    for leaver in leavers:
        await leaver.stream.aclose()
    await until(lambda: world.server.count.live == 1)
    assert (world.service.waiting, len(world.app.holds)) == (0, 0)
    assert trio.lowlevel.current_statistics().tasks_living <= tasks
    assert open_fds() <= fds
