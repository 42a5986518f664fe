"""The routes of a scripted engine: vLLM's own, and ``/scripted/...`` to direct and observe it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec
import trio

from prorld.testing.scripted_engine.engine import Call, Paused, Refused, ScriptedEngine
from prorld.testing.scripted_engine.faults import FaultPlan
from prorld.testing.scripted_engine.http11 import HangUp, Reply, Request
from prorld.testing.scripted_engine.http_json import Problem, Route, Routes, as_json, decoded
from prorld.testing.scripted_engine.script import Fault, FaultKind, FaultPlace, Script
from prorld.testing.scripted_engine.vllm_control import VllmControlRoutes
from prorld.testing.scripted_engine.wire import (
    CompletionRequest,
    GenerateRequest,
    completion_reply,
    generate_reply,
)

__all__ = ["ScriptedServer"]

Format = Callable[[Any, FaultKind | None], bytes]


class _Names(msgspec.Struct, frozen=True):
    request_ids: list[str]


class ScriptedServer:
    """Answers requests for one engine. ``answer`` goes with ``serve_connection``."""

    def __init__(self, script: Script) -> None:
        self.engine = ScriptedEngine(script)
        self.faults = FaultPlan(script.faults)
        self.script = script
        self._numbers = 0
        self._is_dead = False
        self._open: Routes = {
            ("GET", "/health"): self._empty,
            ("GET", "/v1/models"): self._models,
            ("GET", "/version"): self._version,
            ("GET", "/metrics"): self._metrics,
            ("POST", "/v1/completions"): self._completions,
            ("GET", "/scripted/state"): self._state,
            ("POST", "/scripted/faults"): self._arm,
            ("DELETE", "/scripted/faults"): self._disarm,
        }
        self._scale_out: Routes = {
            ("POST", "/inference/v1/generate"): self._generate,
            ("POST", "/inference/v1/abort_requests"): self._abort,
        }
        control = VllmControlRoutes(self.engine, script, self._met)
        self._dev: Routes = {**control.dev(), ("POST", "/abort_requests"): self._abort}
        self._lora = control.lora()

    async def answer(self, request: Request) -> Reply:
        """Any request."""
        try:
            return await self._route(request.method, request.path)(request)
        except Problem as problem:
            return problem.reply

    def _route(self, method: str, path: str) -> Route:
        key = (method, path)
        if key in self._scale_out and not self.script.scale_out:
            raise Problem(403, "this endpoint needs --enable-scale-out", "PermissionDeniedError")
        route = self._open.get(key) or self._scale_out.get(key)
        if route is None and self.script.dev_mode:
            route = self._dev.get(key)
        if route is None and self.script.lora:
            route = self._lora.get(key)
        if route is None:
            raise Problem(404, "Not Found", "NotFoundError")
        return route

    # --- sampling -----------------------------------------------------------------------------------------------------

    async def _generate(self, request: Request) -> Reply:
        wish = decoded(request, GenerateRequest)
        self._check_model(wish.model)
        room = self.script.max_model_len - len(wish.token_ids)
        call = wish.call(self._name(request, wish.request_id), request.headers.get("x-session-id", ""), room)
        call = self._adapted(call, wish.model)

        def formatted(sampled: Any, fault: FaultKind | None) -> bytes:
            return generate_reply(call, sampled, self.script.model, fault)

        return await self._sample(call, formatted, seeded=wish.sampling_params.seed is not None)

    async def _completions(self, request: Request) -> Reply:
        wish = decoded(request, CompletionRequest)
        self._check_model(wish.model)
        if len(wish.prompt) == self.script.max_model_len:
            # The real one works out the budget first, and finds fault with that.
            raise Problem(400, "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)")
        call = wish.call(self._name(request, wish.request_id), request.headers.get("x-session-id", ""))
        call = self._adapted(call, wish.model)
        scored = wish.prompt_logprobs is not None
        with_spans = wish.return_weight_versions and self.script.spans_in_completions

        def formatted(sampled: Any, fault: FaultKind | None) -> bytes:
            return completion_reply(
                call,
                sampled,
                self.script.model,
                fault,
                with_ids=wish.return_token_ids,
                with_spans=with_spans,
                scored=scored,
            )

        place: FaultPlace = "score" if scored else "sample"
        return await self._sample(call, formatted, seeded=wish.seed is not None, place=place)

    async def _sample(self, call: Call, formatted: Format, *, seeded: bool, place: FaultPlace = "sample") -> Reply:
        if not call.prompt or call.max_tokens < 1:
            raise Problem(400, "empty prompt, or max_tokens below 1")
        self._is_dead |= self.script.cpu and (seeded or (place == "score" and self.script.lora))
        if self._is_dead:
            raise Problem(500, "EngineCore encountered an issue. See stack trace for the root cause.", "ServerError")
        fault, spoilt = await self._met(place, call.session)
        if spoilt is not None:
            return spoilt
        try:
            sampled = await self.engine.sample(call)
        except Refused as exc:
            raise Problem(400, str(exc)) from exc
        except Paused as exc:
            raise Problem(503, str(exc), "ServiceUnavailableError") from exc
        kind = None if fault is None else fault.kind
        if kind == "garbage":
            return Reply(body=b"<html>not what you asked for</html>")
        return Reply(body=formatted(sampled, kind), cut=kind == "truncated")

    async def _met(self, place: FaultPlace, session: str) -> tuple[Fault | None, Reply | None]:
        """The fault of a call, and what is answered in its place; ``None`` when the call goes on."""
        fault = self.faults.next_for(session, place)
        return fault, None if fault is None else await self._meet(fault)

    async def _meet(self, fault: Fault) -> Reply | None:
        if fault.kind == "status":
            return as_json({"error": {"message": "scripted fault", "code": fault.status}}, fault.status)
        if fault.kind == "hang_up":
            raise HangUp
        if fault.kind == "reset":
            raise HangUp(b"HTTP/1.1 2")
        if fault.kind == "hang":
            await trio.sleep_forever()
        if fault.kind == "slow":
            await trio.sleep(fault.seconds)
        if fault.kind == "die":
            os._exit(1)
        return None

    def _name(self, request: Request, asked: str) -> str:
        self._numbers += 1
        return request.headers.get("x-request-id") or asked or f"anonymous-{self._numbers}"

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self.script.model and model not in self.engine.adapters:
            raise Problem(404, f"The model `{model}` does not exist.", "NotFoundError")

    def _adapted(self, call: Call, model: str | None) -> Call:
        """An adapter's prefixes are its own."""
        if model not in self.engine.adapters:
            return call
        return msgspec.structs.replace(call, salt=f"{model}|{call.salt or ''}")

    # --- vLLM's other routes ------------------------------------------------------------------------------------------

    async def _empty(self, request: Request) -> Reply:
        return Reply()

    async def _models(self, request: Request) -> Reply:
        card = {"id": self.script.model, "object": "model", "max_model_len": self.script.max_model_len}
        adapters = [{"id": name, "root": path} for name, path in self.engine.adapters.items()]
        return as_json({"object": "list", "data": [card, *adapters]})

    async def _version(self, request: Request) -> Reply:
        return as_json({"version": self.script.build})

    async def _metrics(self, request: Request) -> Reply:
        engine = self.engine
        labels = f'{{engine="0",model_name="{self.script.model}"}}'
        figures = {
            "vllm:num_requests_running": engine.running,
            "vllm:num_requests_waiting": engine.waiting,
            "vllm:kv_cache_usage_perc": 0.0,
            "vllm:prefix_cache_queries_total": engine.cache.queries_total,
            "vllm:prefix_cache_hits_total": engine.cache.hits_total,
        }
        lines = [f"{name}{labels} {value}" for name, value in figures.items()]
        block = 128 if self.script.cpu else 16
        lines.append(f'vllm:cache_config_info{{block_size="{block}",engine="0",kv_cache_memory_bytes="None"}} 1')
        if self.script.lora:
            lines.append("# TYPE vllm:lora_requests_info gauge")
        for reason, count in engine.finished.items():
            lines.append(f'vllm:request_success_total{{finished_reason="{reason}"}} {count}')
        return Reply(body="\n".join([*lines, ""]).encode(), content_type="text/plain")

    async def _abort(self, request: Request) -> Reply:
        self.engine.abort(decoded(request, _Names).request_ids)
        return Reply()

    # --- directing it -------------------------------------------------------------------------------------------------

    async def _state(self, request: Request) -> Reply:
        engine = self.engine
        return as_json(
            {
                "calls_total": engine.calls_total,
                "running": engine.running,
                "waiting": engine.waiting,
                "aborted_total": engine.aborted_total,
                "cancelled_total": engine.cancelled_total,
                "finished": engine.finished,
                "faults_met": self.faults.met,
                "label": engine.label,
                "loaded": engine.loaded,
                "adapters": engine.adapters,
            }
        )

    async def _arm(self, request: Request) -> Reply:
        self.faults.arm(decoded(request, Fault))
        return Reply(status=201)

    async def _disarm(self, request: Request) -> Reply:
        self.faults.clear()
        return Reply()
