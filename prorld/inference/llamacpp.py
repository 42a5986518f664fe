"""The client of llama.cpp's server, with every sampler that was not asked for switched off.

Three habits of the server shape it:

* It goes on sampling for a caller who hung up, to the end of the call. So a long call is made of short ones over the
  server's prefix cache, which costs nothing but the round trips; a cancelled caller wastes at most one of them.
* A stop token that is not the model's own end of turn can't be asked for. The short calls are cut at the first one.
* Log-probabilities are left out where text ends inside a character; they are asked for again (``llamacpp_wire``).

The sampled end-of-turn token is in ``tokens`` with its log-probability. A streamed answer would end with the socket,
but it drops the ids of those tokens, too, and they can't be had again. Weights can't change, so versions are exact.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import trio

from prorld.domain.branch import VersionSpan
from prorld.domain.calls import FinishReason
from prorld.errors import BackendError, ContextOverflow, MalformedReply
from prorld.inference.checks import checked_logprobs, checked_prompt, checked_sampled, checked_token_ids
from prorld.inference.contract import BackendKind, Capabilities, EngineLoad, Generation, GenerationRequest
from prorld.inference.engine_http import EngineHttp, raise_for_status
from prorld.inference.llamacpp_wire import (
    COMPLETION,
    MODELS,
    TOKENS,
    Completion,
    ModelCard,
    TokenProb,
    align,
    processed_logprob,
)
from prorld.inference.prometheus_text import metric_values
from prorld.inference.uncontrolled import Uncontrolled
from prorld.kit.http_client import ClientStatistics

__all__ = ["LlamaCppBackend"]

CONNECTIONS_MAX = 64
RESPONSE_BYTES_MAX = 64 * 1024 * 1024

# What a caller who hung up still costs: a fraction of a second on two cores.
STEP_TOKENS_MAX = 16

# How many candidates are asked for to find a lost log-probability before the whole vocabulary is.
RECOVERY_CANDIDATES = 64

# Added to the logit of a token that is to be sampled for certain; it does not change what is said of the distribution.
_FORCING_BIAS = 10_000.0

# The order is part of what is sampled: the truncations see the tempered distribution.
_SAMPLERS = ("temperature", "min_p", "top_k", "top_p")

_OFF: dict[str, Any] = {
    "dynatemp_range": 0.0,
    "typical_p": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "mirostat": 0,
    "ignore_eos": False,
}

_RUNNING = "llamacpp:requests_processing"
_WAITING = "llamacpp:requests_deferred"


class _Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the probe found and sampling needs."""

    context: int
    vocabulary: int
    whole_token: int


class _Call:
    """One generation as it grows step by step."""

    def __init__(self, request: GenerationRequest, budget: int) -> None:
        self.request = request
        self.budget = budget
        self.ids = array("i")
        self.logprobs = array("f")
        self.finish: FinishReason | None = None
        self.stop_reason: int | None = None
        self.cached: int | None = None
        self.steps = 0

    @property
    def prompt(self) -> list[int]:
        return [*self.request.token_ids, *self.ids]

    def grow(self, ids: array[int], logprobs: array[float], *, at_end: bool) -> None:
        """Take over a step's tokens up to the first stop token; ``at_end`` when the engine stopped by itself."""
        stops = self.request.stop_token_ids
        cut = next((position for position, token in enumerate(ids) if token in stops), None)
        kept = len(ids) if cut is None else cut + 1
        self.ids.extend(ids[:kept])
        self.logprobs.extend(logprobs[:kept])
        if cut is not None or at_end:
            self.finish = "stop"
            self.stop_reason = self.ids[-1]
        elif len(self.ids) >= self.budget:
            self.finish = "length"


