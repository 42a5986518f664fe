"""The routes of a scripted engine: vLLM's own, and ``/scripted/...`` to direct and observe it."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import trio

from prorld.testing.scripted_engine.engine import Call, Paused, PauseMode, Refused, ScriptedEngine
from prorld.testing.scripted_engine.faults import FaultPlan
from prorld.testing.scripted_engine.http11 import HangUp, Reply, Request
from prorld.testing.scripted_engine.script import Fault, FaultKind, Script
from prorld.testing.scripted_engine.wire import (
    CompletionRequest,
    GenerateRequest,
    completion_reply,
    generate_reply,
)

__all__ = ["ScriptedServer"]

T = TypeVar("T")
Route = Callable[[Request], Awaitable[Reply]]
Format = Callable[[Any, FaultKind | None], bytes]

_PAUSE_MODES: dict[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "keep"}


class _Problem(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.reply = _json({"error": {"message": message, "type": kind, "code": status}}, status)


class _Names(msgspec.Struct, frozen=True):
    request_ids: list[str]


class _Label(msgspec.Struct, frozen=True):
    new_version: str


class ScriptedServer:
    """Answers requests for one engine. ``answer`` goes with ``serve_connection``."""

    def __init__(self, script: Script) -> None:
        self.engine = ScriptedEngine(script)
        self.faults = FaultPlan(script.faults)
        self.script = script
        self._numbers = 0
        self._is_dead = False
        self._open: dict[tuple[str, str], Route] = {
            ("GET", "/health"): self._empty,
            ("GET", "/v1/models"): self._models,
            ("GET", "/version"): self._version,
            ("GET", "/metrics"): self._metrics,
            ("POST", "/v1/completions"): self._completions,
            ("GET", "/scripted/state"): self._state,
            ("POST", "/scripted/faults"): self._arm,
            ("DELETE", "/scripted/faults"): self._disarm,
        }
        self._scale_out: dict[tuple[str, str], Route] = {
            ("POST", "/inference/v1/generate"): self._generate,
            ("POST", "/inference/v1/abort_requests"): self._abort,
        }
        self._dev: dict[tuple[str, str], Route] = {
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("GET", "/is_paused"): self._is_paused,
            ("POST", "/abort_requests"): self._abort,
            ("GET", "/weight_info"): self._weight_info,
            ("POST", "/update_weight_version"): self._set_label,
            ("POST", "/collective_rpc"): self._collective_rpc,
            ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
        }

    async def answer(self, request: Request) -> Reply:
        """Any request."""
        try:
            return await self._route(request.method, request.path)(request)
        except _Problem as problem:
            return problem.reply

    def _route(self, method: str, path: str) -> Route:
        key = (method, path)
        if key in self._scale_out and not self.script.scale_out:
            raise _Problem(403, "this endpoint needs --enable-scale-out", "PermissionDeniedError")
        route = self._open.get(key) or self._scale_out.get(key)
        if route is None and self.script.dev_mode:
            route = self._dev.get(key)
        if route is None:
            raise _Problem(404, "Not Found", "NotFoundError")
        return route

    # --- sampling -----------------------------------------------------------------------------------------------------

    async def _generate(self, request: Request) -> Reply:
        wish = _decoded(request, GenerateRequest)
        self._check_model(wish.model)
        room = self.script.max_model_len - len(wish.token_ids)
        call = wish.call(self._name(request, wish.request_id), request.headers.get("x-session-id", ""), room)

        def formatted(sampled: Any, fault: FaultKind | None) -> bytes:
            return generate_reply(call, sampled, self.script.model, fault)

        return await self._sample(call, formatted, seeded=wish.sampling_params.seed is not None)

    async def _completions(self, request: Request) -> Reply:
        wish = _decoded(request, CompletionRequest)
        self._check_model(wish.model)
        if len(wish.prompt) == self.script.max_model_len:
            # The real one works out the budget first, and finds fault with that.
            raise _Problem(400, "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)")
        call = wish.call(self._name(request, wish.request_id), request.headers.get("x-session-id", ""))
        with_spans = wish.return_weight_versions and self.script.spans_in_completions

        def formatted(sampled: Any, fault: FaultKind | None) -> bytes:
            return completion_reply(
                call, sampled, self.script.model, fault, with_ids=wish.return_token_ids, with_spans=with_spans
            )

        return await self._sample(call, formatted, seeded=wish.seed is not None)

    async def _sample(self, call: Call, formatted: Format, *, seeded: bool) -> Reply:
        if not call.prompt or call.max_tokens < 1:
            raise _Problem(400, "empty prompt, or max_tokens below 1")
        self._is_dead |= self.script.cpu and seeded
        if self._is_dead:
            raise _Problem(500, "EngineCore encountered an issue. See stack trace for the root cause.", "ServerError")
        fault = self.faults.next_for(call.session)
        spoilt = None if fault is None else await self._meet(fault)
        if spoilt is not None:
            return spoilt
        try:
            sampled = await self.engine.sample(call)
        except Refused as exc:
            raise _Problem(400, str(exc)) from exc
        except Paused as exc:
            raise _Problem(503, str(exc), "ServiceUnavailableError") from exc
        kind = None if fault is None else fault.kind
        if kind == "garbage":
            return Reply(body=b"<html>not what you asked for</html>")
        return Reply(body=formatted(sampled, kind), cut=kind == "truncated")

    async def _meet(self, fault: Fault) -> Reply | None:
        """What happens before the engine sees the call; ``None`` when it goes on."""
        if fault.kind == "status":
            return _json({"error": {"message": "scripted fault", "code": fault.status}}, fault.status)
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
        if model is not None and model != self.script.model:
            raise _Problem(404, f"The model `{model}` does not exist.", "NotFoundError")

    # --- vLLM's other routes ------------------------------------------------------------------------------------------

    async def _empty(self, request: Request) -> Reply:
        return Reply()

    async def _models(self, request: Request) -> Reply:
        card = {"id": self.script.model, "object": "model", "max_model_len": self.script.max_model_len}
        return _json({"object": "list", "data": [card]})

    async def _version(self, request: Request) -> Reply:
        return _json({"version": self.script.build})

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
        for reason, count in engine.finished.items():
            lines.append(f'vllm:request_success_total{{finished_reason="{reason}"}} {count}')
        return Reply(body="\n".join([*lines, ""]).encode(), content_type="text/plain")

    async def _abort(self, request: Request) -> Reply:
        self.engine.abort(_decoded(request, _Names).request_ids)
        return Reply()

    async def _pause(self, request: Request) -> Reply:
        mode = _PAUSE_MODES.get(request.query.get("mode", "abort"))
        if mode is None:
            raise _Problem(400, "unknown mode")
        self.engine.pause(mode, clear_cache=request.query.get("clear_cache", "true") == "true")
        return _json({"status": "paused"})

    async def _resume(self, request: Request) -> Reply:
        self.engine.resume()
        return _json({"status": "resumed"})

    async def _is_paused(self, request: Request) -> Reply:
        return _json({"is_paused": self.engine.is_paused})

    async def _weight_info(self, request: Request) -> Reply:
        return _json({"weight_version": self.engine.label})

    async def _set_label(self, request: Request) -> Reply:
        self.engine.set_label(_decoded(request, _Label).new_version)
        return _json({"success": True})

    async def _collective_rpc(self, request: Request) -> Reply:
        await trio.sleep(self.script.latency.reload_s)
        return _json({"results": [None]})

    async def _reset_prefix_cache(self, request: Request) -> Reply:
        self.engine.cache.clear()
        return Reply()

    # --- directing it -------------------------------------------------------------------------------------------------

    async def _state(self, request: Request) -> Reply:
        engine = self.engine
        return _json(
            {
                "calls_total": engine.calls_total,
                "running": engine.running,
                "waiting": engine.waiting,
                "aborted_total": engine.aborted_total,
                "cancelled_total": engine.cancelled_total,
                "finished": engine.finished,
                "faults_met": self.faults.met,
                "label": engine.label,
            }
        )

    async def _arm(self, request: Request) -> Reply:
        self.faults.arm(_decoded(request, Fault))
        return Reply(status=201)

    async def _disarm(self, request: Request) -> Reply:
        self.faults.clear()
        return Reply()


def _json(value: Any, status: int = 200) -> Reply:
    return Reply(status=status, body=msgspec.json.encode(value))


def _decoded(request: Request, wanted: type[T]) -> T:
    try:
        return msgspec.json.decode(request.body, type=wanted)
    except msgspec.MsgspecError as exc:
        raise _Problem(400, str(exc)) from exc
