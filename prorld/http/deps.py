"""What the routes need from the rooms below, as the composition root fills it in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from prorld.http.auth import Auth
from prorld.http.holds import LONGEST_S
from prorld.http.routes_policies import PolicyService
from prorld.rollout.compat.nemo_gym import GymService
from prorld.rollout.compat.service import CompatService
from prorld.rollout.service import BatchService, LooksService, RolloutService
from prorld.wire.ops import (
    AddBackend,
    BackendInfo,
    BackendList,
    BackendSet,
    HandlerList,
    Ready,
    SandboxList,
    SetBackends,
    Status,
    TaskTree,
)

__all__ = ["AppDeps", "BackendService", "CompatDeps", "HttpDeps"]

BODY_BYTES_MAX = 16 << 20


class BackendService(Protocol):
    """The engines. Every method answers with wire types or raises a ``RequestError`` or a ``BackendError``."""

    def list(self, policy: str | None) -> BackendList:
        """The engines of one policy, or of all."""
        ...

    async def add(self, request: AddBackend) -> BackendInfo:
        """Probe an engine and take it in."""
        ...

    async def replace(self, wanted: SetBackends) -> BackendSet:
        """Make these the engines of a policy, all at once."""
        ...

    async def drain(self, backend_id: str) -> BackendInfo:
        """No new leases on it from now on."""
        ...

    async def remove(self, backend_id: str) -> None:
        """Forget it; its leases go elsewhere."""
        ...


class AppDeps(Protocol):
    """What any application of ours needs, whatever its routes."""

    @property
    def auth(self) -> Auth:
        """Who may come in."""
        ...

    @property
    def body_bytes_max(self) -> int:
        """The largest body."""
        ...

    @property
    def hold_s_max(self) -> float:
        """The longest that a request is held for a wish of its client."""
        ...


@dataclass(frozen=True, kw_only=True)
class CompatDeps:
    """What the routes for trainers of other servers ask."""

    service: CompatService
    gym: GymService
    auth: Auth
    body_bytes_max: int = BODY_BYTES_MAX
    hold_s_max: float = LONGEST_S


@dataclass(frozen=True, kw_only=True)
class HttpDeps:
    """Everything the routes ask."""

    service: RolloutService
    batches: BatchService
    looks: LooksService
    backends: BackendService
    policies: PolicyService
    handlers: Callable[[], HandlerList]
    sandboxes: Callable[[], SandboxList]
    ready: Callable[[], Ready]
    status: Callable[[], Status]
    metrics: Callable[[], bytes]
    tasks: Callable[[], TaskTree]
    auth: Auth
    body_bytes_max: int = BODY_BYTES_MAX
    hold_s_max: float = LONGEST_S
