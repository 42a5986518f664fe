"""JSON over HTTP to an engine, with the engine's failures sorted into the classes that callers act on.

``EngineBusy`` waits, ``ContextOverflow`` ends an episode, ``MalformedReply`` distrusts one answer, and any other
``BackendError`` is a strike against the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import trio

from prorld.errors import BackendError, ContextOverflow, EngineBusy, MalformedReply
from prorld.kit.http_client import (
    BodyMalformed,
    ClientStatistics,
    ConnectFailed,
    HttpClient,
    HttpError,
    Response,
    ResponseTooLarge,
    decode_json,
)
from prorld.log import MASK

__all__ = ["CLOSED", "EngineHttp", "raise_for_status", "within"]

T = TypeVar("T")
Headers = tuple[tuple[str, str], ...]

# Questions about the engine go over sockets of their own: a pool full of calls must not make it look dead.
CONTROL_CONNECTIONS_MAX = 4

# Statuses of a route that the server does not have, or that its flags keep closed.
CLOSED = frozenset({403, 404, 405, 501})

_BUSY = frozenset({429, 503})
_RETRYABLE = frozenset({*range(300, 400), 401, 402, 404, 405, 407, 408, 409, 425, 500, 502, 504})
_JSON: Headers = (("content-type", "application/json"),)

# How engines say that a prompt is too long; they share the status 400 with every other mistake.
_OVERFLOW_WORDS = (
    "maximum model length",
    "maximum context length",
    "context length",
    "context size",
    "longer than the maximum",
    "max_model_len",
    "exceed_context_size",
    "exceeds the maximum allowed length",
)


def raise_for_status(response: Response, what: str) -> None:
    """Turn a status other than 2xx into the error that it means."""
    if 200 <= response.status < 300:
        return
    said = response.excerpt()
    message = f"{what} answered {response.status}: {said}"
    if response.status in _BUSY:
        raise EngineBusy(message, status=response.status)
    if response.status in (400, 413, 422) and any(words in said.lower() for words in _OVERFLOW_WORDS):
        raise ContextOverflow(message, status=response.status)
    raise BackendError(message, status=response.status, retryable=response.status in _RETRYABLE)


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """A deadline whose passing is the engine's failure."""
    with trio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise BackendError(f"{what} was not done within {seconds:g} s")


def _decoded(response: Response, decoder: msgspec.json.Decoder[T], what: str) -> T:
    raise_for_status(response, what)
    try:
        return decode_json(response, decoder)
    except BodyMalformed as exc:
        raise MalformedReply(f"{what} answered something else than expected") from exc


class EngineHttp:
    """One engine's address as typed requests. ``connections_max`` bounds the calls; control has sockets of its own.

    ``api_key`` goes with every request and nowhere else.
    """

    def __init__(self, url: str, *, connections_max: int, response_bytes_max: int, api_key: str | None = None) -> None:
        self.url = url
        self._secret = (api_key or "").encode("latin-1", "replace")
        self._key: Headers = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self._calls = HttpClient(url, connections_max=connections_max, response_bytes_max=response_bytes_max)
        self._control = HttpClient(url, connections_max=CONTROL_CONNECTIONS_MAX, response_bytes_max=response_bytes_max)
        self._encoder = msgspec.json.Encoder()

    def statistics(self) -> ClientStatistics:
        """The sockets of the calls to this engine."""
        return self._calls.statistics()

    async def send(
        self, method: str, path: str, payload: Any = None, headers: Headers = (), *, control: bool = False
    ) -> Response:
        """A request whose answer is wanted whatever its status. A GET is always ``control``."""
        body = b"" if payload is None else self._encoder.encode(payload)
        client = self._control if control or method == "GET" else self._calls
        try:
            response = await client.request(method, path, body, (*(_JSON if body else ()), *self._key, *headers))
        except ResponseTooLarge as exc:
            raise MalformedReply(f"{method} {path} of {self.url} answered too much") from exc
        except ConnectFailed as exc:
            raise BackendError(f"{self.url} can't be reached", code="engine_unreachable") from exc
        except HttpError as exc:
            raise BackendError(f"{method} {path} of {self.url} failed") from exc
        if response.status >= 300 and self._secret and self._secret in response.body:
            # What a refusal says goes into logs and records, and some servers say there what they were sent.
            response = msgspec.structs.replace(response, body=response.body.replace(self._secret, MASK.encode()))
        return response

    async def call(
        self,
        method: str,
        path: str,
        decoder: msgspec.json.Decoder[T],
        payload: Any = None,
        headers: Headers = (),
        *,
        control: bool = False,
    ) -> T:
        """A request whose answer must be a success of this type."""
        response = await self.send(method, path, payload, headers, control=control)
        return _decoded(response, decoder, f"{method} {path} of {self.url}")

    async def look(self, path: str, decoder: msgspec.json.Decoder[T]) -> T | None:
        """What a GET says; ``None`` where the server does not have the route."""
        response = await self.send("GET", path)
        if response.status in CLOSED:
            return None
        return _decoded(response, decoder, f"GET {path} of {self.url}")

    async def command(self, path: str, payload: Any, seconds: float) -> Response:
        """A POST beside the calls that must succeed within this time, whatever its answer looks like."""
        what = f"POST {path} of {self.url}"
        with within(seconds, what):
            response = await self.send("POST", path, payload, control=True)
            raise_for_status(response, what)
            return response
        raise AssertionError("a deadline that passed has raised")

    async def reachable(self, path: str) -> bool:
        """Whether a GET of ``path`` succeeds now."""
        try:
            return (await self.send("GET", path)).status == 200
        except BackendError:
            return False

    async def aclose(self) -> None:
        """Close the idle sockets, and each busy one when its exchange ends."""
        self._calls.close()
        self._control.close()
        await trio.lowlevel.checkpoint()
