"""JSON in and out of a scripted server's routes, and the one way in which a route refuses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec

from prorld.testing.scripted_engine.http11 import Reply, Request

__all__ = ["Problem", "Route", "Routes", "as_json", "decoded"]

T = TypeVar("T")
Route = Callable[[Request], Awaitable[Reply]]
Routes = Mapping[tuple[str, str], Route]


def as_json(value: Any, status: int = 200) -> Reply:
    """A reply with this body."""
    return Reply(status=status, body=msgspec.json.encode(value))


class Problem(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.reply = as_json({"error": {"message": message, "type": kind, "code": status}}, status)


def decoded(request: Request, wanted: type[T]) -> T:
    """The body of a request."""
    try:
        return msgspec.json.decode(request.body or b"{}", type=wanted)
    except msgspec.MsgspecError as exc:
        raise Problem(400, str(exc)) from exc