class LlamaCppBackend(Uncontrolled):
    """One llama.cpp server. ``model`` is a name to check against, where more than one server could be meant."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        step_tokens_max: int = STEP_TOKENS_MAX,
        api_key: str | None = None,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        if step_tokens_max < 1:
            raise ValueError("step_tokens_max must be at least 1")
        super().__init__()
        self._http = EngineHttp(
            url, connections_max=connections_max, response_bytes_max=RESPONSE_BYTES_MAX, api_key=api_key
        )
        self._model = model
        self._step_tokens_max = step_tokens_max
        self._facts: _Facts | None = None

    def __repr__(self) -> str:
        return f"<LlamaCppBackend {self.url}>"

    @property
    def kind(self) -> BackendKind:
        """Which API it speaks."""
        return "llamacpp"

    @property
    def url(self) -> str:
        """Where the engine is."""
        return self._http.url

    async def probe(self) -> Capabilities:
        """Ask for the model, the context of one slot, the vocabulary, and a token that ends in a whole character."""
        card = await self._card()
        if card.meta is None or not card.meta.n_ctx or not card.meta.n_vocab:
            raise BackendError(f"{self.url} does not say how long its context is", retryable=False)
        payload = {"content": "a", "add_special": False}
        whole = (await self._http.call("POST", "/tokenize", TOKENS, payload)).tokens
        if not whole:
            raise BackendError(f"{self.url} can't tokenize", retryable=False)
        self._facts = _Facts(context=card.meta.n_ctx, vocabulary=card.meta.n_vocab, whole_token=whole[-1])
        return Capabilities(
            model=card.id.rpartition("/")[2],
            max_context_tokens=card.meta.n_ctx,
            version_spans=True,
            weights=self._told,
            model_path=card.id,
            details={"vocabulary": card.meta.n_vocab},
        )

    async def _card(self) -> ModelCard:
        cards = (await self._http.call("GET", "/v1/models", MODELS)).data
        if not cards:
            raise BackendError(f"{self.url} serves no model")
        if self._model is not None and self._model not in (cards[0].id, cards[0].id.rpartition("/")[2]):
            raise BackendError(f"{self.url} does not serve {self._model!r} but {cards[0].id}", retryable=False)
        return cards[0]

    # --- sampling -----------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample. Raises ``BackendError`` or one of its kinds."""
        facts = self._facts
        if facts is None:
            raise AssertionError("generate before probe")
        prompt = checked_token_ids(request.token_ids, "the prompt")
        room = facts.context - len(prompt)
        if room < 1:
            raise ContextOverflow(f"{len(prompt)} prompt tokens, the context of {self.url} holds {facts.context}")
        call = _Call(request, min(request.max_tokens, room))
        started, told = trio.current_time(), self._told
        while call.finish is None:
            await self._step(call, facts)
        sampled = len(call.ids)
        return Generation(
            token_ids=call.ids,
            logprobs=call.logprobs,
            finish=call.finish,
            versions=(VersionSpan(start=0, end=sampled, epoch=told.epoch, version=told.version),),
            versions_exact=told == self._told,
            logprobs_mode=_mode(request),
            stop_reason=call.stop_reason,
            cached_tokens=call.cached,
            latency_s=trio.current_time() - started,
            ignored=_ignored(request),
        )

    async def _step(self, call: _Call, facts: _Facts) -> None:
        where = f"completion of {self.url}"
        prompt = call.prompt
        wanted = min(self._step_tokens_max, call.budget - len(call.ids))
        payload = {**_payload(call.request, prompt, call.steps), "n_predict": wanted}
        reply = await self._http.call("POST", "/completion", COMPLETION, payload)
        checked_prompt(prompt, where, length=reply.tokens_evaluated)
        ids = checked_sampled(reply.tokens, wanted, where)
        if not ids:
            raise MalformedReply(f"{where}: not a single token")
        logprobs = await self._logprobs(call.request, prompt, reply, facts, where)
        if call.steps == 0:
            call.cached = reply.timings.cache_n
        call.steps += 1
        at_end = _stopped_by_itself(reply.stop_type, len(ids), wanted, where)
        call.grow(ids, checked_logprobs(logprobs, ids, where), at_end=at_end)

    async def _logprobs(
        self, request: GenerationRequest, prompt: list[int], reply: Completion, facts: _Facts, where: str
    ) -> list[float]:
        said = reply.completion_probabilities
        placed = align(reply.tokens, [entry.id for entry in said])
        if placed is None:
            raise MalformedReply(f"{where}: the log-probabilities are of other tokens than those sampled")
        logprobs: list[float] = []
        for position, entry in enumerate(placed):
            if entry is not None:
                logprobs.append(said[entry].value)
            else:
                before = [*prompt, *reply.tokens[:position]]
                logprobs.append(await self._recover(request, before, reply.tokens[position], facts, where))
        return logprobs

    async def _recover(
        self, request: GenerationRequest, before: Sequence[int], token: int, facts: _Facts, where: str
    ) -> float:
        """The log-probability of ``token`` after ``before``, read beside a forced token that is reported for certain.

        It agrees with what the server left out to four decimals.
        """
        if _mode(request) == "processed":
            return processed_logprob(
                await self._candidates(before, facts.vocabulary, facts, where), token, request.sampling
            )
        for count in (RECOVERY_CANDIDATES, facts.vocabulary):
            candidates = await self._candidates(before, count, facts, where)
            if token in candidates:
                return candidates[token]
        raise MalformedReply(f"{where}: token {token} is not in the vocabulary")

    async def _candidates(self, before: Sequence[int], count: int, facts: _Facts, where: str) -> dict[int, float]:
        payload = {
            **_OFF,
            "prompt": list(before),
            "n_predict": 1,
            "n_probs": count,
            "return_tokens": True,
            "cache_prompt": True,
            "temperature": 0.0,
            "logit_bias": [[facts.whole_token, _FORCING_BIAS]],
        }
        reply = await self._http.call("POST", "/completion", COMPLETION, payload)
        if len(reply.completion_probabilities) != 1:
            raise MalformedReply(f"{where}: no candidates came back")
        entry: TokenProb = reply.completion_probabilities[0]
        found = {candidate.id: candidate.logprob for candidate in entry.top_logprobs if candidate.logprob is not None}
        found[entry.id] = entry.value
        return found

    # --- how it is ----------------------------------------------------------------------------------------------------

    async def healthy(self) -> bool:
        """Whether the engine answers its health check now; a model that still loads does not count."""
        return await self._http.reachable("/health")

    async def load(self) -> EngineLoad:
        """Running and waiting requests, where the server was started to tell."""
        response = await self._http.send("GET", "/metrics")
        if response.status in (403, 404, 501):
            return EngineLoad()
        raise_for_status(response, f"GET /metrics of {self.url}")
        values = metric_values(response.body.decode("utf-8", "replace"), (_RUNNING, _WAITING))
        return EngineLoad(
            running=int(values[_RUNNING][0]) if values[_RUNNING] else None,
            waiting=int(values[_WAITING][0]) if values[_WAITING] else None,
        )

    def statistics(self) -> ClientStatistics:
        """The sockets of the calls to this engine."""
        return self._http.statistics()

    async def aclose(self) -> None:
        """Close pooled sockets."""
        await self._http.aclose()


