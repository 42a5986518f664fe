"""The routes by which a scripted vLLM is paused and given weights, as that of 0.32 and 0.33 behaves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import trio

from prorld.testing.scripted_engine.engine import PauseMode, ScriptedEngine
from prorld.testing.scripted_engine.http11 import Reply, Request
from prorld.testing.scripted_engine.http_json import Problem, Routes, as_json, decoded
from prorld.testing.scripted_engine.script import Fault, FaultPlace, Script

__all__ = ["VllmControlRoutes"]

Meet = Callable[[FaultPlace, str], Awaitable[tuple[Fault | None, Reply | None]]]

_PAUSE_MODES: dict[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "keep"}


class _Label(msgspec.Struct, frozen=True):
    new_version: str


class _Rpc(msgspec.Struct, frozen=True):
    method: str
    kwargs: dict[str, Any] = {}


class _Adapter(msgspec.Struct, frozen=True):
    lora_name: str
    lora_path: str = ""


class VllmControlRoutes:
    """``meet`` looks for the fault of a call, and answers in its place where the fault does."""

    def __init__(self, engine: ScriptedEngine, script: Script, meet: Meet) -> None:
        self._engine = engine
        self._script = script
        self._meet = meet

    def dev(self) -> Routes:
        """What the developer's mode opens."""
        return {
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("GET", "/is_paused"): self._is_paused,
            ("GET", "/weight_info"): self._weight_info,
            ("POST", "/update_weight_version"): self._set_label,
            ("POST", "/collective_rpc"): self._collective_rpc,
            ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
        }

    def lora(self) -> Routes:
        """What a server with adapters opens."""
        return {
            ("POST", "/v1/load_lora_adapter"): self._load_adapter,
            ("POST", "/v1/unload_lora_adapter"): self._unload_adapter,
        }

    async def _pause(self, request: Request) -> Reply:
        mode = _PAUSE_MODES.get(request.query.get("mode", "abort"))
        if mode is None:
            raise Problem(400, "unknown mode")
        _, spoilt = await self._meet("pause", "")
        if spoilt is not None:
            return spoilt
        self._engine.pause(mode, clear_cache=request.query.get("clear_cache", "true") == "true")
        if mode != "keep":
            await self._engine.quiet()
        return as_json({"status": "paused"})

    async def _resume(self, request: Request) -> Reply:
        _, spoilt = await self._meet("resume", "")
        if spoilt is not None:
            return spoilt
        self._engine.resume()
        return as_json({"status": "resumed"})

    async def _is_paused(self, request: Request) -> Reply:
        return as_json({"is_paused": self._engine.is_paused})

    async def _weight_info(self, request: Request) -> Reply:
        return as_json({"weight_version": self._engine.label})

    async def _set_label(self, request: Request) -> Reply:
        label = decoded(request, _Label).new_version
        fault, spoilt = await self._meet("label", "")
        if spoilt is not None:
            return spoilt
        self._engine.set_label(f"{label}-of-another" if fault and fault.kind == "other_label" else label)
        return as_json({"success": True})

    async def _collective_rpc(self, request: Request) -> Reply:
        wish = decoded(request, _Rpc)
        if wish.method != "reload_weights":
            raise Problem(500, f"no method {wish.method}", "InternalServerError")
        _, spoilt = await self._meet("reload", "")
        if spoilt is not None:
            return spoilt
        await trio.sleep(self._script.latency.reload_s)
        self._engine.loaded.append(str(wish.kwargs["weights_path"]))
        return as_json({"results": [None]})

    async def _reset_prefix_cache(self, request: Request) -> Reply:
        fault, spoilt = await self._meet("cache", "")
        if spoilt is not None:
            return spoilt
        held = self._engine.running > 0 and request.query.get("reset_running_requests") != "true"
        done = not held and (fault is None or fault.kind != "not_done")
        if done:
            self._engine.cache.clear()
        return as_json({"success": done})

    async def _load_adapter(self, request: Request) -> Reply:
        wish = decoded(request, _Adapter)
        if not wish.lora_name or not wish.lora_path:
            raise Problem(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
        if wish.lora_name in self._engine.adapters:
            raise Problem(400, f"The lora adapter '{wish.lora_name}' has already been loaded.", "InvalidUserInput")
        fault, spoilt = await self._meet("adapter", "")
        if spoilt is not None:
            return spoilt
        await trio.sleep(self._script.latency.reload_s)
        if fault is None or fault.kind != "not_done":
            self._engine.adapters[wish.lora_name] = wish.lora_path
        return Reply(body=b"Success: added", content_type="text/plain")

    async def _unload_adapter(self, request: Request) -> Reply:
        wish = decoded(request, _Adapter)
        if self._engine.adapters.pop(wish.lora_name, None) is None:
            raise Problem(404, f"The lora adapter '{wish.lora_name}' cannot be found.", "NotFoundError")
        return Reply(body=b"Success: removed", content_type="text/plain")
