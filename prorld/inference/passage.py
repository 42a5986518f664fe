"""A rollout before the gate of its policy: when it may call, when it is too old to, and whose time a wait is.

It neither opens nor closes the gate, and it makes no call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import msgspec

from prorld.domain.job import JobSpec
from prorld.errors import Stale
from prorld.inference.call_log import CallLog
from prorld.inference.contract import Capabilities, GenerationRequest
from prorld.inference.lease import Door
from prorld.inference.policy_gate import Flight, PolicyGate
from prorld.kit.allowance import Allowance

__all__ = ["Passage"]


class Passage:
    """One rollout's way through the gate. Without a gate it is always open, and nothing is ever too old."""

    def __init__(self, spec: JobSpec, gate: PolicyGate | None, log: CallLog) -> None:
        self._spec = spec
        self._gate = gate
        self._log = log
        self._allowance: Allowance | None = None

    @property
    def is_open(self) -> bool:
        """Whether a call may begin."""
        return self._gate is None or self._gate.is_open

    @property
    def held_s(self) -> float:
        """Seconds of waiting so far that were not the rollout's doing."""
        return 0.0 if self._allowance is None else self._allowance.held_s

    @property
    def door(self) -> Door | None:
        """The gate, as a call of this rollout passes it."""
        return None if self._gate is None else self._through

    @contextmanager
    def under(self, allowance: Allowance) -> Iterator[None]:
        """In the block, what is waited for because the policy is paused does not count against this."""
        self._allowance = allowance
        try:
            yield
        finally:
            self._allowance = None

    def must_be_fresh(self) -> None:
        """``Stale`` when the policy has left behind what was sampled, by more than the job allows."""
        if self._gate is None:
            return
        limit = self._gate.max_staleness if self._spec.max_staleness is msgspec.UNSET else self._spec.max_staleness
        if self._gate.is_stale(self._log.ends, limit):
            now, oldest = self._gate.version, min(self._log.ends)
            raise Stale(f"sampled from {oldest.label} on, and the policy has {now.label}; allowed are {limit} versions")

    async def wait_open(self) -> None:
        """Wait while the policy is paused. That is not the rollout's doing, so it costs nothing."""
        if self._gate is None or self._gate.is_open:
            return
        with nullcontext() if self._allowance is None else self._allowance.held():
            while not self._gate.is_open:
                await self._gate.wait_open()

    def _through(
        self, backend_id: str, found: Capabilities, request: GenerationRequest
    ) -> AbstractContextManager[Flight]:
        """The version may have changed while the call waited for its place."""
        assert self._gate is not None
        self.must_be_fresh()
        return self._gate.through(backend_id, found, request, self._allowance)
