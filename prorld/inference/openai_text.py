"""The client of engines that speak text alone, through OpenAI's routes. Nothing that it gives is exact.

The ids of a reply are what our tokenizer makes of its text, which need not be those that were sampled; the prompt that
the engine tokenized is not known either. So every ``Generation`` says ``exact: false``. Two things keep such a
conversation whole:

* Where the engine stopped by itself, and no stop strings could have been the reason, it sampled the end of its turn and
  does not show it. The renderer's own end of turn stands for it, so that the turn is known to be complete.
* Log-probabilities are taken only where the engine's tokens are ours one to one, the end of the turn included. All
  others are 0.0 under ``logprobs_mode: none``.
"""

from __future__ import annotations

from typing import Any

import msgspec
import trio

from prorld.domain.branch import VersionSpan
from prorld.domain.calls import FinishReason
from prorld.errors import BackendError, EngineBusy, MalformedReply
from prorld.inference.checks import checked_finish, checked_logprobs, checked_sampled
from prorld.inference.contract import (
    BackendKind,
    Capabilities,
    EngineLoad,
    Generation,
    GenerationRequest,
    LogprobsMode,
    TextView,
)
from prorld.inference.engine_http import EngineHttp
from prorld.inference.http_backend import CONTEXT_TOKENS_UNKNOWN, HttpBackend
from prorld.inference.openai_wire import MODELS, REPLY, Card, Reply, lined_up, said_tokens, text_of

__all__ = ["TextBackend"]

CONNECTIONS_MAX = 1024
RESPONSE_BYTES_MAX = 64 * 1024 * 1024

# Texts of single tokens whose ids are kept; a vocabulary has a few hundred thousand.
TOKEN_TEXTS_MAX = 2**18

COMPLETIONS_PATH = "/v1/completions"
CHAT_PATH = "/v1/chat/completions"

_FINISH: dict[str | None, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "end_turn": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
    "length": "length",
    "abort": "abort",
}


class _Way(msgspec.Struct, frozen=True):
    """How the engine is asked, as the probe found out."""

    path: str
    logprobs: bool


# The first one that the engine answers is taken.
_WAYS = (
    _Way(COMPLETIONS_PATH, logprobs=True),
    _Way(COMPLETIONS_PATH, logprobs=False),
    _Way(CHAT_PATH, logprobs=True),
    _Way(CHAT_PATH, logprobs=False),
)