def _mode(request: GenerationRequest) -> Literal["raw", "processed"]:
    """Greedy and untouched sampling are described by the model's own distribution, all else by what samplers left."""
    sampling = request.sampling
    untouched = sampling.temperature == 1 and sampling.top_p >= 1 and sampling.top_k <= 0 and sampling.min_p <= 0
    return "raw" if untouched or sampling.temperature == 0 else "processed"


def _ignored(request: GenerationRequest) -> tuple[str, ...]:
    # A stop string makes the server drop the ids of the tokens that hold it.
    asked = (("stop", request.sampling.stop), ("salt", request.salt), ("priority", request.priority))
    return tuple(name for name, value in asked if value)


def _payload(request: GenerationRequest, prompt: list[int], step: int) -> dict[str, Any]:
    sampling = request.sampling
    payload: dict[str, Any] = {
        **_OFF,
        "prompt": prompt,
        "samplers": _SAMPLERS,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p,
        "n_probs": 1,
        "post_sampling_probs": _mode(request) == "processed",
        "return_tokens": True,
        "cache_prompt": True,
    }
    if request.seed is not None:
        payload["seed"] = _seed_of_step(request.seed, step)
    return payload


def _seed_of_step(seed: int, step: int) -> int:
    # Neighbouring seeds must not share steps. The largest 32-bit seed means "random" to the server.
    digest = hashlib.blake2b(f"{seed}|{step}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % (2**32 - 1)


def _stopped_by_itself(stop_type: str, sampled: int, wanted: int, where: str) -> bool:
    if stop_type == "eos":
        return True
    if stop_type != "limit":
        raise MalformedReply(f"{where}: stopped by {stop_type!r}")
    if sampled < wanted:
        raise MalformedReply(f"{where}: {sampled} of {wanted} tokens, and no word why")
    return False
