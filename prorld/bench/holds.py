"""Requests that wait, clients that go, and bytes that are no HTTP: afterwards the daemon has to be what it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
import trio

from prorld.bench.api import WAIT_S, Api, EngineApi, until
from prorld.bench.figures import Plan, quantile
from prorld.bench.procfs import Usage, usage
from prorld.bench.rollouts import prompt, warm_up
from prorld.kit.http_client import IDLE_SECONDS_MAX

__all__ = ["malformed_requests", "measure_holds"]

ROUNDS = 3
LOOKS = 300
OPENERS = 32
REPLY_S_MAX = 10.0
SETTLE_S_MAX = 20.0
BODY_BYTES = 1 << 20


class _Calm(msgspec.Struct, frozen=True):
    """The daemon when nobody asks anything of it."""

    usage: Usage
    tasks: int
    get_p50_s: float


async def measure_holds(api: Api, engine: EngineApi, plan: Plan) -> dict[str, Any]:
    """Several rounds: what the first ones leave behind is heap for the next; what the last adds to it may be a leak."""
    await warm_up(api, plan)
    # The daemon closes sockets to its engine that lay idle when it calls the next time.
    await trio.sleep(IDLE_SECONDS_MAX + 1)
    await api.ended(await api.submit({"prompt": prompt(0)}))
    before = await _calm(api, None)
    rounds = [await _round(api, engine, plan, before) for _ in range(ROUNDS)]
    first, before_last, last = rounds[0], rounds[-2], rounds[-1]
    return {
        "held": plan.held,
        "abandoned": min(plan.abandoned, plan.held),
        "malformed": plan.malformed,
        "malformed_unanswered": sum(found["malformed_unanswered"] for found in rounds),
        "held_unanswered": sum(found["held_unanswered"] for found in rounds),
        "held_kb_each": first["held_kb_each"],
        "get_p50_ms": before.get_p50_s * 1e3,
        "get_held_p50_ms": last["get_held_p50_s"] * 1e3,
        "get_after_p50_ms": last["calm"].get_p50_s * 1e3,
        "get_after_ratio": last["calm"].get_p50_s / before.get_p50_s,
        "fds_leaked": last["calm"].usage.fds - before.usage.fds,
        "tasks_leaked": last["calm"].tasks - before.tasks,
        "rss_growth_mb": (last["calm"].usage.rss_bytes - before_last["calm"].usage.rss_bytes) / 1e6,
    }


async def _round(api: Api, engine: EngineApi, plan: Plan, before: _Calm) -> dict[str, Any]:
    pid = api.daemon.pid
    await engine.hold()
    job_id = await api.submit({"prompt": prompt(0)})
    streams = await _hold(api, job_id, plan.held)
    try:
        await _settle(pid, lambda now: now.fds >= before.usage.fds + plan.held)
        full = usage(pid)
        get_held_p50_s = await _look(api)
        for stream in streams[: plan.abandoned]:
            stream.socket.close()
        unanswered = await _malformed(api, plan.malformed)
        await engine.let_go()
        await api.ended(job_id)
        held_unanswered = await _read_answers(streams[plan.abandoned :])
    finally:
        for stream in streams:
            stream.socket.close()
    return {
        "malformed_unanswered": unanswered,
        "held_unanswered": held_unanswered,
        "held_kb_each": (full.rss_bytes - before.usage.rss_bytes) / plan.held / 1e3,
        "get_held_p50_s": get_held_p50_s,
        "calm": await _calm(api, before),
    }


async def _calm(api: Api, before: _Calm | None) -> _Calm:
    """The daemon once it has come to rest, or as far as it comes."""
    get_p50_s = await _look(api)
    if before is not None:
        await _settle(api.daemon.pid, lambda now: now.fds <= before.usage.fds)
    return _Calm(usage(api.daemon.pid), await api.tasks(), get_p50_s)


async def _settle(pid: int, is_settled: Callable[[Usage], bool]) -> None:
    """Wait for a state of the daemon, for a bounded time; what is measured next tells whether it came."""

    async def is_so() -> bool:
        await trio.lowlevel.checkpoint()
        return is_settled(usage(pid))

    # Where it does not come, the figures say so.
    with trio.move_on_after(SETTLE_S_MAX):
        await until(is_so, "the daemon has come to rest")


async def _look(api: Api) -> float:
    """The median time of a small request, one at a time."""
    seconds: list[float] = []
    for _ in range(LOOKS):
        began = trio.current_time()
        await api.get("/v1/stages")
        seconds.append(trio.current_time() - began)
    return quantile(seconds, 0.5)


# --- bare sockets -----------------------------------------------------------------------------------------------------


async def _connect(api: Api) -> trio.SocketStream:
    parts = urlsplit(api.daemon.address)
    return await trio.open_tcp_stream(parts.hostname or "", parts.port or 80)


async def _hold(api: Api, job_id: str, count: int) -> list[trio.SocketStream]:
    """So many clients that wait for the end of one job, each on a connection of its own."""
    streams: list[trio.SocketStream] = []
    left = iter(range(count))
    head = f"GET /v1/jobs/{job_id}?wait_s={WAIT_S} HTTP/1.1\r\nHost: bench\r\n"
    asked = f"{head}Authorization: Bearer {api.daemon.token}\r\n\r\n".encode()

    async def opener() -> None:
        for _ in left:
            stream = await _connect(api)
            streams.append(stream)
            await stream.send_all(asked)

    async with trio.open_nursery() as nursery:
        for number in range(min(OPENERS, count)):
            nursery.start_soon(opener, name=f"opener {number}")
    return streams


async def _read_answers(streams: Sequence[trio.SocketStream]) -> int:
    """How many of them got no good answer."""
    wrong = 0
    for stream in streams:
        with trio.move_on_after(REPLY_S_MAX):
            if (await _first_bytes(stream)).startswith(b"HTTP/1.1 200 "):
                continue
        wrong += 1
    return wrong


async def _malformed(api: Api, count: int) -> int:
    """Send so many of them; how many were neither answered nor hung up on."""
    silent = 0
    left = iter(malformed_requests(count, api.daemon.token))

    async def sender() -> None:
        nonlocal silent
        for data, ends in left:
            answered = False
            with trio.move_on_after(REPLY_S_MAX):
                answered = await _provoke(api, data, ends=ends)
            silent += not answered

    async with trio.open_nursery() as nursery:
        for number in range(min(OPENERS, count)):
            nursery.start_soon(sender, name=f"malformed {number}")
    return silent


async def _provoke(api: Api, data: bytes, *, ends: bool) -> bool:
    stream = await _connect(api)
    try:
        await stream.send_all(data)
        if ends:
            await stream.send_eof()
        await _first_bytes(stream)
    except trio.BrokenResourceError:
        # Cut off in the middle is an answer, too.
        return True
    finally:
        stream.socket.close()
    return True


async def _first_bytes(stream: trio.SocketStream) -> bytes:
    try:
        return await stream.receive_some()
    except trio.BrokenResourceError:
        return b""


def malformed_requests(count: int, token: str, seed: int = 0) -> list[tuple[bytes, bool]]:
    """So many requests that are wrong in different ways, and whether the client stops sending after it. Repeatable."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    auth = f"Host: bench\r\nAuthorization: Bearer {token}\r\n".encode()
    post = b"POST /v1/jobs HTTP/1.1\r\n" + auth + b"Content-Type: application/json\r\n"
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n"
    kinds: tuple[tuple[bytes, bool], ...] = (
        (rng.randbytes(64) + b"\r\n\r\n", False),
        (b"GET\r\n\r\n", False),
        (b"GET /v1/jobs HTTP/9.9\r\nHost: bench\r\n\r\n", False),
        (b"GET /v1/jobs HTTP/1.1\r\n" + auth + b"X: " + b"a" * (1 << 16) + b"\r\n\r\n", False),
        (b"GET /" + b"a" * (1 << 16) + b" HTTP/1.1\r\n" + auth + b"\r\n", False),
        (b"GET /v1/jobs HTTP/1.1\r\n" + auth + upgrade + b"\r\nx", False),
        (b"GET /v1/jobs HTTP/1.1\r\n" + auth, True),
        (post + b"Content-Length: 100\r\n\r\n{", True),
        (post + b"Content-Length: -1\r\n\r\n", False),
        (post + b"Content-Length: 99999999999\r\n\r\n", False),
        (post + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", False),
        (post + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc", True),
        (post + b"Content-Length: 6\r\n\r\n[[[[[[", False),
        (post + b"Content-Length: %d\r\n\r\n" % BODY_BYTES + b"[" * BODY_BYTES, False),
        (post + b"Content-Length: 4\r\n\r\n\xff\xfe\x00\x00", False),
        (b"", True),
    )
    return [rng.choice(kinds) for _ in range(count)]
