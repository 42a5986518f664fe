"""The routes of policies: look, make, pause, resume, update.

Policies are shared by all tenants. Everybody sees them, trainers change their weights; making one needs an admin.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from quart import Response

from prorld.http.encode import answer
from prorld.http.holds import Holds
from prorld.http.incoming import NoParameters
from prorld.http.routes_jobs import Wait
from prorld.http.routing import Call, NoBody, Route
from prorld.wire.policies import (
    PausedPolicy,
    PausePolicy,
    PolicyInfo,
    PolicyList,
    PolicyUpdate,
    PolicyUpdateList,
    PutPolicy,
    ResumedPolicy,
    ResumePolicy,
    UpdatePolicy,
)

__all__ = ["PolicyRoutes", "PolicyService"]

_ONE = "/v1/policies/<policy>"


class PolicyService(Protocol):
    """The policies; ``prorld.inference.policy_control.PolicyControl`` is one.

    Every method answers with wire types or raises a ``RequestError``. ``tenant`` is the one to whom the ids of its
    pauses are shown; ``None`` for all.
    """

    def list(self, tenant: str | None) -> PolicyList:
        """All of them."""
        ...

    def get(self, name: str, tenant: str | None) -> PolicyInfo:
        """One."""
        ...

    async def put(self, name: str, request: PutPolicy, tenant: str | None) -> tuple[PolicyInfo, bool]:
        """Make or change one; whether it is new."""
        ...

    async def pause(self, name: str, request: PausePolicy, tenant: str) -> PausedPolicy:
        """Close its gate and pause its engines; goes on when the caller leaves."""
        ...

    async def resume(self, name: str, request: ResumePolicy) -> ResumedPolicy:
        """Label its engines and let them go on; goes on when the caller leaves."""
        ...

    async def update(self, name: str, request: UpdatePolicy, tenant: str) -> PolicyUpdate:
        """Begin to change its weights, or find where the same body did."""
        ...

    def updates(self, name: str) -> PolicyUpdateList:
        """Those that are remembered, newest first."""
        ...

    def get_update(self, name: str, update_id: str) -> PolicyUpdate:
        """One of them now."""
        ...

    async def wait_update(self, name: str, update_id: str) -> PolicyUpdate:
        """One of them once it has ended. The caller's scope bounds the wait."""
        ...


class PolicyRoutes:
    """Policies over HTTP."""

    def __init__(self, policies: PolicyService, holds: Holds) -> None:
        self._policies = policies
        self._holds = holds

    def routes(self) -> list[Route[Any, Any]]:
        """The rows."""
        return [
            Route(
                method="GET", path="/v1/policies", name="list_policies", summary="The policies and their versions",
                handler=self._list, query=NoParameters, body=NoBody, answers={200: PolicyList},
            ),
            Route(
                method="GET", path=_ONE, name="get_policy", summary="One policy", handler=self._get,
                query=NoParameters, body=NoBody, answers={200: PolicyInfo}, errors=(404,),
            ),
            Route(
                method="PUT", path=_ONE, name="put_policy", summary="Make or change a policy", handler=self._put,
                query=NoParameters, body=PutPolicy, answers={201: PolicyInfo, 200: PolicyInfo},
                errors=(409, 422, 429, 503), is_admins=True,
            ),
            Route(
                method="POST", path=f"{_ONE}/pause", name="pause_policy",
                summary="Let no generation begin, and pause the engines", handler=self._pause,
                query=NoParameters, body=PausePolicy, answers={200: PausedPolicy}, errors=(404, 409, 422, 503),
            ),
            Route(
                method="POST", path=f"{_ONE}/resume", name="resume_policy",
                summary="Name the weights, and let everything go on", handler=self._resume,
                query=NoParameters, body=ResumePolicy, answers={200: ResumedPolicy}, errors=(404, 409, 503),
            ),
            Route(
                method="POST", path=f"{_ONE}/updates", name="update_policy",
                summary="Pause, load weights, resume", handler=self._update,
                query=NoParameters, body=UpdatePolicy, answers={202: PolicyUpdate}, errors=(404, 409, 422, 503),
            ),
            Route(
                method="GET", path=f"{_ONE}/updates", name="list_updates", summary="A policy's updates, newest first",
                handler=self._updates, query=NoParameters, body=NoBody, answers={200: PolicyUpdateList}, errors=(404,),
            ),
            Route(
                method="GET", path=f"{_ONE}/updates/<update_id>", name="get_update", summary="One update",
                handler=self._get_update, query=Wait, body=NoBody, answers={200: PolicyUpdate}, errors=(404, 503),
            ),
        ]  # fmt: skip

    async def _list(self, call: Call[NoParameters, NoBody]) -> Response:
        return answer(self._policies.list(call.tenant))

    async def _get(self, call: Call[NoParameters, NoBody]) -> Response:
        return answer(self._policies.get(call.path["policy"], call.tenant))

    async def _put(self, call: Call[NoParameters, PutPolicy]) -> Response:
        info, is_new = await self._policies.put(call.path["policy"], call.body, call.tenant)
        return answer(info, 201 if is_new else 200)

    async def _pause(self, call: Call[NoParameters, PausePolicy]) -> Response:
        return answer(await self._policies.pause(call.path["policy"], call.body, call.caller.tenant))

    async def _resume(self, call: Call[NoParameters, ResumePolicy]) -> Response:
        return answer(await self._policies.resume(call.path["policy"], call.body))

    async def _update(self, call: Call[NoParameters, UpdatePolicy]) -> Response:
        return answer(await self._policies.update(call.path["policy"], call.body, call.caller.tenant), 202)

    async def _updates(self, call: Call[NoParameters, NoBody]) -> Response:
        return answer(self._policies.updates(call.path["policy"]))

    async def _get_update(self, call: Call[Wait, NoBody]) -> Response:
        policy, update_id, wait_s = call.path["policy"], call.path["update_id"], call.query.wait_s
        found = self._policies.get_update(policy, update_id)
        if wait_s and found.state == "running":
            ended = await self._holds.hold(wait_s, partial(self._policies.wait_update, policy, update_id))
            found = ended or self._policies.get_update(policy, update_id)
        return answer(found)
