"""``python -m prorld.bench.transport_client CLIENT URL LEVEL ROUNDS SECONDS``: calls an engine and counts its own CPU.

One process per client and level: what it uses is its own, and one that comes to no end can be killed. It keeps LEVEL
calls in flight and prints one line of JSON per round.
"""

from __future__ import annotations

import gc
import importlib
import sys
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import trio

from prorld.domain.job import Sampling
from prorld.errors import MalformedReply
from prorld.inference.contract import GenerationRequest
from prorld.inference.vllm import GENERATE_PATH, VllmBackend
from prorld.inference.vllm_wire import GENERATE
from prorld.kit.http_client import HttpClient
from prorld.testing.byte_tokenizer import IM_END

__all__ = ["CLIENTS", "PROMPT_TOKENS", "Round"]

PROMPT_TOKENS = 512
MAX_TOKENS = 64

# Asks once; the number is unique in this process.
Call = Callable[[int], Awaitable[None]]

_PROMPT = array("i", [97 + at % 26 for at in range(PROMPT_TOKENS)])
_JSON = (("content-type", "application/json"),)


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """What one round counted. The calls that are open at its end are those that were open at its beginning."""

    calls: int
    cpu_s: float
    seconds: float


# --- clients ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _engine(url: str, level: int) -> AsyncIterator[Call]:
    """What the daemon does for a call: request, transport, typed decoding, and every check of the reply."""
    backend = VllmBackend(url, connections_max=level)
    await backend.probe()

    async def call(n: int) -> None:
        await backend.generate(
            GenerationRequest(
                token_ids=_PROMPT,
                max_tokens=MAX_TOKENS,
                sampling=Sampling(),
                stop_token_ids=(IM_END,),
                request_id=f"bench-{n}",
                session=f"bench-{n % level}",
            )
        )

    yield call
    await backend.aclose()


@asynccontextmanager
async def _http(url: str, level: int) -> AsyncIterator[Call]:
    """Our transport alone."""
    client = HttpClient(url, connections_max=level)

    async def call(n: int) -> None:
        response = await client.request("POST", GENERATE_PATH, _request(n), _JSON)
        _check(response.status, response.body)

    yield call
    client.close()


@asynccontextmanager
async def _theirs(name: str, url: str, level: int) -> AsyncIterator[Call]:
    """Another library's, with as many sockets. By name: neither is a dependency, and both have the same interface."""
    module: Any = importlib.import_module(name)
    limits = module.Limits(max_connections=level, max_keepalive_connections=level, keepalive_expiry=60.0)
    async with module.AsyncClient(base_url=url, limits=limits, timeout=None) as client:

        async def call(n: int) -> None:
            response = await client.post(GENERATE_PATH, content=_request(n), headers=dict(_JSON))
            _check(response.status_code, response.content)

        yield call


CLIENTS: Mapping[str, Callable[[str, int], AbstractAsyncContextManager[Call]]] = {
    "engine": _engine,
    "http": _http,
    "httpx2": partial(_theirs, "httpx2"),
    "httpx": partial(_theirs, "httpx"),
}


def _request(n: int) -> bytes:
    """The body that the engine's client sends, made anew for each call as there."""
    payload = {
        "model": "scripted",
        "token_ids": list(_PROMPT),
        "request_id": f"bench-{n}",
        "return_token_ids": True,
        "sampling_params": {
            "max_tokens": MAX_TOKENS, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 0,
            "stop_token_ids": [IM_END], "skip_special_tokens": False, "detokenize": False,
        },
    }  # fmt: skip
    return msgspec.json.encode(payload)


def _check(status: int, body: bytes) -> None:
    if status != 200 or len(GENERATE.decode(body).choices[0].token_ids or ()) != MAX_TOKENS:
        raise MalformedReply(f"the scripted engine answered {status} with {len(body)} bytes")


# --- measuring --------------------------------------------------------------------------------------------------------


async def measure(client: str, url: str, level: int, rounds: int, seconds: float) -> None:
    """Keep ``level`` calls in flight and print each round. The first one begins when every caller had an answer."""
    done = 0
    warm: set[int] = set()
    ready = trio.Event()

    async def caller(name: int, call: Call) -> None:
        nonlocal done
        n = name
        while True:
            await call(n)
            n += level
            done += 1
            if len(warm) < level:
                warm.add(name)
                if len(warm) == level:
                    ready.set()

    async with CLIENTS[client](url, level) as call, trio.open_nursery() as nursery:
        for name in range(level):
            nursery.start_soon(caller, name, call)
        await ready.wait()
        gc.collect()
        for _ in range(rounds):
            calls, cpu, began = done, time.process_time(), trio.current_time()
            await trio.sleep(seconds)
            found = Round(calls=done - calls, cpu_s=time.process_time() - cpu, seconds=trio.current_time() - began)
            sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
            sys.stdout.flush()
        nursery.cancel_scope.cancel("everything is measured")


def main() -> None:
    """Measure what the command line says."""
    client, url, level, rounds, seconds = sys.argv[1:]
    # As the daemon sets it, and the same for all.
    gc.set_threshold(10_000, 10, 1_000)
    trio.run(measure, client, url, int(level), int(rounds), float(seconds))


if __name__ == "__main__":
    main()
