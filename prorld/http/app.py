"""The application: every route, one door for who may pass, one shape for what goes wrong.

All routes are there before the first request. It holds no jobs and starts no tasks.
"""

from __future__ import annotations

import logging
import secrets
from typing import Final, cast
from urllib.parse import urlsplit

import structlog
import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable
from quart import Request, Response, g, request
from quart.ctx import RequestContext
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection
from structlog.typing import FilteringBoundLogger

from prorld.domain.ids import is_client_id
from prorld.http.auth import Credentials
from prorld.http.deps import AppDeps, HttpDeps
from prorld.http.encode import Squeezer
from prorld.http.errors import answer_error
from prorld.http.holds import Holds
from prorld.http.openapi import Document
from prorld.http.routes_batches import BatchRoutes
from prorld.http.routes_engines import EngineRoutes
from prorld.http.routes_events import EventRoutes
from prorld.http.routes_jobs import JobRoutes
from prorld.http.routes_looks import LookRoutes
from prorld.http.routes_ops import OpsRoutes
from prorld.http.routes_policies import PolicyRoutes
from prorld.http.routing import add_routes

__all__ = ["App", "create_app"]

log: FilteringBoundLogger = structlog.get_logger("prorld.http")

REQUEST_ID: Final = "X-Request-Id"
BODY_S: Final = 60.0
_PUBLIC: Final = frozenset({"/healthz"})


class _Request(TrioASGIHTTPConnection):
    """Makes a path of whatever stands in the request line, so that the router can refuse it."""

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        request = self._create_request_from_scope(send)
        # As in the class above, but the request is answered in this task: one task less for each.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.handle_messages, nursery, request, receive)
            await self.handle_request(nursery, request, send)

    def _create_request_from_scope(self, send: ASGISendCallable) -> Request:
        path = self.scope["path"]
        if not path.startswith("/"):
            self.scope["path"] = "/" + _path_of(path).lstrip("/")
        return super()._create_request_from_scope(send)


class App(QuartTrio):
    """The Quart application of the daemon."""

    def __init__(self, deps: AppDeps) -> None:
        super().__init__("prorld", static_folder=None)
        self.asgi_http_class = _Request
        self.deps = deps
        self.holds = Holds(longest_s=deps.hold_s_max)
        self._squeezer = Squeezer()
        self.config["MAX_CONTENT_LENGTH"] = deps.body_bytes_max
        self.config["BODY_TIMEOUT"] = BODY_S
        self.config["RESPONSE_TIMEOUT"] = None
        # A redirect would be an answer in HTML to a path that is not one of ours.
        self.url_map.merge_slashes = False
        self.url_map.strict_slashes = True

    async def full_dispatch_request(self, request_context: RequestContext | None = None) -> Response:
        """One door before the route and one after it; of Quart's hooks, sessions and signals there is none here."""
        try:
            await self._admit()
            answer = cast("Response", await self.dispatch_request(request_context))
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - whatever it is, it gets an answer
            answer = await self.handle_user_exception(error)
        return await self._depart(answer)

    async def handle_user_exception(self, error: Exception | BaseExceptionGroup[BaseException]) -> Response:
        """An answer for whatever a route raised."""
        if isinstance(error, BaseExceptionGroup) and error.subgroup(trio.Cancelled) is not None:
            raise error
        return self.refuse(error)

    async def handle_exception(self, error: Exception) -> Response:
        """An answer for what went wrong outside the routes."""
        return self.refuse(error)

    def refuse(self, error: BaseException) -> Response:
        """The answer to a request that ended so."""
        return answer_error(error, g.get("request_id", "unknown"))

    async def _admit(self) -> None:
        """Before anything else is known of the request: who sends it."""
        named = request.headers.get(REQUEST_ID, "")
        g.request_id = named if is_client_id(named) else secrets.token_hex(8)
        g.since = trio.current_time()
        if request.path in _PUBLIC:
            return
        credentials = Credentials(
            authorization=request.headers.get("Authorization"),
            host=request.headers.get("Host"),
            origin=request.headers.get("Origin"),
        )
        g.caller = self.deps.auth.who(credentials)
        g.caller.may(request.method)

    async def _depart(self, response: Response) -> Response:
        response.headers[REQUEST_ID] = g.request_id
        await self._squeezer.squeeze(response)
        # Every look at the request goes through a proxy; none is worth it for a line that nobody wants.
        if not log.is_enabled_for(logging.DEBUG):
            return response
        log.debug(
            "request.answered",
            method=request.method,
            path=request.path,
            status=response.status_code,
            seconds=round(trio.current_time() - g.since, 6),
            request_id=g.request_id,
        )
        return response


def create_app(deps: HttpDeps) -> App:
    """The application with all its routes."""
    app = App(deps)
    described = Document()
    routes = [
        *JobRoutes(deps.service, deps.batches, app.holds).routes(),
        *BatchRoutes(deps.batches, app.holds).routes(),
        *EventRoutes(deps.service, app.holds).routes(),
        *LookRoutes(deps.looks, app.holds).routes(),
        *EngineRoutes(deps.backends).routes(),
        *PolicyRoutes(deps.policies, app.holds).routes(),
        *OpsRoutes(deps).routes(),
        described.route(),
    ]
    described.describe(routes)
    add_routes(app, routes)
    return app


def _path_of(target: str) -> str:
    try:
        return urlsplit(target).path
    except ValueError:
        return target
