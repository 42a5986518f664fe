"""The routes of operations: health, status, metrics, stages, sandboxes, draining; and those of the engines."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from quart import Quart, Response

from prorld.errors import RequestError
from prorld.http.deps import BackendService, HttpDeps
from prorld.http.encode import answer, empty, raw
from prorld.http.incoming import NoParameters, body, caller, query
from prorld.wire.ops import (
    AddBackend,
    Condition,
    DrainAnswer,
    ErrorDetail,
    Health,
    NotReady,
    SandboxRow,
    StagesPatch,
)

__all__ = ["EngineRoutes", "OpsRoutes"]

_METRICS = "text/plain; version=0.0.4; charset=utf-8"
_RETRY_AFTER_NOT_READY_S = 1


class _Backends(msgspec.Struct, frozen=True, kw_only=True):
    policy: Annotated[str, Meta(min_length=1, max_length=128)] | None = None


class OpsRoutes:
    """What an operator asks. Changing anything needs an admin."""

    def __init__(self, deps: HttpDeps) -> None:
        self._deps = deps

    def add_to(self, app: Quart) -> None:
        """Register the routes."""
        add = app.add_url_rule
        add("/healthz", "healthz", self._healthz, methods=["GET"])
        add("/readyz", "readyz", self._readyz, methods=["GET"])
        add("/metrics", "metrics", self._metrics, methods=["GET"])
        add("/v1/status", "status", self._status, methods=["GET"])
        add("/v1/handlers", "handlers", self._handlers, methods=["GET"])
        add("/v1/stages", "get_stages", self._stages, methods=["GET"])
        add("/v1/stages", "patch_stages", self._set_stages, methods=["PATCH"])
        add("/v1/sandboxes", "sandboxes", self._sandboxes, methods=["GET"])
        add("/v1/drain", "drain", self._drain, methods=["POST"])

    async def _healthz(self) -> Response:
        return answer(Health())

    async def _readyz(self) -> Response:
        query(NoParameters)
        found = self._deps.ready()
        if found.ready:
            return answer(found)
        error = ErrorDetail(code="not_ready", message=_words(found.missing), retryable=True)
        headers = {"Retry-After": str(_RETRY_AFTER_NOT_READY_S)}
        return answer(NotReady(ready=False, missing=found.missing, error=error), 503, headers=headers)

    async def _metrics(self) -> Response:
        return raw(self._deps.metrics(), _METRICS)

    async def _status(self) -> Response:
        query(NoParameters)
        return answer(self._deps.status())

    async def _handlers(self) -> Response:
        query(NoParameters)
        return answer(self._deps.handlers())

    async def _stages(self) -> Response:
        query(NoParameters)
        return answer(self._deps.service.stages())

    async def _set_stages(self) -> Response:
        query(NoParameters)
        caller().must_be_admin()
        return answer(self._deps.service.set_stages(await body(StagesPatch)))

    async def _sandboxes(self) -> Response:
        query(NoParameters)
        found = self._deps.sandboxes()
        tenant = caller().sees
        if tenant is not None:
            mine = [row for row in found.items if self._is_of(row, tenant)]
            found = msgspec.structs.replace(found, items=mine)
        return answer(found)

    def _is_of(self, row: SandboxRow, tenant: str) -> bool:
        try:
            self._deps.service.get(row.job_id, tenant)
        except RequestError:
            return False
        return True

    async def _drain(self) -> Response:
        query(NoParameters)
        caller().must_be_admin()
        self._deps.service.drain()
        return answer(DrainAnswer(draining=self._deps.service.draining, jobs=self._deps.service.counts()), 202)


class EngineRoutes:
    """Engines over HTTP."""

    def __init__(self, backends: BackendService) -> None:
        self._backends = backends

    def add_to(self, app: Quart) -> None:
        """Register the routes."""
        add = app.add_url_rule
        add("/v1/backends", "list_backends", self._list, methods=["GET"])
        add("/v1/backends", "add_backend", self._add, methods=["POST"])
        add("/v1/backends/<backend_id>", "remove_backend", self._remove, methods=["DELETE"])
        add("/v1/backends/<backend_id>/drain", "drain_backend", self._drain, methods=["POST"])

    async def _list(self) -> Response:
        return answer(self._backends.list(query(_Backends).policy))

    async def _add(self) -> Response:
        query(NoParameters)
        caller().must_be_admin()
        return answer(await self._backends.add(await body(AddBackend)), 201)

    async def _remove(self, backend_id: str) -> Response:
        query(NoParameters)
        caller().must_be_admin()
        await self._backends.remove(backend_id)
        return empty()

    async def _drain(self, backend_id: str) -> Response:
        query(NoParameters)
        caller().must_be_admin()
        return answer(await self._backends.drain(backend_id), 202)


def _words(missing: list[Condition]) -> str:
    return "; ".join(condition.message for condition in missing) or "the daemon is not ready"
