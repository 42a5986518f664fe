"""One row per route: what it takes, what it answers, who may call it.

The rows are what requests are checked against, and what ``/openapi.json`` is made of. The document can't say anything
else than the server does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar

import msgspec
from quart import Quart, Response
from werkzeug.routing import BaseConverter

from prorld.http.auth import Caller, Role
from prorld.http.incoming import body, caller, query
from prorld.wire.jobs import COLLECTION_VERBS

__all__ = ["Call", "NoBody", "Route", "add_routes"]

QueryT = TypeVar("QueryT", bound=msgspec.Struct)
BodyT = TypeVar("BodyT", bound=msgspec.Struct)

# Who calls a route that asks for no token.
NOBODY: Final = Caller(tenant="", role=Role.READ)

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]


class NoBody(msgspec.Struct, frozen=True):
    """The body of a call that takes none."""


@dataclass(frozen=True, kw_only=True)
class Call(Generic[QueryT, BodyT]):
    """One request, decoded. ``tenant`` is the one whose resources the caller sees; ``None`` for all."""

    query: QueryT
    body: BodyT
    path: Mapping[str, Any]
    caller: Caller

    @property
    def tenant(self) -> str | None:
        """What the services below call the caller."""
        return self.caller.sees


@dataclass(frozen=True, kw_only=True)
class Route(Generic[QueryT, BodyT]):
    """One route. ``answers`` are the types of its successes by status; ``errors`` the statuses beyond the common ones.

    ``packed`` is what MessagePack carries where it differs from JSON; ``streams`` what server-sent events carry;
    ``otherwise`` what a parameter may ask for in place of the answer.
    """

    method: Method
    path: str
    name: str
    summary: str
    handler: Callable[[Call[QueryT, BodyT]], Awaitable[Response]]
    query: type[QueryT]
    body: type[BodyT]
    answers: Mapping[int, type[msgspec.Struct] | str | None]
    errors: Sequence[int] = ()
    optional_body: bool = False
    is_admins: bool = False
    is_public: bool = False
    packed: type[msgspec.Struct] | None = None
    streams: type[msgspec.Struct] | None = None
    otherwise: type[msgspec.Struct] | None = None

    async def serve(self, **path: Any) -> Response:
        """Check who calls, decode, then ask the handler."""
        who = NOBODY if self.is_public else caller()
        if self.is_admins:
            who.must_be_admin()
        asked = query(self.query)
        sent = self.body() if self.body is NoBody else await body(self.body, optional=self.optional_body)
        return await self.handler(Call(query=asked, body=sent, path=path, caller=who))


class _Segment(BaseConverter):
    """One segment of a path that is no verb on the collection: ``/v1/jobs/cancel`` is no job."""

    regex = rf"(?!(?:{'|'.join(COLLECTION_VERBS)})(?:/|$))[^/]+"
    part_isolating = True


def add_routes(app: Quart, routes: Sequence[Route[Any, Any]]) -> None:
    """Register the rows."""
    app.url_map.converters["default"] = _Segment
    for row in routes:
        app.add_url_rule(row.path, row.name, row.serve, methods=[row.method])
