"""Which fault a call meets. Pure but for the counts that run down."""

from __future__ import annotations

import random

from prorld.testing.scripted_engine.script import Fault, FaultKind, FaultPlace

__all__ = ["FaultPlan"]


class FaultPlan:
    """The faults in force, in the order they were asked for; a call meets the first that matches."""

    def __init__(self, faults: list[Fault]) -> None:
        self._armed: list[tuple[Fault, int | None]] = []
        # Seeded, so that rates repeat from run to run.
        self._random = random.Random(0)  # noqa: S311 - no secret
        self.met: dict[FaultKind, int] = {}
        for fault in faults:
            self.arm(fault)

    def arm(self, fault: Fault) -> None:
        """Add a fault."""
        self._armed.append((fault, fault.count))

    def clear(self) -> None:
        """No more faults."""
        self._armed.clear()

    def next_for(self, session: str = "", on: FaultPlace = "sample") -> Fault | None:
        """The fault of one call."""
        for index, (fault, left) in enumerate(self._armed):
            if fault.on != on:
                continue
            if fault.session is not None and fault.session != session:
                continue
            if fault.rate < 1 and self._random.random() >= fault.rate:
                continue
            if left == 1:
                del self._armed[index]
            elif left is not None:
                self._armed[index] = (fault, left - 1)
            self.met[fault.kind] = self.met.get(fault.kind, 0) + 1
            return fault
        return None
