"""The routes of operations: health, status, metrics, stages, sandboxes, draining, the tree of tasks."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from quart import Response

from prorld.http.deps import HttpDeps
from prorld.http.encode import answer, raw
from prorld.http.incoming import AnyParameters, NoParameters
from prorld.http.routing import Call, NoBody, Route
from prorld.wire.ops import (
    Condition,
    DrainAnswer,
    ErrorDetail,
    HandlerList,
    Health,
    NotReady,
    Ready,
    SandboxList,
    SandboxRow,
    Stages,
    StagesPatch,
    Status,
    TaskTree,
)

__all__ = ["OpsRoutes"]

Plain = Call[NoParameters, NoBody]

_METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"
_RETRY_AFTER_NOT_READY_S: Final = 1


class OpsRoutes:
    """What an operator asks. Changing anything needs an admin."""

    def __init__(self, deps: HttpDeps) -> None:
        self._deps = deps

    def routes(self) -> list[Route[Any, Any]]:
        """The rows."""
        return [
            Route(
                method="GET", path="/healthz", name="healthz", summary="Whether the process answers",
                handler=self._healthz, query=AnyParameters, body=NoBody, answers={200: Health}, is_public=True,
            ),
            Route(
                method="GET", path="/readyz", name="readyz", summary="Whether the daemon can take work",
                handler=self._readyz, query=NoParameters, body=NoBody, answers={200: Ready, 503: NotReady},
            ),
            Route(
                method="GET", path="/metrics", name="metrics", summary="Counters for Prometheus",
                handler=self._metrics, query=AnyParameters, body=NoBody, answers={200: "text/plain"},
            ),
            Route(
                method="GET", path="/v1/status", name="status", summary="What the daemon does now",
                handler=self._status, query=NoParameters, body=NoBody, answers={200: Status},
            ),
            Route(
                method="GET", path="/v1/handlers", name="handlers", summary="The kinds of task that are installed",
                handler=self._handlers, query=NoParameters, body=NoBody, answers={200: HandlerList},
            ),
            Route(
                method="GET", path="/v1/stages", name="get_stages", summary="How full the three stages are",
                handler=self._stages, query=NoParameters, body=NoBody, answers={200: Stages},
            ),
            Route(
                method="PATCH", path="/v1/stages", name="patch_stages", summary="Resize stages; 0 pauses one",
                handler=self._set_stages, query=NoParameters, body=StagesPatch, answers={200: Stages}, is_admins=True,
            ),
            Route(
                method="GET", path="/v1/sandboxes", name="sandboxes", summary="The sandboxes that live",
                handler=self._sandboxes, query=NoParameters, body=NoBody, answers={200: SandboxList},
            ),
            Route(
                method="POST", path="/v1/drain", name="drain", summary="Take no new jobs from now on",
                handler=self._drain, query=NoParameters, body=NoBody, answers={202: DrainAnswer}, is_admins=True,
            ),
            Route(
                method="GET", path="/v1/debug/tasks", name="debug_tasks",
                summary="The tree of tasks with their names and ages", handler=self._tasks,
                query=NoParameters, body=NoBody, answers={200: TaskTree}, is_admins=True,
            ),
        ]  # fmt: skip

    async def _healthz(self, call: Call[AnyParameters, NoBody]) -> Response:
        return answer(Health())

    async def _readyz(self, call: Plain) -> Response:
        found = self._deps.ready()
        if found.ready:
            return answer(found)
        error = ErrorDetail(code="not_ready", message=_words(found.missing), retryable=True)
        headers = {"Retry-After": str(_RETRY_AFTER_NOT_READY_S)}
        return answer(NotReady(ready=False, missing=found.missing, error=error), 503, headers=headers)

    async def _metrics(self, call: Call[AnyParameters, NoBody]) -> Response:
        return raw(self._deps.metrics(), _METRICS)

    async def _status(self, call: Plain) -> Response:
        return answer(self._deps.status())

    async def _handlers(self, call: Plain) -> Response:
        return answer(self._deps.handlers())

    async def _stages(self, call: Plain) -> Response:
        return answer(self._deps.service.stages())

    async def _set_stages(self, call: Call[NoParameters, StagesPatch]) -> Response:
        return answer(self._deps.service.set_stages(call.body))

    async def _sandboxes(self, call: Plain) -> Response:
        found = self._deps.sandboxes()
        tenant = call.tenant
        if tenant is not None:
            mine = [row for row in found.items if self._is_of(row, tenant)]
            found = msgspec.structs.replace(found, items=mine)
        return answer(found)

    def _is_of(self, row: SandboxRow, tenant: str) -> bool:
        # Not by the job's id: another tenant may have a job of the same one.
        return self._deps.service.owns_sandbox(row.sandbox_id, tenant)

    async def _tasks(self, call: Plain) -> Response:
        return answer(self._deps.tasks())

    async def _drain(self, call: Plain) -> Response:
        self._deps.service.drain()
        return answer(DrainAnswer(draining=self._deps.service.draining, jobs=self._deps.service.counts()), 202)


def _words(missing: list[Condition]) -> str:
    return "; ".join(condition.message for condition in missing) or "the daemon is not ready"