class TextBackend(HttpBackend):
    """One engine behind OpenAI's routes."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        super().__init__(
            EngineHttp(url, connections_max=connections_max, response_bytes_max=RESPONSE_BYTES_MAX, api_key=api_key)
        )
        self._model = model
        self._way: _Way | None = None
        self._served = ""
        self._ids: dict[str, int | None] = {}

    @property
    def kind(self) -> BackendKind:
        """Which API it speaks."""
        return "openai"

    # --- what it is ---------------------------------------------------------------------------------------------------

    async def card(self) -> Card:
        """The model, as the engine describes it."""
        cards = (await self._http.call("GET", "/v1/models", MODELS)).data
        for card in cards:
            if self._model in (None, card.id):
                return card
        served = ", ".join(card.id for card in cards[:8]) or "no model"
        raise BackendError(f"{self.url} does not serve {self._model or 'any model'} but {served}", retryable=False)

    async def probe(self) -> Capabilities:
        """Ask for the model, and find the best way to sample by sampling one token."""
        card = await self.card()
        self._served = card.id
        self._way = way = await self._find_way()
        return Capabilities(
            model=card.id,
            max_context_tokens=card.context_tokens or CONTEXT_TOKENS_UNKNOWN,
            exact=False,
            logprobs_mode="raw" if way.logprobs else "none",
            weights=self._told,
            details={"route": way.path, "logprobs": way.logprobs, "owned_by": card.owned_by},
        )

    async def _find_way(self) -> _Way:
        refusals: list[str] = []
        for way in _WAYS:
            prompt = {"prompt": "1"} if way.path == COMPLETIONS_PATH else {"messages": [_message("1")]}
            payload = {"model": self._served, "max_tokens": 1, **prompt, **_wish_for_logprobs(way)}
            try:
                await self._http.call("POST", way.path, REPLY, payload)
            except EngineBusy:
                raise
            except BackendError as exc:
                if exc.status in (400, 404, 405, 422, 501) or isinstance(exc, MalformedReply):
                    refusals.append(exc.message)
                    continue
                raise
            return way
        raise BackendError(f"{self.url} samples in no way that is known: {refusals[-1]}", retryable=False)

    # --- sampling -----------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample. Raises ``BackendError`` or one of its kinds."""
        way, view = self._way, request.view
        if way is None:
            raise AssertionError("generate before probe")
        if not request.token_ids:
            raise BackendError("an empty prompt", status=400, retryable=False)
        if view is None:
            raise BackendError(f"{self.url} takes text alone, and this call brings none", retryable=False)
        started, told = trio.current_time(), self._told
        reply = await self._http.call("POST", way.path, REPLY, self._payload(request, way, view))
        ids, logprobs, finish, mode = self._judge(request, reply, view, f"{way.path} of {self.url}")
        sampled = len(ids)
        usage = reply.usage
        details = None if usage is None else usage.prompt_tokens_details
        return Generation(
            token_ids=checked_sampled(ids, request.max_tokens, way.path),
            logprobs=checked_logprobs(logprobs, ids, way.path),
            finish=checked_finish(finish, sampled, f"{way.path} of {self.url}"),
            versions=(VersionSpan(start=0, end=sampled, epoch=told.epoch, version=told.version),) if sampled else (),
            versions_exact=told == self._told,
            exact=False,
            logprobs_mode=mode,
            cached_tokens=None if details is None else details.cached_tokens,
            engine_request_id=reply.id,
            latency_s=trio.current_time() - started,
            ignored=_ignored(request),
        )

    def _payload(self, request: GenerationRequest, way: _Way, view: TextView) -> dict[str, Any]:
        sampling = request.sampling
        # What OpenAI's own servers do not know they refuse, so that only what they know is asked for.
        payload: dict[str, Any] = {
            "model": request.adapter or self._served,
            "max_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **_wish_for_logprobs(way),
        }
        if way.path == COMPLETIONS_PATH:
            payload["prompt"] = view.prompt()
        else:
            payload["messages"] = view.messages()
        if sampling.stop:
            payload["stop"] = sampling.stop
        if request.seed is not None:
            payload["seed"] = request.seed
        return payload

    def _judge(
        self, request: GenerationRequest, reply: Reply, view: TextView, where: str
    ) -> tuple[list[int], list[float], FinishReason, LogprobsMode]:
        if len(reply.choices) != 1:
            raise MalformedReply(f"{where}: {len(reply.choices)} choices")
        choice = reply.choices[0]
        finish = _FINISH.get(choice.finish_reason)
        if finish is None:
            raise MalformedReply(f"{where}: finish reason {choice.finish_reason!r}")
        if reply.usage is not None and (reply.usage.completion_tokens or 0) > request.max_tokens:
            raise MalformedReply(f"{where}: {reply.usage.completion_tokens} tokens for {request.max_tokens}")
        said = said_tokens(choice, where)
        if said is not None:
            checked_logprobs(said[1], range(len(said[0])), where)
        ids = view.encode(text_of(choice, where))
        limit = request.max_tokens
        cut = next((at + 1 for at, token in enumerate(ids) if token in request.stop_token_ids), None)
        whole = cut is None and len(ids) <= limit
        closed = whole and finish == "stop" and len(ids) < limit and _ended_its_turn(request)
        if closed:
            ids = [*ids, request.stop_token_ids[0]]
        elif cut is not None and cut <= limit:
            ids, finish = ids[:cut], "stop"
        elif len(ids) > limit:
            # Our tokens for the same text may be more than those that were counted.
            ids, finish = ids[:limit], "length"
        if said is not None:
            tokens = said[0] if whole else said[0][: len(ids)]
            if lined_up(tokens, ids, closed=closed, id_of=lambda text: self._id_of(text, view)):
                return ids, said[1][: len(ids)], finish, "raw"
        return ids, [0.0] * len(ids), finish, "none"

    def _id_of(self, text: str, view: TextView) -> int | None:
        if text not in self._ids:
            if len(self._ids) >= TOKEN_TEXTS_MAX:
                self._ids.clear()
            ids = view.encode(text)
            self._ids[text] = ids[0] if len(ids) == 1 else None
        return self._ids[text]

    # --- how it is ----------------------------------------------------------------------------------------------------

    async def healthy(self) -> bool:
        """Whether it lists its models now."""
        return await self._http.reachable("/v1/models")

    async def load(self) -> EngineLoad:
        """It does not say."""
        await trio.lowlevel.checkpoint()
        return EngineLoad()


def _ended_its_turn(request: GenerationRequest) -> bool:
    """Whether an engine that stopped by itself must have sampled the end of its turn."""
    return bool(request.stop_token_ids) and not request.sampling.stop


def _wish_for_logprobs(way: _Way) -> dict[str, Any]:
    if not way.logprobs:
        return {}
    return {"logprobs": 1} if way.path == COMPLETIONS_PATH else {"logprobs": True}


def _message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _ignored(request: GenerationRequest) -> tuple[str, ...]:
    asked = (
        ("top_k", request.sampling.top_k > 0),
        ("min_p", request.sampling.min_p > 0),
        ("salt", request.salt is not None),
        ("priority", bool(request.priority)),
    )
    return tuple(name for name, was_asked in asked if was_asked)
