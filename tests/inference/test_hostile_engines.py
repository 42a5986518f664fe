"""Engines that say what no engine can mean: each reply is a typed error or is taken, and no job pays for it."""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio

from prorld.domain.job import Sampling
from prorld.errors import BackendError, MalformedReply
from prorld.inference.contract import Capabilities, Generation, GenerationRequest
from prorld.inference.lease import REQUEST_ID_CHARS_MAX
from prorld.inference.vllm import VllmBackend
from prorld.inference.watch import CONTEXT_TOKENS_MIN
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.scripted_engine.script import Script
from prorld.wire.ops import AddBackend
from tests.kit.test_http_client import Server, read_request, serving
from tests.rollout.support import room

KEY = "sk-very-secret"
ROUTES: dict[str, Any] = {
    "/v1/models": {"data": [{"id": "m", "max_model_len": 4096}]},
    "/version": {"version": "0.33.0"},
    "/weight_info": {"weight_version": "default"},
    "/collective_rpc": {},
    "/inference/v1/abort_requests": {},
}


class Liar(FakeBackend):
    """Its replies are whole but for what the test changes."""

    def __init__(self, script: Script | None = None, *, url: str = "fake://liar", **lies: Any) -> None:
        super().__init__(script, url=url)
        self.lies = lies

    async def generate(self, request: GenerationRequest) -> Generation:
        if self.lies.get("raises") is not None:
            await trio.lowlevel.checkpoint()
            raise self.lies["raises"]
        return msgspec.structs.replace(await super().generate(request), **self.lies)


def request() -> GenerationRequest:
    """Three tokens, to be gone on from."""
    return GenerationRequest(
        token_ids=array("i", [1, 2, 3]),
        max_tokens=4,
        sampling=Sampling(),
        stop_token_ids=(9,),
        request_id="r",
        session="s",
    )


@asynccontextmanager
async def vllm(generated: bytes, *, status: bytes = b"200 OK", echoes: bool = False) -> AsyncIterator[VllmBackend]:
    """A client, probed, of a server that answers this to every generation."""

    async def handler(server: Server, stream: trio.SocketStream) -> None:
        while await read_request(server, stream) is not None:
            data = server.requests[-1]
            path = data.split(b" ")[1].decode().partition("?")[0]
            body, line = json.dumps(ROUTES.get(path, {})).encode(), b"200 OK" if path in ROUTES else b"404 No"
            if path == "/inference/v1/generate":
                body, line = (data if echoes else generated), status
            await stream.send_all(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (line, len(body), body))

    async with serving(handler) as server:
        backend = VllmBackend(server.url, api_key=KEY)
        await backend.probe()
        yield backend
        await backend.aclose()


@pytest.mark.parametrize(
    "body",
    [
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"x": ' * 100_000,
        b'{"choices": [{"index": 0, "token_ids": [1' + b"0" * 5000 + b"]}]}",
        b'{"choices": [{"index": 0, "token_ids": [-1]}]}',
        b'{"choices": [{"index": 0, "token_ids": [true]}]}',
        b'{"choices": [], "request_id": "\\ud800"}',
        b"\xef\xbb\xbf{}",
        b"null",
    ],
    ids=lambda body: repr(body[:24]),
)
async def test_a_reply_that_is_none_is_a_malformed_one(body: bytes) -> None:
    """Whatever the decoder makes of it, be it the end of its stack."""
    async with vllm(body) as backend:
        with pytest.raises(MalformedReply):
            await backend.generate(request())


async def test_a_refusal_that_repeats_the_key_does_not_tell_it() -> None:
    """Errors go into logs and records, where everybody reads them."""
    async with vllm(b"", status=b"401 No", echoes=True) as backend:
        with pytest.raises(BackendError) as refused:
            await backend.generate(request())
    assert "authorization: Bearer ***" in refused.value.message
    assert KEY not in refused.value.message


@pytest.mark.parametrize(
    "lies",
    [{"cached_tokens": -5}, {"cached_tokens": 10**12}, {"engine_request_id": "x" * 10**6}],
    ids=lambda lies: next(iter(lies)),
)
async def test_what_is_only_counted_ends_no_job(autojump_clock, lies: dict[str, Any]) -> None:
    """A count that can't be is none, and a name is kept as far as a name goes."""
    async with room(backends=[Liar(**lies)]) as here:
        record = await here.finish("j")
        assert record.outcome is not None
        assert record.outcome.kind.value == "ok"
        for call in (await here.supervisor.trajectory("j", "tests")).calls:
            assert call.cached_prefix_len is None or 0 <= call.cached_prefix_len <= call.prompt_len
            assert len(call.engine_request_id or "") <= REQUEST_ID_CHARS_MAX


@pytest.mark.parametrize("raises", [ValueError("math domain error"), KeyError("x"), RecursionError()], ids=repr)
async def test_a_client_that_breaks_is_its_engine_s_fault(autojump_clock, raises: Exception) -> None:
    """Not the handler's: the job goes on elsewhere, and the engine has a strike."""
    async with room(backends=[Liar(raises=raises), FakeBackend(url="fake://good")]) as here:
        for n in range(4):
            record = await here.finish(f"j{n}")
            assert record.outcome is not None
            assert record.outcome.kind.value == "ok", record.outcome
        assert here.pool.list().items[0].errors["engine_failed"] >= 1


@pytest.mark.parametrize("status", [301, 401, 402, 404])
async def test_an_engine_that_refuses_everybody_is_no_black_hole(autojump_clock, status: int) -> None:
    """Failing at once it would always be the least busy one: after its first call it is the last to be asked."""
    refused = BackendError(f"answered {status}", status=status, retryable=True)
    async with room(backends=[Liar(raises=refused), FakeBackend(url="fake://good")]) as here:
        for n in range(8):
            record = await here.finish(f"j{n}")
            assert record.outcome is not None
            assert record.outcome.kind.value == "ok", record.outcome
        assert [info.state for info in here.pool.list().items] == ["suspect", "up"]


async def test_an_engine_without_a_context_is_not_taken(autojump_clock) -> None:
    """Else each job on it would end at its own limit, as if the policy had filled one."""

    class Tiny(FakeBackend):
        async def probe(self) -> Capabilities:
            found = await super().probe()
            return msgspec.structs.replace(found, max_context_tokens=CONTEXT_TOKENS_MIN - 1)

    async with room(backends=[FakeBackend()]) as here:
        here.engines["fake://tiny"] = Tiny(url="fake://tiny")
        with pytest.raises(BackendError, match="context holds"):
            await here.pool.add(AddBackend(url="fake://tiny", kind="vllm"))
