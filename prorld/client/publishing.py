"""One version of a policy, asked for until engines have it: what is asked again, and for how long."""

from __future__ import annotations

import time
from typing import NamedTuple

import msgspec

from prorld.client.caller import Caller, part
from prorld.client.errors import STILL_RUNNING, ClientError, UpdateFailed
from prorld.client.flows import Flow, Nap
from prorld.wire.policies import PolicyInfo, PolicyUpdate, UpdatePolicy

__all__ = ["Patience", "Publication", "has_ended"]

# What a restart of the daemon makes of an update.
INTERRUPTED = "interrupted"
NO_BACKEND = "no_backend"
BUSY = "policy_busy"
TOO_LOW = "version_too_low"
# Pauses of others and engines that come back end when they end; this is how often we ask.
AGAIN_S = 0.5


class Patience(NamedTuple):
    """Seconds, from the beginning on. ``away_s`` is anew for each time that the daemon is gone."""

    within_s: float
    away_s: float
    busy_s: float
    engines_s: float


class Publication:
    """An update and its end. With ``is_next`` its version is whatever is the policy's next one."""

    def __init__(
        self, caller: Caller, policy: str, body: UpdatePolicy, patience: Patience, *, is_next: bool = False
    ) -> None:
        self._caller = caller
        self._policy = policy
        self._path = f"/v1/policies/{part(policy)}"
        self._body = body
        self._patience = patience
        self._is_next = is_next
        self._began = time.monotonic()

    def made(self) -> Flow[PolicyUpdate]:
        """The update once it is done. ``UpdateFailed`` where no engine took the weights."""
        if self._is_next:
            yield from self._name_next()
        while True:
            begun = yield from self._begin()
            one = f"{self._path}/updates/{part(begun.update_id)}"
            found = yield from self._caller.poll(
                one, PolicyUpdate, has_ended, self._left(self._patience.within_s), patience_s=self._patience.away_s
            )
            if found.state == "done":
                return found
            is_cut_short = found.code == INTERRUPTED
            if found.state == "running" or (is_cut_short and not self._left(self._patience.within_s)):
                raise self._still_running()
            if found.code == NO_BACKEND and self._left(self._patience.engines_s):
                yield Nap(AGAIN_S)
            elif not is_cut_short:
                words = f"version {found.version} of policy {self._policy!r} was not loaded: {found.message}"
                raise UpdateFailed(words, code=found.code or UpdateFailed.code, backends=found.backends)

    def _begin(self) -> Flow[PolicyUpdate]:
        """Ask for it, again while somebody else has the policy."""
        away_s = self._patience.away_s
        while True:
            try:
                return (
                    yield from self._caller.call(
                        "POST", f"{self._path}/updates", PolicyUpdate, body=self._body, patience_s=away_s
                    )
                )
            except ClientError as exc:
                is_overtaken = exc.stable_code == TOO_LOW and self._is_next
                again_s = self._patience.within_s if is_overtaken else self._busy_s(exc)
                if not self._left(again_s):
                    raise
            if is_overtaken:
                yield from self._name_next()
            else:
                yield Nap(AGAIN_S)

    def _name_next(self) -> Flow[None]:
        info = yield from self._caller.call("GET", self._path, PolicyInfo, patience_s=self._patience.away_s)
        self._body = msgspec.structs.replace(self._body, version=info.version + 1)

    def _busy_s(self, exc: ClientError) -> float:
        """With details somebody else has it; without, what was asked before is still being written down."""
        if exc.stable_code != BUSY:
            return 0.0
        return self._patience.busy_s if exc.details else self._patience.within_s

    def _left(self, seconds: float) -> float:
        return max(0.0, self._began + min(seconds, self._patience.within_s) - time.monotonic())

    def _still_running(self) -> ClientError:
        words = f"version {self._body.version} of policy {self._policy!r} is not there after"
        return ClientError(f"{words} {self._patience.within_s:g} s", code=STILL_RUNNING, retryable=True)


def has_ended(update: PolicyUpdate) -> bool:
    """Whether nothing more becomes of it."""
    return update.state != "running"
