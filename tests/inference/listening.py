"""A scripted server that remembers what it was asked."""

from __future__ import annotations

from typing import Any

import msgspec

from prorld.testing.scripted_engine.http11 import Reply, Request
from prorld.testing.scripted_engine.routes import ScriptedServer
from prorld.testing.scripted_engine.script import Script


class Listening(ScriptedServer):
    """A scripted server whose requests can be looked at."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.asked: list[Request] = []

    async def answer(self, request: Request) -> Reply:
        self.asked.append(request)
        return await super().answer(request)

    def last(self, path: str | None = None) -> Request:
        """The last request, or the last one to this path."""
        return next(request for request in reversed(self.asked) if path in (None, request.path))

    def last_body(self, path: str | None = None) -> dict[str, Any]:
        """Its body."""
        body: dict[str, Any] = msgspec.json.decode(self.last(path).body)
        return body
