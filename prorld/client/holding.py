"""A policy that is held paused while its trainer moves the weights: what is said at the beginning and at the end.

The gate opens only on a version that somebody knows: the new one after a body that came to its end, the old one where
the trainer said that nothing was changed, or where the body never began. After anything else it stays closed.
"""

from __future__ import annotations

import time

from prorld.client.caller import AWAY_S, Caller, part
from prorld.client.errors import ClientError, UpdateFailed
from prorld.client.flows import Flow, Nap
from prorld.client.policies import ENGINES_S, new_pause_id
from prorld.domain.policy import BackendResult, Mode
from prorld.wire.policies import PausedPolicy, PausePolicy, PolicyInfo, ResumedPolicy, ResumePolicy

__all__ = ["UNDO_S", "PolicyHold"]

# How long it may take to give back a policy whose weights were not touched.
UNDO_S = 30.0
# A pause or a resume whose answer was lost may still be in progress.
_BUSY_S = 0.5
BUSY = "policy_busy"


class PolicyHold:
    """A paused policy. ``paused`` is what became of each engine, ``resumed`` the daemon's answer at the end."""

    def __init__(
        self,
        caller: Caller,
        policy: str,
        version: int,
        *,
        mode: Mode,
        timeout_s: float,
        rollback: bool,
        pause_id: str | None,
        away_s: float = AWAY_S,
    ) -> None:
        self.policy = policy
        self.version = version
        self.pause_id = pause_id or new_pause_id()
        self.paused: tuple[BackendResult, ...] = ()
        self.resumed: ResumedPolicy | None = None
        self.is_unchanged = False
        # Under a name of the caller's it may be the pause of an earlier life, which moved some weights perhaps.
        self._is_ours = pause_id is None
        self._caller = caller
        self._path = f"/v1/policies/{part(policy)}"
        self._mode: Mode = mode
        self._timeout_s = timeout_s
        self._rollback = rollback
        self._away_s = away_s

    def unchanged(self) -> None:
        """Every engine has the weights that it had: at its end the policy goes on with the version it had."""
        self.is_unchanged = True

    @property
    def words(self) -> str:
        """How to go on with a policy that stays paused."""
        return (
            f"policy {self.policy!r} stays paused, since which weights its engines have is not known: move them again "
            f"under pause_id={self.pause_id!r}, or name the version that they have by resume_policy"
        )

    @property
    def end_words(self) -> str:
        """How to go on where it is not known whether the policy was resumed."""
        return (
            f"whether policy {self.policy!r} goes on is not known: name the version that its engines have, by "
            f"resume_policy under {self.pause_id!r}; a repeat does no harm"
        )

    @staticmethod
    def may_be_paused(exc: BaseException) -> bool:
        """Whether a call to pause that ended like this may have done it."""
        status = exc.status if isinstance(exc, ClientError) else None
        return status is None or status >= 500

    @property
    def may_give_back(self) -> bool:
        """Whether nobody can have touched the weights before the body began."""
        return self._is_ours

    def begin(self) -> Flow[None]:
        """Pause."""
        body = PausePolicy(mode=self._mode, timeout_s=self._timeout_s, pause_id=self.pause_id)
        within_s = self._timeout_s + ENGINES_S
        paused = yield from self._caller.call(
            "POST", f"{self._path}/pause", PausedPolicy, body=body, within_s=within_s, patience_s=self._away_s
        )
        self.paused = tuple(paused.backends)

    def end(self) -> Flow[None]:
        """Resume with the version that the engines have now. ``UpdateFailed`` where none has it."""
        if self.is_unchanged:
            yield from self.give_back(self._away_s)
            return
        self.resumed = yield from self._resume(self.version, self._away_s, rollback=self._rollback)
        results = self.resumed.backends
        if results and not any(result.ok for result in results):
            words = "; ".join(f"{result.id}: {result.error}" for result in results[:8])
            message = f"no engine of policy {self.policy!r} goes on with version {self.version}: {words}"
            raise UpdateFailed(message, code=UpdateFailed.code, backends=results)

    def give_back(self, within_s: float = UNDO_S) -> Flow[None]:
        """Resume with the version that the policy has had. Where nobody holds it by this pause, nothing is to do."""
        until = time.monotonic() + within_s
        info = yield from self._caller.call("GET", self._path, PolicyInfo, patience_s=within_s)
        left = max(0.0, until - time.monotonic())
        self.resumed = yield from self._resume(info.version, left, rollback=False)

    def _resume(self, version: int, within_s: float, *, rollback: bool) -> Flow[ResumedPolicy]:
        body = ResumePolicy(pause_id=self.pause_id, version=version, rollback=rollback)
        until = time.monotonic() + within_s
        while True:
            left = max(0.0, until - time.monotonic())
            try:
                return (
                    yield from self._caller.call(
                        "POST", f"{self._path}/resume", ResumedPolicy, body=body, within_s=ENGINES_S, patience_s=left
                    )
                )
            except ClientError as exc:
                # With details somebody else has it; without, what was asked before is still being done.
                if exc.stable_code != BUSY or exc.details or time.monotonic() + _BUSY_S > until:
                    raise
            yield Nap(_BUSY_S)
