"""The routes of engines: list, add, replace, drain, remove."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType
from quart import Response

from prorld.http.deps import BackendService
from prorld.http.encode import answer, empty
from prorld.http.incoming import NoParameters, given
from prorld.http.routing import Call, NoBody, Route
from prorld.wire.ops import AddBackend, BackendInfo, BackendList, BackendSet, SetBackends

__all__ = ["EngineRoutes"]


class BackendQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The engines of one policy, or of all."""

    policy: Annotated[str, Meta(min_length=1, max_length=128)] | UnsetType = UNSET


class EngineRoutes:
    """Engines over HTTP."""

    def __init__(self, backends: BackendService) -> None:
        self._backends = backends

    def routes(self) -> list[Route[Any, Any]]:
        """The rows."""
        return [
            Route(
                method="GET", path="/v1/backends", name="list_backends", summary="The engines",
                handler=self._list, query=BackendQuery, body=NoBody, answers={200: BackendList},
            ),
            Route(
                method="POST", path="/v1/backends", name="add_backend", summary="Probe an engine and take it in",
                handler=self._add, query=NoParameters, body=AddBackend, answers={201: BackendInfo},
                errors=(409, 422, 503), is_admins=True,
            ),
            Route(
                method="PUT", path="/v1/backends", name="replace_backends",
                summary="Replace the whole set of a policy's engines at once", handler=self._replace,
                query=NoParameters, body=SetBackends, answers={200: BackendSet}, errors=(409, 503), is_admins=True,
            ),
            Route(
                method="DELETE", path="/v1/backends/<backend_id>", name="remove_backend", summary="Forget an engine",
                handler=self._remove, query=NoParameters, body=NoBody, answers={204: None},
                errors=(404, 503), is_admins=True,
            ),
            Route(
                method="POST", path="/v1/backends/<backend_id>/drain", name="drain_backend",
                summary="No new leases on an engine from now on", handler=self._drain,
                query=NoParameters, body=NoBody, answers={202: BackendInfo}, errors=(404, 503), is_admins=True,
            ),
        ]  # fmt: skip

    async def _list(self, call: Call[BackendQuery, NoBody]) -> Response:
        return answer(self._backends.list(given(call.query.policy)))

    async def _add(self, call: Call[NoParameters, AddBackend]) -> Response:
        return answer(await self._backends.add(call.body), 201)

    async def _replace(self, call: Call[NoParameters, SetBackends]) -> Response:
        return answer(await self._backends.replace(call.body))

    async def _remove(self, call: Call[NoParameters, NoBody]) -> Response:
        await self._backends.remove(call.path["backend_id"])
        return empty()

    async def _drain(self, call: Call[NoParameters, NoBody]) -> Response:
        return answer(await self._backends.drain(call.path["backend_id"]), 202)
