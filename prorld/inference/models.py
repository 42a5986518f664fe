"""Where a job gets its policy from: a leased engine, the policy's renderer, and a session over both.

It decides nothing: the pool says which engine, the session how to talk to it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from prorld.domain.job import JobSpec
from prorld.inference.contract import Turn
from prorld.inference.policies import Policies
from prorld.inference.policy_gate import PolicyGate
from prorld.inference.pool import BackendPool
from prorld.inference.session import ModelSession
from prorld.kit.lanes import Lane

__all__ = ["PooledModels"]


class PooledModels:
    """Sessions on engines of the pool."""

    def __init__(
        self,
        pool: BackendPool,
        policies: Policies,
        lane: Lane,
        gate: Callable[[str], PolicyGate | None] = lambda _: None,
    ) -> None:
        """``gate`` finds that of a policy; without one, policies never change."""
        self._pool = pool
        self._policies = policies
        self._lane = lane
        self._gate = gate

    def knows(self, policy: str) -> bool:
        """Whether there is such a policy, with an engine or without."""
        return policy in self._policies.names()

    @asynccontextmanager
    async def open(
        self, spec: JobSpec, attempt: int, on_turn: Callable[[int, Turn], None]
    ) -> AsyncIterator[ModelSession]:
        """Lease an engine for as long as the block lasts. Waits for one; the caller's scope bounds that."""
        # Group ids are unique per tenant only, and tenants share engines.
        group = None if spec.group_id is None else f"{spec.tenant}/{spec.group_id}"
        async with self._pool.lease(spec.policy, group_id=group) as lease:
            renderer = await self._policies.renderer(
                spec.policy, spec.sampling.chat_template_kwargs, model_path=lease.capabilities.model_path
            )
            yield ModelSession(
                spec,
                attempt,
                renderer=renderer,
                lease=lease,
                lane=self._lane,
                on_turn=on_turn,
                gate=self._gate(spec.policy),
            )
