"""The client of SGLang's own token endpoint. Unverified against a running SGLang: it follows the server's source code.

Three habits of the server shape it:

* A call that may reach the end of the context is refused, not cut, so the budget is cut here.
* Its log-probabilities are of the distribution after the temperature; scores of given tokens are the model's own.
* A paused server holds new calls without a word until it goes on.
"""

from __future__ import annotations

from typing import Any

import trio

from prorld.domain.branch import VersionSpan, labelled
from prorld.domain.versions import parse_label
from prorld.errors import BackendError, ContextOverflow, MalformedReply
from prorld.inference.checks import (
    checked_finish,
    checked_logprobs,
    checked_prompt,
    checked_sampled,
    checked_spans,
)
from prorld.inference.contract import BackendKind, Capabilities, Generation, GenerationRequest
from prorld.inference.engine_http import EngineHttp
from prorld.inference.model_cards import model_card
from prorld.inference.sglang_control import SglangControl
from prorld.inference.sglang_wire import (
    GENERATED,
    MODEL_INFO,
    SERVER_INFO,
    Generated,
    ServerInfo,
    logprobs_of,
)

__all__ = ["SglangBackend"]

CONNECTIONS_MAX = 4096
RESPONSE_BYTES_MAX = 64 * 1024 * 1024

# Prompt and reply together must stay below the context, not within it.
RESERVED_TOKENS = 1


class SglangBackend(SglangControl):
    """One SGLang server."""

    def __init__(
        self, url: str, *, model: str | None = None, api_key: str | None = None, connections_max: int = CONNECTIONS_MAX
    ) -> None:
        super().__init__(
            EngineHttp(url, connections_max=connections_max, response_bytes_max=RESPONSE_BYTES_MAX, api_key=api_key)
        )
        self._model = model
        self._server = ServerInfo()

    @property
    def kind(self) -> BackendKind:
        """Which API it speaks."""
        return "sglang"

    # --- what it is ---------------------------------------------------------------------------------------------------

    async def probe(self) -> Capabilities:
        """Ask for the model, its context, what the server was started with, and the weights."""
        card = await model_card(self._http, self._model)
        info = await self._http.call("GET", "/model_info", MODEL_INFO)
        self._server = server = await self._server_info()
        bounds = [bound for bound in (card.max_model_len, server.max_total_num_tokens) if bound is not None]
        if not bounds:
            raise BackendError(f"{self.url} does not say how long its context is", retryable=False)
        control = info.weight_version is not None
        self._label = info.weight_version if control else self._told.label
        self._found = Capabilities(
            model=card.id,
            max_context_tokens=min(bounds) - RESERVED_TOKENS,
            native_generate=True,
            version_spans=True,
            control=control,
            reload=control,
            lora=bool(server.enable_lora),
            scores=True,
            takes_seed=bool(server.enable_deterministic_inference),
            logprobs_mode="processed",
            weights=parse_label(self._label),
            model_path=info.model_path,
            details={"build": server.version, "weights": self._label},
        )
        return self._found

    async def _server_info(self) -> ServerInfo:
        return await self._http.look("/server_info", SERVER_INFO) or ServerInfo()

    # --- sampling -----------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample. Raises ``BackendError`` or one of its kinds."""
        found = self._can()
        room = found.max_context_tokens - len(request.token_ids)
        if room < 1:
            raise ContextOverflow(
                f"{len(request.token_ids)} prompt tokens, the context of {self.url} holds {found.max_context_tokens}"
            )
        budget = min(request.max_tokens, room)
        started, label = trio.current_time(), self._label
        reply = await self._http.call("POST", "/generate", GENERATED, self._payload(request, budget, found))
        seconds = trio.current_time() - started
        return self._judge(request, budget, reply, seconds, found, label)

    def _payload(self, request: GenerationRequest, budget: int, found: Capabilities) -> dict[str, Any]:
        sampling = request.sampling
        params: dict[str, Any] = {
            "max_new_tokens": budget,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "min_p": sampling.min_p,
            "stop_token_ids": list(request.stop_token_ids),
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        if sampling.stop:
            params["stop"] = sampling.stop
        if request.seed is not None and found.takes_seed:
            params["sampling_seed"] = request.seed
        payload: dict[str, Any] = {
            "input_ids": list(request.token_ids),
            "rid": request.request_id,
            "session_id": request.session,
            "routing_key": request.session,
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "stream": False,
        }
        if request.salt is not None:
            payload["extra_key"] = request.salt
        if request.priority and self._server.enable_priority_scheduling:
            upside_down = bool(self._server.schedule_low_priority_values_first)
            payload["priority"] = -request.priority if upside_down else request.priority
        if request.adapter is not None:
            payload["lora_path"] = request.adapter
        return payload

    def _judge(
        self,
        request: GenerationRequest,
        budget: int,
        reply: Generated,
        seconds: float,
        found: Capabilities,
        label: str | None,
    ) -> Generation:
        where, meta = f"generate of {self.url}", reply.meta_info
        checked_prompt(request.token_ids, where, length=meta.prompt_tokens)
        if reply.output_ids is None or meta.finish_reason is None:
            raise MalformedReply(f"{where}: no token ids, or no word why it ended")
        ids = checked_sampled(reply.output_ids, budget, where)
        said = meta.output_token_logprobs or []
        logprobs = checked_logprobs(logprobs_of(said, where), ids, where, logprob_ids=[token for _, token, _ in said])
        spans, exact = self._spans(request, reply, len(ids), label, where)
        return Generation(
            token_ids=ids,
            logprobs=logprobs,
            finish=checked_finish(meta.finish_reason.type, len(ids), where),
            versions=spans,
            versions_exact=exact,
            logprobs_mode=found.logprobs_mode,
            stop_reason=meta.finish_reason.matched,
            cached_tokens=meta.cached_tokens,
            engine_request_id=meta.id,
            latency_s=seconds,
            ignored=self._ignored(request, found),
        )

    def _ignored(self, request: GenerationRequest, found: Capabilities) -> tuple[str, ...]:
        named: list[str] = []
        if request.seed is not None and not found.takes_seed:
            named.append("seed")
        if request.priority and not self._server.enable_priority_scheduling:
            named.append("priority")
        return tuple(named)

    def _spans(
        self, request: GenerationRequest, reply: Generated, sampled: int, label: str | None, where: str
    ) -> tuple[tuple[VersionSpan, ...], bool]:
        """An adapter's name is its version, whatever the weights below it are called."""
        meta, control = reply.meta_info, self._can().control
        said = [(span.version, span.start, span.end) for span in meta.weight_versions or ()]
        known_by_token = bool(said)
        if request.adapter is not None:
            said, known_by_token = [(request.adapter, 0, sampled)], True
        elif not control:
            # It can't be told a version, and has the one that it is said to have.
            said, known_by_token = [(label or "", 0, sampled)], label == self._label
        elif not said:
            said = [(meta.weight_version or "", 0, sampled)]
        spans = [labelled(name, start, end) for name, start, end in said]
        known_by_token &= all(span.version is not None for span in spans)
        return checked_spans(spans, sampled, where), known_by_token

    # --- how it is ----------------------------------------------------------------------------------------------------

    async def healthy(self) -> bool:
        """Whether the engine answers its health check now."""
        return await self._http.reachable("/health")
