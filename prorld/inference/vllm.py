"""The client of vLLM: its token endpoint where the server opens it, completions with a token prompt elsewhere.

It keeps one probe's findings and its sockets, nothing about any rollout. vLLM drops fields it does not know without a
word, so every reply is judged by ``checks`` before it is believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import trio

from prorld.domain.branch import VersionSpan, labelled
from prorld.domain.versions import parse_label
from prorld.errors import BackendError, ContextOverflow
from prorld.inference.checks import (
    checked_finish,
    checked_logprobs,
    checked_prompt,
    checked_sampled,
    checked_spans,
)
from prorld.inference.contract import BackendKind, Capabilities, EngineLoad, Generation, GenerationRequest
from prorld.inference.engine_http import EngineHttp, raise_for_status
from prorld.inference.model_cards import model_card
from prorld.inference.prometheus_text import metric_values
from prorld.inference.vllm_control import COMPLETIONS_PATH, RPC_PATH, VllmControl
from prorld.inference.vllm_wire import (
    COMPLETION,
    GENERATE,
    VERSION,
    Answer,
    CompletionReply,
    GenerateReply,
    WeightSpan,
    answer_of_completion,
    answer_of_generate,
    may_be_cpu_build,
    version_spans,
)

__all__ = ["VllmBackend"]

GENERATE_PATH = "/inference/v1/generate"
ABORT_PATH = "/inference/v1/abort_requests"

# One call, one socket: fewer than agents on one engine would make them queue here, where no priority is known.
CONNECTIONS_MAX = 4096
RESPONSE_BYTES_MAX = 64 * 1024 * 1024

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USAGE = "vllm:kv_cache_usage_perc"
_PREEMPTED = "vllm:num_preemptions_total"
# Each moves while the engine works: tokens of prompts that were computed whole, sampled ones, all of every step.
_TOKENS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:iteration_tokens_total_sum")


class VllmBackend(VllmControl):
    """One vLLM server. ``logprobs_mode`` is what the server was started with; it can't be asked."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        logprobs_mode: Literal["raw", "processed"] = "raw",
        takes_seed: bool | None = None,
        api_key: str | None = None,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        super().__init__(
            EngineHttp(url, connections_max=connections_max, response_bytes_max=RESPONSE_BYTES_MAX, api_key=api_key)
        )
        self._model = model
        self._logprobs_mode: Literal["raw", "processed"] = logprobs_mode
        self._takes_seed = takes_seed

    @property
    def kind(self) -> BackendKind:
        """Which API it speaks."""
        return "vllm"

    # --- what it is ---------------------------------------------------------------------------------------------------

    async def probe(self) -> Capabilities:
        """Ask for the model, its context, the token endpoint, the control routes, the build and the weights."""
        card = await model_card(self._http, self._model)
        if card.max_model_len is None:
            raise BackendError(f"{self.url} does not say how long its context is", retryable=False)
        native = await self._opens(ABORT_PATH, {"request_ids": []})
        control = await self._read_label()
        build, metrics = await self._build(), await self._metrics()
        # CPU builds are ended by a seed in a batch with a partial prefill, and by scoring where adapters are enabled.
        fragile = may_be_cpu_build(build, metrics)
        lora = await self._takes_adapters(metrics)
        self._found = Capabilities(
            model=card.id,
            max_context_tokens=card.max_model_len,
            native_generate=native,
            version_spans=native,
            control=control,
            reload=control and await self._opens(RPC_PATH, {}),
            lora=lora,
            scores=not (fragile and "vllm:lora_requests_info" in metrics),
            varies=fragile,
            takes_seed=not fragile if self._takes_seed is None else self._takes_seed,
            logprobs_mode=self._logprobs_mode,
            weights=parse_label(self._label),
            model_path=card.root,
            details={"build": build, "weights": self._label},
        )
        return self._found

    async def _build(self) -> str:
        said = await self._http.look("/version", VERSION)
        return "" if said is None else said.version

    async def _metrics(self) -> str:
        """What it says of itself to Prometheus; nothing where it does not."""
        response = await self._http.send("GET", "/metrics")
        return response.body.decode("utf-8", "replace") if response.status == 200 else ""

    # --- sampling -----------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample. Raises ``BackendError`` or one of its kinds."""
        found = self._found
        if found is None:
            raise AssertionError("generate before probe")
        started, label = trio.current_time(), self._label
        where = f"{'generate' if found.native_generate else 'completions'} of {self.url}"
        try:
            answer = await self._answer(request, found, where)
        except BackendError as exc:
            # Completions complain about a budget of 0 tokens, and not about the prompt, where it fills the context.
            if exc.status == 400 and len(request.token_ids) >= found.max_context_tokens:
                raise ContextOverflow(exc.message, status=400) from exc
            raise
        return self._judge(request, found, answer, trio.current_time() - started, where, label)

    async def _answer(self, request: GenerationRequest, found: Capabilities, where: str) -> Answer:
        if found.native_generate:
            return answer_of_generate(await self._ask_generate(request, found), where)
        return answer_of_completion(await self._ask_completions(request, found), where)

    async def _ask_generate(self, request: GenerationRequest, found: Capabilities) -> GenerateReply:
        payload = {
            "model": request.adapter or found.model,
            "token_ids": list(request.token_ids),
            "request_id": request.request_id,
            "return_token_ids": True,
            # A stop string is found only in text; without one the server may skip making any.
            "sampling_params": {**_sampling(request, found), "detokenize": bool(request.sampling.stop)},
            **_extras(request),
        }
        return await self._http.call("POST", GENERATE_PATH, GENERATE, payload, _session(request))

    async def _ask_completions(self, request: GenerationRequest, found: Capabilities) -> CompletionReply:
        payload = {
            "model": request.adapter or found.model,
            "prompt": list(request.token_ids),
            "request_id": request.request_id,
            "return_token_ids": True,
            "return_weight_versions": True,
            "add_special_tokens": False,
            **_sampling(request, found),
            **_extras(request),
        }
        return await self._http.call("POST", COMPLETIONS_PATH, COMPLETION, payload, _session(request))

    def _judge(
        self,
        request: GenerationRequest,
        found: Capabilities,
        answer: Answer,
        seconds: float,
        where: str,
        label: str | None,
    ) -> Generation:
        checked_prompt(request.token_ids, where, echoed=answer.prompt_ids, length=answer.prompt_length)
        ids = checked_sampled(answer.token_ids, request.max_tokens, where)
        logprobs = checked_logprobs(answer.logprobs, ids, where, logprob_ids=answer.logprob_ids)
        spans, exact = self._spans(answer.spans, len(ids), found, where, label)
        if request.adapter is not None:
            # The server tells the label of the weights below the adapter; the adapter's name is what was sampled from.
            spans, exact = _of_label(request.adapter, len(ids))
        return Generation(
            token_ids=ids,
            logprobs=logprobs,
            finish=checked_finish(answer.finish_reason, len(ids), where),
            versions=spans,
            versions_exact=exact,
            logprobs_mode=found.logprobs_mode,
            stop_reason=answer.stop_reason,
            cached_tokens=answer.cached_tokens,
            engine_request_id=answer.engine_request_id,
            latency_s=seconds,
            ignored=("seed",) if request.seed is not None and not found.takes_seed else (),
        )

    def _spans(
        self, said: list[WeightSpan] | None, sampled: int, found: Capabilities, where: str, label: str | None
    ) -> tuple[tuple[VersionSpan, ...], bool]:
        if said:
            made, known = version_spans(said)
            spans = checked_spans(made, sampled, where)
            # A server that can't be told a version calls its weights by their first name whatever they are by now.
            if found.control or any((span.epoch, span.version) != (0, 0) for span in spans):
                return spans, known
        # The server says nothing of versions. What was last told or read holds for certain only where no control route
        # is open through which the weights could have changed meanwhile.
        whole, known = _of_label(label, sampled)
        return whole, known and not found.control and label == self._label

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End calls by the ids they were asked with, as far as the server lets it; a closed socket is the certain way.

        The server knows a call under a name with a prefix of its own, and answers 200 to names it does not know.
        """
        native = self._found is not None and self._found.native_generate
        names = [f"generate-tokens-{name}" if native else f"cmpl-{name}-0" for name in request_ids]
        await self._http.send("POST", ABORT_PATH, {"request_ids": names}, control=True)

    # --- how it is ----------------------------------------------------------------------------------------------------

    async def healthy(self) -> bool:
        """Whether the engine answers its health check now."""
        return await self._http.reachable("/health")

    async def load(self) -> EngineLoad:
        """Running and waiting requests over all ranks, and the fullest rank's cache."""
        response = await self._http.send("GET", "/metrics")
        raise_for_status(response, f"GET /metrics of {self.url}")
        page = response.body.decode("utf-8", "replace")
        values = metric_values(page, (_RUNNING, _WAITING, _KV_USAGE, _PREEMPTED, *_TOKENS))
        tokens = [value for name in _TOKENS for value in values[name]]
        return EngineLoad(
            running=int(sum(values[_RUNNING])) if values[_RUNNING] else None,
            waiting=int(sum(values[_WAITING])) if values[_WAITING] else None,
            kv_usage=max(values[_KV_USAGE], default=None),
            tokens_total=sum(tokens) if tokens else None,
            preempted_total=int(sum(values[_PREEMPTED])) if values[_PREEMPTED] else None,
        )


def _sampling(request: GenerationRequest, found: Capabilities) -> dict[str, Any]:
    sampling = request.sampling
    made: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop_token_ids": list(request.stop_token_ids),
        "logprobs": 0,
        "skip_special_tokens": False,
    }
    if sampling.top_k > 0:
        made["top_k"] = sampling.top_k
    if sampling.min_p > 0:
        made["min_p"] = sampling.min_p
    if sampling.stop:
        made["stop"] = sampling.stop
    if request.seed is not None and found.takes_seed:
        made["seed"] = request.seed
    return made


def _extras(request: GenerationRequest) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if request.salt is not None:
        extras["cache_salt"] = request.salt
    if request.priority:
        # Here the higher one goes first, there the lower one; a server without that policy passes it over.
        extras["priority"] = -request.priority
    return extras


def _session(request: GenerationRequest) -> tuple[tuple[str, str], ...]:
    return (("x-session-id", request.session),)


def _of_label(label: str | None, sampled: int) -> tuple[tuple[VersionSpan, ...], bool]:
    """One span of the version that a label means, and whether it means one."""
    whole = labelled(label, 0, sampled)
    return (whole,) if sampled else (), whole.version is not None
