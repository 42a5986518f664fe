"""One engine in the pool: its client, what its probe found, its bound on calls, and what is counted of it."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import trio

from prorld.domain.backends import BackendRow, BackendState
from prorld.errors import BackendError, ContextOverflow, EngineBusy
from prorld.inference.contract import Backend, Capabilities, EngineLoad
from prorld.wire.ops import AddBackend, BackendInfo

__all__ = ["PoolEntry", "Quarantine", "QuarantineCode", "is_strike", "is_unreachable"]

# ``model``: it serves another one. ``version``: it says another one. ``failed``: it did not take one, or not surely.
QuarantineCode = Literal["model", "version", "failed"]


class Quarantine(NamedTuple):
    """Why an engine may not serve, although it answers."""

    code: QuarantineCode
    message: str


class PoolEntry:
    """Only the pool and the leases it gave out touch this, each change between two awaits."""

    def __init__(self, row: BackendRow, request: AddBackend, backend: Backend, found: Capabilities) -> None:
        self.row = row
        self.request = request
        self.backend = backend
        self.found = found
        self.load = EngineLoad()
        self.limiter = trio.CapacityLimiter(request.max_inflight or math.inf)
        self.calls_total = 0
        self.errors_total = 0
        self.missed = 0
        self.draining = False
        self.quarantine: Quarantine | None = None
        self.removed = False
        self.in_check = False
        self.struck_at = -math.inf

    @property
    def backend_id(self) -> str:
        """Its name in the pool."""
        return self.row.backend_id

    @property
    def reachable_state(self) -> BackendState:
        """What it is while it answers."""
        if self.quarantine is not None:
            return BackendState.QUARANTINED
        if self.draining:
            return BackendState.DRAINING
        return BackendState.SUSPECT if self.row.strikes else BackendState.UP

    @property
    def takes_calls(self) -> bool:
        """Whether those who hold a lease on it may call it."""
        return not self.removed and self.row.state not in (BackendState.DOWN, BackendState.QUARANTINED)

    def info(self) -> BackendInfo:
        """Everything about it that is told."""
        return BackendInfo(
            backend_id=self.backend_id,
            url=self.request.url,
            kind=self.request.kind,
            policy=self.request.policy,
            state=self.row.state.value,
            model=self.found.model,
            max_context_tokens=self.found.max_context_tokens,
            leases=self.row.leases,
            inflight=self.row.inflight,
            max_inflight=self.request.max_inflight,
            weight=self.row.weight,
            version=self.found.version,
            calls_total=self.calls_total,
            errors_total=self.errors_total,
            node=self.request.node,
            details={
                **self.found.details,
                **({} if self.quarantine is None else {"quarantine": self.quarantine.message}),
                "assigned_total": self.row.assigned_total,
                "engine_running": self.load.running,
                "engine_waiting": self.load.waiting,
                "kv_usage": self.load.kv_usage,
            },
        )


def is_strike(error: BackendError) -> bool:
    """Whether an error speaks against the engine. A refusal (4xx) speaks against the request."""
    if isinstance(error, EngineBusy | ContextOverflow):
        return False
    return error.status is None or error.status >= 500


def is_unreachable(error: BackendError) -> bool:
    """Whether nobody listens there any more."""
    return error.stable_code == "engine_unreachable"
