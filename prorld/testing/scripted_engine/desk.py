"""Where every API of a scripted server takes its calls: faults first, then the engine, then the reply."""

from __future__ import annotations

import os
from collections.abc import Callable

import trio

from prorld.testing.scripted_engine.engine import Call, Paused, Refused, Sampled, ScriptedEngine
from prorld.testing.scripted_engine.faults import FaultPlan
from prorld.testing.scripted_engine.http11 import HangUp, Reply
from prorld.testing.scripted_engine.http_json import Problem, as_json
from prorld.testing.scripted_engine.script import Fault, FaultKind, FaultPlace, Script

__all__ = ["Desk", "Format"]

Format = Callable[[Sampled, FaultKind | None], bytes]


class Desk:
    """One engine, the faults in force, and what is counted of both."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.engine = ScriptedEngine(script)
        self.faults = FaultPlan(script.faults)
        self._numbers = 0
        self._is_dead = False

    def number(self) -> int:
        """Another one each time."""
        self._numbers += 1
        return self._numbers

    async def sample(self, call: Call, formatted: Format, *, seeded: bool, place: FaultPlace = "sample") -> Reply:
        """The answer to a sampling call."""
        if not call.prompt or call.max_tokens < 1:
            raise Problem(400, "empty prompt, or max_tokens below 1")
        self._is_dead |= self.script.cpu and (seeded or (place == "score" and self.script.lora))
        if self._is_dead:
            raise Problem(500, "EngineCore encountered an issue. See stack trace for the root cause.", "ServerError")
        fault, spoilt = await self.met(place, call.session)
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

    async def met(self, place: FaultPlace, session: str) -> tuple[Fault | None, Reply | None]:
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
