"""From a wire type to an answer: the one place that chooses how a body is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
import zstandard
from quart import Response, has_request_context, request
from quart_trio.wrappers import TrioResponse

from prorld.http.negotiate import JSON, MSGPACK, preferred, takes_zstd
from prorld.kit.lanes import Lane
from prorld.wire.codec import encode, encode_msgpack

__all__ = ["Squeezer", "answer", "empty", "raw", "wants_msgpack"]

# Below this a packet or two are saved at most.
ZSTD_BYTES_MIN: Final = 4 << 10
# Compressing lets other threads run. Up to here (about 1 ms) handing it to one costs more than it gains.
ZSTD_INLINE_BYTES_MAX: Final = 256 << 10
ZSTD_LEVEL: Final = 3
ZSTD_THREADS: Final = 2


def wants_msgpack() -> bool:
    """Whether the client of the request at hand prefers MessagePack."""
    return has_request_context() and preferred(request.headers.get("Accept"), (JSON, MSGPACK)) == MSGPACK


def answer(value: msgspec.Struct, status: int = 200, *, headers: Mapping[str, str] | None = None) -> Response:
    """An answer with a body of the contract, in the form that the client prefers."""
    # On the loop even for long trajectories (64k tokens: 8 ms): the encoder holds the GIL, so a thread would not help.
    if wants_msgpack():
        return raw(encode_msgpack(value), MSGPACK, status, headers=headers)
    return raw(encode(value), JSON, status, headers=headers)


def empty(status: int = 204) -> Response:
    """An answer without a body."""
    return raw(b"", JSON, status)


def raw(body: bytes, content_type: str, status: int = 200, *, headers: Mapping[str, str] | None = None) -> Response:
    """An answer with bytes that are ready to be sent."""
    response = TrioResponse(body, status=status, headers=dict(headers or {}), content_type=content_type)
    # Quart cuts an answer that takes longer than a minute; the connection's own bound drops only a peer that stalls.
    response.timeout = None
    return response


class Squeezer:
    """Compresses answers for clients that take zstd. Streams are left as they are."""

    def __init__(self) -> None:
        self._lane = Lane("zstd", ZSTD_THREADS)

    async def squeeze(self, response: Response) -> None:
        """Compress the body in place where the client takes it and it is large enough."""
        response.headers["Vary"] = "Accept, Accept-Encoding"
        length = response.content_length or 0
        if length < ZSTD_BYTES_MIN or not takes_zstd(request.headers.get("Accept-Encoding")):
            return
        body = await response.get_data(as_text=False)
        if length <= ZSTD_INLINE_BYTES_MAX:
            small = _compressed(body)
        else:
            small = await self._lane.run(_compressed, body, abandon_on_cancel=True)
        response.set_data(small)
        response.headers["Content-Encoding"] = "zstd"


def _compressed(body: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(body)
