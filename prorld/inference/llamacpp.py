"""The client of llama.cpp's server, with every sampler that was not asked for switched off.

Three habits of the server shape it:

* It goes on sampling for a caller who hung up, to the end of the call. So a long call is made of short ones over the
  server's prefix cache, which costs nothing but the round trips; a cancelled caller wastes at most one of them.
* A stop token that is not the model's own end of turn can't be asked for. The short calls are cut at the first one.
* Log-probabilities are left out where text ends inside a character; they are asked for again (``llamacpp_wire``).

The sampled end-of-turn token is in ``tokens`` with its log-probability. A streamed answer would end with the socket,
but it drops the ids of those tokens, too, and they can't be had again. Weights can't change, so versions are exact.

The steps are what makes it possible to pause a server that knows nothing of that: between two of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import trio

from prorld.errors import BackendError, ContextOverflow, MalformedReply, Unsupported
from prorld.inference.checks import check_scorable, checked_logprobs, checked_prompt, checked_sampled, checked_token_ids
from prorld.inference.contract import (
    BackendKind,
    Capabilities,
    EngineLoad,
    Generation,
    GenerationRequest,
    PauseMode,
)
from prorld.inference.engine_http import EngineHttp, raise_for_status
from prorld.inference.http_backend import HttpBackend
from prorld.inference.llamacpp_call import (
    SteppedCall,
    forcing,
    ignored_of,
    logprobs_mode_of,
    payload_of,
    stopped_by_itself,
)
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
from prorld.inference.step_gate import StepGate

__all__ = ["LlamaCppBackend"]

CONNECTIONS_MAX = 64
RESPONSE_BYTES_MAX = 64 * 1024 * 1024

# What a caller who hung up still costs: a fraction of a second on two cores.
STEP_TOKENS_MAX = 16

# How many candidates are asked for to find a lost log-probability before the whole vocabulary is.
RECOVERY_CANDIDATES = 64

# A score costs a call a token.
SCORE_TOKENS_MAX = 8192

_RUNNING = "llamacpp:requests_processing"
_WAITING = "llamacpp:requests_deferred"
# Tokens are counted when a call ends; batches, also those of a long prompt, while the engine works.
_BATCHES = "llamacpp:n_decode_total"


class _Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the probe found and sampling needs."""

    context: int
    vocabulary: int
    whole_token: int


