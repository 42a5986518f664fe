"""The daemon itself: its state, its engines, its stages."""

from __future__ import annotations

from types import NoneType

from prorld.client.caller import Calls, part, query
from prorld.client.flows import Flow, both
from prorld.wire.ops import (
    AddBackend,
    BackendInfo,
    BackendList,
    BackendSet,
    DrainAnswer,
    HandlerList,
    Ready,
    SandboxList,
    SetBackends,
    Stages,
    StagesPatch,
    Status,
    TaskTree,
)

__all__ = ["OpsCalls"]


class OpsCalls(Calls):
    """The part of the client that is about the daemon."""

    @both
    def status(self) -> Flow[Status]:
        """What the daemon does now."""
        return self._call("GET", "/v1/status", Status)

    @both
    def ready(self) -> Flow[Ready]:
        """Whether the daemon can take work, and what is missing."""
        return self._call("GET", "/readyz", Ready, also=(503,))

    @both
    def handlers(self) -> Flow[HandlerList]:
        """The kinds of task that are installed."""
        return self._call("GET", "/v1/handlers", HandlerList)

    @both
    def backends(self, policy: str | None = None) -> Flow[BackendList]:
        """The engines of one policy, or of all."""
        return self._call("GET", f"/v1/backends{query(policy=policy)}", BackendList)

    @both
    def add_backend(self, request: AddBackend) -> Flow[BackendInfo]:
        """Let the daemon probe an engine and take it in. After a lost answer the engine that it took is found."""

        def taken() -> Flow[list[BackendInfo]]:
            path = f"/v1/backends{query(policy=request.policy)}"
            return [
                one for one in (yield from self._call("GET", path, BackendList)).items if _is_as_asked(one, request)
            ]

        refusals = frozenset({"backend_exists"})
        return self._caller.call_surely("POST", "/v1/backends", BackendInfo, refusals, taken, body=request)

    @both
    def replace_backends(self, wanted: SetBackends) -> Flow[BackendSet]:
        """Make these the engines of a policy, all at once; ``generation`` is that of the list they were chosen by."""
        return self._call("PUT", "/v1/backends", BackendSet, body=wanted)

    @both
    def remove_backend(self, backend_id: str) -> Flow[None]:
        """Take an engine out; what runs on it goes on elsewhere. After a lost answer one that is gone was taken out."""

        def gone() -> Flow[list[None]]:
            yield from ()
            return [None]

        path, refusals = f"/v1/backends/{part(backend_id)}", frozenset({"not_found"})
        return self._caller.call_surely("DELETE", path, NoneType, refusals, gone)

    @both
    def drain_backend(self, backend_id: str) -> Flow[BackendInfo]:
        """No new leases on an engine from now on."""
        return self._call("POST", f"/v1/backends/{part(backend_id)}/drain", BackendInfo)

    @both
    def sandboxes(self) -> Flow[SandboxList]:
        """The sandboxes that live."""
        return self._call("GET", "/v1/sandboxes", SandboxList)

    @both
    def drain(self) -> Flow[DrainAnswer]:
        """Take no new jobs from now on; those that are accepted go on."""
        return self._call("POST", "/v1/drain", DrainAnswer)

    @both
    def tasks(self) -> Flow[TaskTree]:
        """The tree of the daemon's tasks."""
        return self._call("GET", "/v1/debug/tasks", TaskTree)

    @both
    def stages(self) -> Flow[Stages]:
        """The three gates."""
        return self._call("GET", "/v1/stages", Stages)

    @both
    def set_stages(self, patch: StagesPatch) -> Flow[Stages]:
        """Resize gates; 0 pauses one."""
        return self._call("PATCH", "/v1/stages", Stages, body=patch)


def _is_as_asked(one: BackendInfo, request: AddBackend) -> bool:
    """Whether an engine is what a request makes: one that somebody added in another way is not it."""
    same = (one.url, one.kind, one.policy, one.max_inflight, one.weight, one.node)
    asked = (request.url, request.kind, request.policy, request.max_inflight, request.weight, request.node)
    return same == asked and request.model in (None, one.model)
