"""Policies: their versions, their pauses, their updates."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from prorld.client.caller import AWAY_S, Calls, part
from prorld.client.errors import ClientError
from prorld.client.flows import Flow, both
from prorld.client.publishing import Patience, Publication, has_ended
from prorld.domain.policy import How, Mode
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

__all__ = ["ENGINES_S", "PUBLISH_S", "PolicyCalls", "new_pause_id"]

# For engines to say that they are paused, or that they go on, beside what they were given.
ENGINES_S = 240.0
# For large weights from a slow disk.
PUBLISH_S = 3600.0
_ID_BYTES = 10


class PolicyCalls(Calls):
    """The part of the client that is about policies."""

    @both
    def policies(self) -> Flow[Sequence[PolicyInfo]]:
        """The policies and their versions."""
        return (yield from self._call("GET", "/v1/policies", PolicyList)).items

    @both
    def policy(self, policy: str) -> Flow[PolicyInfo]:
        """One of them."""
        return self._call("GET", f"/v1/policies/{part(policy)}", PolicyInfo)

    @both
    def put_policy(self, policy: str, request: PutPolicy) -> Flow[PolicyInfo]:
        """Make or change a policy."""
        return self._call("PUT", f"/v1/policies/{part(policy)}", PolicyInfo, body=request)

    @both
    def pause_policy(
        self, policy: str, *, mode: Mode = "abort", timeout_s: float = 60.0, pause_id: str | None = None
    ) -> Flow[PausedPolicy]:
        """Let no generation begin, and pause the engines. Gets its id here, so that a repeat is the same pause."""
        named = pause_id or new_pause_id()
        body = PausePolicy(mode=mode, timeout_s=timeout_s, pause_id=named)
        within_s = timeout_s + ENGINES_S
        return self._call("POST", f"/v1/policies/{part(policy)}/pause", PausedPolicy, body=body, within_s=within_s)

    @both
    def resume_policy(self, policy: str, pause_id: str, version: int, *, rollback: bool = False) -> Flow[ResumedPolicy]:
        """Name the weights that the engines have now, and let everything go on."""
        body = ResumePolicy(pause_id=pause_id, version=version, rollback=rollback)
        return self._call("POST", f"/v1/policies/{part(policy)}/resume", ResumedPolicy, body=body, within_s=ENGINES_S)

    @both
    def update_policy(
        self,
        policy: str,
        version: int,
        how: How = "reload",
        *,
        path: str | None = None,
        mode: Mode = "abort",
        timeout_s: float = 60.0,
        backends: Sequence[str] | None = None,
        rollback: bool = False,
        pause_id: str | None = None,
    ) -> Flow[PolicyUpdate]:
        """Begin to change the weights; ``wait_update`` has the end. A repeat is the same update."""
        body = _asked(version, how, path, mode, timeout_s, backends, rollback=rollback, pause_id=pause_id)
        return self._call("POST", f"/v1/policies/{part(policy)}/updates", PolicyUpdate, body=body)

    @both
    def publish(
        self,
        version: int | None = None,
        how: How = "reload",
        *,
        path: str | None = None,
        policy: str = "default",
        mode: Mode = "abort",
        timeout_s: float = 60.0,
        backends: Sequence[str] | None = None,
        rollback: bool = False,
        pause_id: str | None = None,
        within_s: float = PUBLISH_S,
        away_s: float = AWAY_S,
        busy_s: float = 0.0,
        engines_s: float = 0.0,
    ) -> Flow[PolicyUpdate]:
        """``update_policy`` and its end. Asks again when a restart of the daemon cut the update short.

        Without a ``version`` it is the policy's next one. Engines that did not take the weights are out, and named in
        ``backends`` of what is returned; where none took them, ``UpdateFailed``. After ``within_s`` it is
        ``ClientError`` ``still_running``: the update goes on, and the same call finds it, with the version that the
        error names. ``away_s`` is how long the daemon may be gone, ``busy_s`` how long somebody else may hold the
        policy, ``engines_s`` how long there may be no engine.
        """
        first = 0 if version is None else version
        body = _asked(first, how, path, mode, timeout_s, backends, rollback=rollback, pause_id=pause_id)
        patience = Patience(within_s=within_s, away_s=away_s, busy_s=busy_s, engines_s=engines_s)
        return Publication(self._caller, policy, body, patience, is_next=version is None).made()

    @both
    def updates(self, policy: str) -> Flow[Sequence[PolicyUpdate]]:
        """The updates that are remembered of a policy, newest first."""
        return (yield from self._call("GET", f"/v1/policies/{part(policy)}/updates", PolicyUpdateList)).items

    @both
    def wait_update(self, policy: str, update_id: str, *, within_s: float | None = None) -> Flow[PolicyUpdate]:
        """An update once it has ended, or as it is after ``within_s``."""
        path = f"/v1/policies/{part(policy)}/updates/{part(update_id)}"
        return self._caller.poll(path, PolicyUpdate, has_ended, within_s)


def new_pause_id() -> str:
    """A name for a pause, so that a repeat is the same one."""
    return f"pause-{secrets.token_hex(_ID_BYTES)}"


def _asked(
    version: int,
    how: How,
    path: str | None,
    mode: Mode,
    timeout_s: float,
    backends: Sequence[str] | None,
    *,
    rollback: bool,
    pause_id: str | None,
) -> UpdatePolicy:
    if path is not None and not path.startswith("/"):
        raise ClientError(f"path must be an absolute path, and not {path!r}", code="bad_input")
    if path is None and how != "none":
        raise ClientError(f"path is missing: {how!r} loads weights from it", code="bad_input")
    fields = {
        "version": version, "how": how, "path": path, "mode": mode, "timeout_s": timeout_s,
        "backends": None if backends is None else [*backends], "rollback": rollback, "pause_id": pause_id,
    }  # fmt: skip
    try:
        return msgspec.convert(fields, UpdatePolicy)
    except msgspec.ValidationError as exc:
        raise ClientError(str(exc), code="bad_input") from exc
