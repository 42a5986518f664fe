"""Errors: the status by class, one shape for every body, and nothing of ours in a client's hands."""

from __future__ import annotations

import h11
import pytest
import trio
from structlog.testing import capture_logs

from prorld.errors import (
    BackendError,
    BadRequest,
    Conflict,
    EngineBusy,
    Forbidden,
    Forgotten,
    Impossible,
    NoBackend,
    NotFound,
    Overloaded,
    RequestError,
    SandboxError,
    TooLarge,
    Unauthorized,
)
from tests.http.raw_client import until


@pytest.fixture
async def client(nursery, world):
    """An admin's connection to a running server."""
    await world.serve(nursery)
    return await world.connect()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BadRequest("m", code="c", details={"path": "$.x"}), 400),
        (RequestError("m"), 400),
        (Unauthorized("m"), 401),
        (Forbidden("m"), 403),
        (NotFound("m"), 404),
        (Conflict("m"), 409),
        (Forgotten("m"), 410),
        (TooLarge("m"), 413),
        (Impossible("m"), 422),
        (BackendError("m"), 422),
        (Overloaded("m", retry_after_s=0.1), 503),
        (EngineBusy("m"), 503),
        (NoBackend("m"), 503),
    ],
)
@pytest.mark.parametrize("grouped", [False, True])
async def test_the_class_of_an_error_is_its_status(client, world, error, status, grouped):
    """Alone or out of a nursery, an error of ours has one status, its own code and its own words."""
    world.service.raises = ExceptionGroup("g", [ExceptionGroup("h", [error])]) if grouped else error
    reply = await client.call("GET", "/v1/jobs/a")
    expected = {"code": error.stable_code, "message": "m", "retryable": error.may_retry}
    if error.details:
        expected["details"] = error.details
    assert (reply.status, reply.json) == (status, {"error": expected})
    assert ("retry-after" in reply.headers) == (status == 503)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("secret /etc/thing"),
        SandboxError("secret of a rollout"),
        ExceptionGroup("g", [NotFound("m"), RuntimeError("secret")]),
        AssertionError("secret"),
    ],
)
async def test_a_bug_is_500_and_stays_with_us(client, world, error):
    """The traceback is logged once under the request's id; the client learns the id and nothing else."""
    world.service.raises = error
    with capture_logs() as logs:
        reply = await client.call("GET", "/v1/jobs/a", headers={"X-Request-Id": "my-request"})
    assert (reply.status, reply.code) == (500, "internal")
    assert b"secret" not in reply.body
    assert b"my-request" in reply.body
    crashes = [line for line in logs if line["event"] == "request.crashed"]
    assert [(line["request_id"], line["exc_info"]) for line in crashes] == [("my-request", error)]
    world.service.raises = None
    assert (await client.call("GET", "/v1/jobs/a")).status == 404


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "no_such_route"),
        ("GET", "/v1/jobs/", 404, "no_such_route"),
        ("GET", "//v1//jobs", 404, "no_such_route"),
        ("GET", "/v1/jobs/a/b/c", 404, "no_such_route"),
        ("GET", "/static/x", 404, "no_such_route"),
        ("GET", "*", 404, "no_such_route"),
        ("GET", "?x", 404, "no_such_route"),
        ("DELETE", "/v1/jobs", 405, "method_not_allowed"),
        ("PUT", "/v1/stages", 405, "method_not_allowed"),
        ("TRACE", "/v1/jobs", 405, "method_not_allowed"),
        ("BREW", "/v1/jobs", 405, "method_not_allowed"),
    ],
)
async def test_routes_that_do_not_exist_answer_in_the_same_shape(client, method, path, status, code):
    """404 and 405 are JSON like everything else, and 405 says what is allowed."""
    reply = await client.call(method, path)
    assert (reply.status, reply.code, reply.headers["content-type"]) == (status, code, "application/json")
    assert ("allow" in reply.headers) == (status == 405)


async def test_an_absolute_target_is_the_same_route(client):
    """A request line as proxies write it finds its route."""
    assert (await client.call("GET", "http://localhost/v1/stages")).status == 200


async def test_head_and_options_are_plain(client):
    """HEAD is GET without a body, OPTIONS says what is allowed, and both leave the connection usable."""
    await client.send("GET", "/v1/stages")
    size = (await client.reply()).headers["content-length"]
    head = await client.call("HEAD", "/v1/stages")
    assert (head.status, head.body, head.headers["content-length"]) == (200, b"", size)
    options = await client.call("OPTIONS", "/v1/stages")
    assert (options.status, set(options.headers["allow"].split(", "))) == (200, {"GET", "HEAD", "OPTIONS", "PATCH"})
    assert (await client.call("GET", "/healthz")).status == 200


async def test_every_answer_names_its_request(client):
    """A sane id of the client's comes back, any other is replaced."""
    assert (await client.call("GET", "/healthz", headers={"X-Request-Id": "abc"})).headers["x-request-id"] == "abc"
    for wrong in ("a b", "x" * 200, "<script>"):
        found = (await client.call("GET", "/nothing", headers={"X-Request-Id": wrong})).headers["x-request-id"]
        assert found != wrong
        assert len(found) == 16


async def test_malformed_http_is_answered_in_the_same_shape(client, world):
    """What is not HTTP gets a JSON error, too, and then the end of its connection."""
    await client.stream.send_all(b"GET / HTTP/1.1\r\nbroken\r\n\r\n")
    reply = await client.reply()
    assert (reply.status, reply.code) == (400, "http_400")
    await client.stream.aclose()
    await until(lambda: world.server.count.live == 0)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_bound_is_413(nursery, make, chunked):
    """With its length told before, and without."""
    world = make(body_bytes_max=1000)
    await world.serve(nursery)
    client = await world.connect()
    if chunked:
        head = f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.token}\r\n"
        head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.h11.send(h11.Request(method="POST", target="/", headers=[("Host", "x"), ("Content-Length", "0")]))
        await client.stream.send_all(head.encode() + (b"258\r\n" + b"x" * 600 + b"\r\n") * 2 + b"0\r\n\r\n")
        reply = await client.reply()
    else:
        reply = await client.call("POST", "/v1/jobs", b"x" * 1001)
    assert (reply.status, reply.code) == (413, "too_large")
    assert not world.service.jobs
    assert (await (await world.connect()).call("POST", "/v1/jobs", {"instance": {}})).status == 201


async def test_a_body_that_does_not_arrive_is_408(client, world):
    """A client that stops in the middle of its body is told so, and its connection ends."""
    world.app.config["BODY_TIMEOUT"] = 0.05
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.token}\r\nContent-Length: 9\r\n"
    await client.stream.send_all(head.encode() + b"Content-Type: application/json\r\n\r\n{")
    client.h11.send(h11.Request(method="POST", target="/", headers=[("Host", "x"), ("Content-Length", "0")]))
    with trio.fail_after(5):
        reply = await client.reply()
    assert (reply.status, reply.code, reply.json["error"]["retryable"]) == (408, "body_timeout", True)
    await client.stream.aclose()
    await until(lambda: world.server.count.live == 0)


async def test_the_access_line_is_for_debugging(client):
    """One line a request, with what is needed to find it again, and without its token."""
    with capture_logs() as logs:
        await client.call("GET", "/v1/jobs/a")
    [line] = [line for line in logs if line["event"] == "request.answered"]
    assert (line["log_level"], line["method"], line["path"], line["status"]) == ("debug", "GET", "/v1/jobs/a", 404)
    assert client.token not in repr(logs)
