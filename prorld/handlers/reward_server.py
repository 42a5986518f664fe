"""A grader that is a server elsewhere: ``POST /compute_score`` with a solution and its truth, and a score comes back.

Whatever goes wrong on the way is a ``GraderError``. A server that is away, slow or talks nonsense has not graded, and a
zero in its place would train the policy on noise.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec
import trio

from prorld.errors import GraderError
from prorld.kit.http_client import (
    BodyMalformed,
    ConnectFailed,
    HttpClient,
    HttpError,
    Response,
    ResponseTooLarge,
    decode_json,
)

__all__ = ["RewardServer", "open_reward_server"]

DEFAULT_PORT = 8388
LIMIT_S = 60.0
REQUEST_BYTES_MAX = 8 << 20
REPLY_BYTES_MAX = 1 << 20
_PATH = "/compute_score"
_JSON = (("content-type", "application/json"), ("accept", "application/json"))
# Everything else that is no 200 says that the question is wrong, and would say so again.
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})


class _Scored(msgspec.Struct, frozen=True):
    """What the server says; others of its fields are its own affair."""

    score: bool | float | list[Any]


@asynccontextmanager
async def open_reward_server(
    address: str, *, limit_s: float = LIMIT_S, connections: int = 16
) -> AsyncIterator[RewardServer]:
    """A reward server at ``HOST:PORT`` or ``http(s)://HOST:PORT``; its sockets are closed when the block is left.

    ``limit_s`` bounds a score with everything that it waits for; ``connections`` are asked at a time.
    """
    url = _url(address)
    client = HttpClient(url, connections_max=connections, response_bytes_max=REPLY_BYTES_MAX)
    try:
        yield RewardServer(client, limit_s)
    finally:
        client.close()


class RewardServer:
    """Asks for scores. Made by ``open_reward_server``."""

    def __init__(self, client: HttpClient, limit_s: float) -> None:
        self._client = client
        self._limit_s = limit_s
        self._decoder = msgspec.json.Decoder(_Scored)

    def __repr__(self) -> str:
        return f"<RewardServer {self._client.base_url}>"

    async def score(self, *, solution: str, truth: Any, data_source: str) -> float:
        """The score of one solution; of a list of scores the first. Raises ``GraderError``."""
        body = self._encode(solution, truth, data_source)
        response: Response | None = None
        with trio.move_on_after(self._limit_s):
            try:
                response = await self._client.request("POST", _PATH, body, _JSON)
            except ResponseTooLarge as exc:
                raise self._error("answered too much", "reward_server_bad_answer") from exc
            except ConnectFailed as exc:
                raise self._error("can't be reached", "reward_server_unreachable", retryable=True) from exc
            except HttpError as exc:
                raise self._error("broke off its answer", "reward_server_failed", retryable=True) from exc
        if response is None:
            words = f"gave no score within {self._limit_s:g} s"
            raise self._error(words, "reward_server_timeout", retryable=True)
        return self._read(response)

    def _encode(self, solution: str, truth: Any, data_source: str) -> bytes:
        # A lone surrogate is on no wire; a policy that writes one is graded without it.
        said = solution.encode("utf-8", "replace").decode()
        try:
            body = msgspec.json.encode({"solution_str": said, "ground_truth": truth, "data_source": data_source})
        except (TypeError, ValueError) as exc:
            raise GraderError("what the reward server is to judge is not JSON", code="grader_bad_payload") from exc
        if len(body) > REQUEST_BYTES_MAX:
            message = f"what the reward server is to judge is {len(body)} bytes long"
            raise GraderError(message, code="grader_bad_payload")
        return body

    def _read(self, response: Response) -> float:
        if response.status != 200:
            words = f"answered {response.status}: {response.excerpt(200)!a}"
            raise self._error(words, "reward_server_failed", retryable=response.status in _PASSING)
        try:
            said = decode_json(response, self._decoder).score
        except BodyMalformed as exc:
            raise self._error("answered something else than a score", "reward_server_bad_answer") from exc
        first = (said[0] if said else None) if isinstance(said, list) else said
        if not isinstance(first, (bool, int, float)) or not math.isfinite(first):
            raise self._error("answered a score that is no number", "reward_server_bad_answer")
        return float(first)

    def _error(self, words: str, code: str, *, retryable: bool = False) -> GraderError:
        return GraderError(f"the reward server {self._client.base_url} {words}", code=code, retryable=retryable)


def _url(address: str) -> str:
    url = address if "://" in address else f"http://{address}"
    parts = urlsplit(url)
    if parts.port is None and parts.scheme == "http" and parts.hostname:
        url = parts._replace(netloc=f"{parts.netloc}:{DEFAULT_PORT}").geturl()
    return url
