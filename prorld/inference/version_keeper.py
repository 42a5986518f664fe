"""What the parts of the pool ask of whoever knows the policies and their versions."""

from __future__ import annotations

from typing import Protocol

from prorld.domain.versions import PolicyVersion
from prorld.inference.contract import Capabilities, WeightRef

__all__ = ["VersionKeeper"]


class VersionKeeper(Protocol):
    """The keeper of the policies; ``prorld.inference.policy_book.PolicyBook`` is one."""

    def must_know(self, policy: str) -> None:
        """``Impossible`` for a policy that there is not."""
        ...

    def must_be_free(self, policy: str, pause_id: str | None = None) -> None:
        """``Conflict`` while somebody changes the policy, or holds it paused under another id."""
        ...

    def is_paused(self, policy: str) -> bool:
        """Whether its engines are meant to stand still now: what they do then is no fault and no pressure."""
        ...

    def objection(self, policy: str, found: Capabilities) -> str | None:
        """Why an engine of which a probe found this may not serve the policy now; ``None`` where it may."""
        ...

    def weights(self, policy: str) -> WeightRef | None:
        """The weights in force, for an engine that lost them; ``None`` for those that it begins with."""
        ...

    def declared(self, policy: str, version: int) -> PolicyVersion:
        """What the policy would have if its engines had this version; ``Conflict`` where that can't be."""
        ...

    def has_now(self, policy: str, version: PolicyVersion) -> None:
        """Its engines have this version."""
        ...

    async def keep(self, policy: str) -> None:
        """Write down what it has."""
        ...
