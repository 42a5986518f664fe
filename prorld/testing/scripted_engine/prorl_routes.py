"""A token endpoint that knows one route: prompt ids in, sampled ids and log-probabilities out."""

from __future__ import annotations

from typing import Any

import msgspec

from prorld.testing.scripted_engine.desk import Desk
from prorld.testing.scripted_engine.engine import Call, Sampled
from prorld.testing.scripted_engine.http11 import Reply, Request
from prorld.testing.scripted_engine.http_json import Problem, Route, decoded
from prorld.testing.scripted_engine.script import FaultKind
from prorld.testing.scripted_engine.spoil import encoded, sampled_of

__all__ = ["ProrlRoutes"]

_DEFAULT_TOKENS = 1024


class _Generate(msgspec.Struct, frozen=True):
    prompt_ids: list[int]
    max_tokens: int = _DEFAULT_TOKENS
    stop_token_ids: list[int] = []
    seed: int | None = None
    request_id: str = ""


class ProrlRoutes:
    """It says neither what it serves nor how it is."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def find(self, method: str, path: str) -> Route | None:
        """The route."""
        return self._generate if (method, path) == ("POST", "/generate") else None

    async def _generate(self, request: Request) -> Reply:
        wish = decoded(request, _Generate)
        if not wish.prompt_ids:
            raise Problem(400, "no prompt")
        number = str(self._desk.number())
        call = Call(
            name=wish.request_id or number,
            prompt=wish.prompt_ids,
            max_tokens=wish.max_tokens,
            stop_token_ids=wish.stop_token_ids,
            session="",
            seed=number if wish.seed is None else str(wish.seed),
        )

        def formatted(sampled: Sampled, fault: FaultKind | None) -> bytes:
            ids, logprobs = sampled_of(call, sampled, fault)
            reply: dict[str, Any] = {"logprobs": logprobs}
            if fault != "no_ids":
                reply["response_ids"] = ids
            return encoded(reply, fault)

        return await self._desk.sample(call, formatted, seeded=False)