class LlamaCppBackend(HttpBackend):
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
        super().__init__(
            EngineHttp(url, connections_max=connections_max, response_bytes_max=RESPONSE_BYTES_MAX, api_key=api_key)
        )
        self._model = model
        self._step_tokens_max = step_tokens_max
        self._facts: _Facts | None = None
        self._steps = StepGate()

    @property
    def kind(self) -> BackendKind:
        """Which API it speaks."""
        return "llamacpp"

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
            control=True,
            scores=True,
            varies=True,
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
        call = SteppedCall(request, min(request.max_tokens, room))
        started = trio.current_time()
        async with self._steps.call(self.url):
            while call.finish is None:
                if await self._steps.must_end():
                    call.finish = "abort"
                else:
                    await self._step(call, facts)
        return Generation(
            token_ids=call.ids,
            logprobs=call.logprobs,
            finish=call.finish,
            versions=tuple(call.spans),
            versions_exact=call.spans_exact,
            logprobs_mode=logprobs_mode_of(request),
            stop_reason=call.stop_reason,
            cached_tokens=call.cached,
            latency_s=trio.current_time() - started,
            ignored=ignored_of(request),
        )

    async def _step(self, call: SteppedCall, facts: _Facts) -> None:
        where = f"completion of {self.url}"
        prompt, told = call.prompt, self._told
        wanted = min(self._step_tokens_max, call.budget - len(call.ids))
        payload = {**payload_of(call.request, prompt, call.steps), "n_predict": wanted}
        reply = await self._http.call("POST", "/completion", COMPLETION, payload)
        checked_prompt(prompt, where, length=reply.tokens_evaluated)
        ids = checked_sampled(reply.tokens, wanted, where)
        if not ids:
            raise MalformedReply(f"{where}: not a single token")
        logprobs = await self._logprobs(call.request, prompt, reply, facts, where)
        if call.steps == 0:
            call.cached = reply.timings.cache_n
        call.steps += 1
        at_end = stopped_by_itself(reply.stop_type, len(ids), wanted, where)
        call.spans_exact &= told == self._told
        call.grow(ids, checked_logprobs(logprobs, ids, where), told, at_end=at_end)

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
        if logprobs_mode_of(request) == "processed":
            return processed_logprob(
                await self._candidates(before, facts.vocabulary, facts, where), token, request.sampling
            )
        return await self._raw(before, token, facts, where)

    async def _raw(self, before: Sequence[int], token: int, facts: _Facts, where: str) -> float:
        for count in (RECOVERY_CANDIDATES, facts.vocabulary):
            candidates = await self._candidates(before, count, facts, where)
            if token in candidates:
                return candidates[token]
        raise MalformedReply(f"{where}: token {token} is not in the vocabulary")

    async def _candidates(self, before: Sequence[int], count: int, facts: _Facts, where: str) -> dict[int, float]:
        payload = {**forcing(before, facts.whole_token), "n_probs": count}
        reply = await self._http.call("POST", "/completion", COMPLETION, payload)
        if len(reply.completion_probabilities) != 1:
            raise MalformedReply(f"{where}: no candidates came back")
        entry: TokenProb = reply.completion_probabilities[0]
        found = {candidate.id: candidate.logprob for candidate in entry.top_logprobs if candidate.logprob is not None}
        found[entry.id] = entry.value
        return found

    # --- scoring and pausing ------------------------------------------------------------------------------------------

    async def score(self, token_ids: array[int], start: int) -> array[float]:
        """The raw log-probability of every token from ``start`` on: each is made to be sampled, one call a token.

        The prefix of each call is that of the one before it, so that a call computes one token.
        """
        facts = self._facts
        if facts is None:
            raise AssertionError("score before probe")
        where = f"score of {self.url}"
        ids = checked_token_ids(token_ids, "the tokens")
        check_scorable(len(ids), start, facts.context, self.url)
        if len(ids) - start > SCORE_TOKENS_MAX:
            raise Unsupported(f"{len(ids) - start} tokens to score; {self.url} takes {SCORE_TOKENS_MAX} at most")
        values = [await self._score_one(ids[:at], ids[at], facts, where) for at in range(start, len(ids))]
        return checked_logprobs(values, ids[start:], where)

    async def _score_one(self, before: Sequence[int], token: int, facts: _Facts, where: str) -> float:
        payload = {**forcing(before, token), "n_probs": 1}
        reply = await self._http.call("POST", "/completion", COMPLETION, payload)
        checked_prompt(before, where, length=reply.tokens_evaluated)
        if list(reply.tokens) != [token]:
            raise MalformedReply(f"{where}: token {token} could not be sampled")
        said = reply.completion_probabilities
        if len(said) == 1 and said[0].id == token:
            return said[0].value
        return await self._raw(before, token, facts, where)

    async def pause(self, mode: PauseMode) -> None:
        """Let the calls of this client end, or stop them between two steps; it takes no new ones meanwhile."""
        await self._steps.pause(mode)

    async def resume(self) -> None:
        """Go on."""
        await self._steps.resume()

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
        values = metric_values(response.body.decode("utf-8", "replace"), (_RUNNING, _WAITING, _BATCHES))
        return EngineLoad(
            running=int(values[_RUNNING][0]) if values[_RUNNING] else None,
            waiting=int(values[_WAITING][0]) if values[_WAITING] else None,
            tokens_total=values[_BATCHES][0] if values[_BATCHES] else None,
        )
