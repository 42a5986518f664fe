"""From a wire type to an answer: the one place that chooses how a body is written."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from quart import Response
from quart_trio.wrappers import TrioResponse

from prorld.wire.codec import encode

__all__ = ["JSON", "answer", "empty", "raw"]

JSON = "application/json"


def answer(value: msgspec.Struct, status: int = 200, *, headers: Mapping[str, str] | None = None) -> Response:
    """An answer with a body of the contract."""
    # On the loop even for long trajectories (64k tokens: 8 ms): the encoder holds the GIL, so a thread would not help.
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
