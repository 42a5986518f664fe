"""vLLM's routes on a scripted engine, as those of 0.32 and 0.33 behave."""

from __future__ import annotations

import msgspec

from prorld.testing.scripted_engine.desk import Desk
from prorld.testing.scripted_engine.engine import Call, Sampled
from prorld.testing.scripted_engine.http11 import Reply, Request
from prorld.testing.scripted_engine.http_json import Problem, Route, Routes, as_json, decoded
from prorld.testing.scripted_engine.script import FaultKind, FaultPlace
from prorld.testing.scripted_engine.vllm_control import VllmControlRoutes
from prorld.testing.scripted_engine.wire import (
    CompletionRequest,
    GenerateRequest,
    completion_reply,
    generate_reply,
)

__all__ = ["VllmRoutes"]


class _Names(msgspec.Struct, frozen=True):
    request_ids: list[str]


class VllmRoutes:
    """What the script's flags open of them."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._open: Routes = {
            ("GET", "/health"): self._empty,
            ("GET", "/v1/models"): self._models,
            ("GET", "/version"): self._version,
            ("GET", "/metrics"): self._metrics,
            ("POST", "/v1/completions"): self._completions,
        }
        self._scale_out: Routes = {
            ("POST", "/inference/v1/generate"): self._generate,
            ("POST", "/inference/v1/abort_requests"): self._abort,
        }
        control = VllmControlRoutes(desk.engine, desk.script, desk.met)
        self._dev: Routes = {**control.dev(), ("POST", "/abort_requests"): self._abort}
        self._lora = control.lora()

    def find(self, method: str, path: str) -> Route | None:
        """The route, where it is open."""
        key, script = (method, path), self._desk.script
        if key in self._scale_out and not script.scale_out:
            raise Problem(403, "this endpoint needs --enable-scale-out", "PermissionDeniedError")
        route = self._open.get(key) or self._scale_out.get(key)
        if route is None and script.dev_mode:
            route = self._dev.get(key)
        if route is None and script.lora:
            route = self._lora.get(key)
        return route

    # --- sampling -----------------------------------------------------------------------------------------------------

    async def _generate(self, request: Request) -> Reply:
        wish = decoded(request, GenerateRequest)
        self._check_model(wish.model)
        room = self._desk.script.max_model_len - len(wish.token_ids)
        call = wish.call(self._name(request, wish.request_id), request.headers.get("x-session-id", ""), room)
        call = self._adapted(call, wish.model)

        def formatted(sampled: Sampled, fault: FaultKind | None) -> bytes:
            return generate_reply(call, sampled, self._desk.script.model, fault)

        return await self._desk.sample(call, formatted, seeded=wish.sampling_params.seed is not None)

    async def _completions(self, request: Request) -> Reply:
        wish = decoded(request, CompletionRequest)
        self._check_model(wish.model)
        if len(wish.prompt) == self._desk.script.max_model_len:
            # The real one works out the budget first, and finds fault with that.
            raise Problem(400, "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)")
        call = wish.call(self._name(request, wish.request_id), request.headers.get("x-session-id", ""))
        call = self._adapted(call, wish.model)
        scored = wish.prompt_logprobs is not None
        with_spans = wish.return_weight_versions and self._desk.script.spans_in_completions

        def formatted(sampled: Sampled, fault: FaultKind | None) -> bytes:
            return completion_reply(
                call,
                sampled,
                self._desk.script.model,
                fault,
                with_ids=wish.return_token_ids,
                with_spans=with_spans,
                scored=scored,
            )

        place: FaultPlace = "score" if scored else "sample"
        return await self._desk.sample(call, formatted, seeded=wish.seed is not None, place=place)

    def _name(self, request: Request, asked: str) -> str:
        return request.headers.get("x-request-id") or asked or f"anonymous-{self._desk.number()}"

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self._desk.script.model and model not in self._desk.engine.adapters:
            raise Problem(404, f"The model `{model}` does not exist.", "NotFoundError")

    def _adapted(self, call: Call, model: str | None) -> Call:
        """An adapter's prefixes are its own."""
        if model not in self._desk.engine.adapters:
            return call
        return msgspec.structs.replace(call, salt=f"{model}|{call.salt or ''}")

    # --- vLLM's other routes ------------------------------------------------------------------------------------------

    async def _empty(self, request: Request) -> Reply:
        return Reply()

    async def _models(self, request: Request) -> Reply:
        card = {
            "id": self._desk.script.model,
            "object": "model",
            "owned_by": "vllm",
            "max_model_len": self._desk.script.max_model_len,
        }
        adapters = [{"id": name, "root": path} for name, path in self._desk.engine.adapters.items()]
        return as_json({"object": "list", "data": [card, *adapters]})

    async def _version(self, request: Request) -> Reply:
        return as_json({"version": self._desk.script.build})

    async def _metrics(self, request: Request) -> Reply:
        engine = self._desk.engine
        labels = f'{{engine="0",model_name="{self._desk.script.model}"}}'
        figures = {
            "vllm:num_requests_running": engine.running,
            "vllm:num_requests_waiting": engine.waiting,
            "vllm:kv_cache_usage_perc": 0.0,
            "vllm:prefix_cache_queries_total": engine.cache.queries_total,
            "vllm:prefix_cache_hits_total": engine.cache.hits_total,
        }
        lines = [f"{name}{labels} {value}" for name, value in figures.items()]
        block = 128 if self._desk.script.cpu else 16
        lines.append(f'vllm:cache_config_info{{block_size="{block}",engine="0",kv_cache_memory_bytes="None"}} 1')
        if self._desk.script.lora:
            lines.append("# TYPE vllm:lora_requests_info gauge")
        for reason, count in engine.finished.items():
            lines.append(f'vllm:request_success_total{{finished_reason="{reason}"}} {count}')
        return Reply(body="\n".join([*lines, ""]).encode(), content_type="text/plain")

    async def _abort(self, request: Request) -> Reply:
        self._desk.engine.abort(decoded(request, _Names).request_ids)
        return Reply()
