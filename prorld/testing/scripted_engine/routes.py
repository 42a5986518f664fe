"""A scripted server: the routes of the API that its script names, and ``/scripted/...`` to direct and observe it."""

from __future__ import annotations

from typing import Protocol

import msgspec

from prorld.testing.scripted_engine.desk import Desk
from prorld.testing.scripted_engine.http11 import Reply, Request
from prorld.testing.scripted_engine.http_json import Problem, Route, Routes, as_json, decoded
from prorld.testing.scripted_engine.openai_routes import OpenAIRoutes
from prorld.testing.scripted_engine.prorl_routes import ProrlRoutes
from prorld.testing.scripted_engine.script import Fault, Flavour, Script
from prorld.testing.scripted_engine.sglang_routes import SglangRoutes
from prorld.testing.scripted_engine.vllm_routes import VllmRoutes

__all__ = ["ScriptedServer"]


class _Api(Protocol):
    def find(self, method: str, path: str) -> Route | None: ...


_APIS: dict[Flavour, type[VllmRoutes | SglangRoutes | OpenAIRoutes | ProrlRoutes]] = {
    "vllm": VllmRoutes,
    "sglang": SglangRoutes,
    "openai": OpenAIRoutes,
    "prorl": ProrlRoutes,
}


class ScriptedServer:
    """Answers requests for one engine. ``answer`` goes with ``serve_connection``."""

    def __init__(self, script: Script) -> None:
        if script.flavour == "sglang":
            # It has no other way.
            script = msgspec.structs.replace(script, rejects_while_paused=False)
        self.script = script
        desk = Desk(script)
        self.engine = desk.engine
        self.faults = desk.faults
        self._api: _Api = _APIS[script.flavour](desk)
        self._own: Routes = {
            ("GET", "/scripted/state"): self._state,
            ("POST", "/scripted/faults"): self._arm,
            ("DELETE", "/scripted/faults"): self._disarm,
        }

    async def answer(self, request: Request) -> Reply:
        """Any request."""
        try:
            route = self._own.get((request.method, request.path)) or self._api.find(request.method, request.path)
            return await (route or _nothing)(request)
        except Problem as problem:
            return problem.reply

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
                "sampled_total": engine.sampled_total,
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


async def _nothing(request: Request) -> Reply:
    raise Problem(404, f"{request.path} not found", "NotFoundError")
