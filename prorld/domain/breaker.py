"""The circuit breaker: too large a share of one kind of failure stops admission, and a few probes open it again. Pure.

A breaker is for one key of the caller's (a tenant, handler and policy), and looks at the last ends of attempts by
(stage, cause). Infrastructure's failures count: those of sandboxes, engines, handlers and graders, and time-outs of
INIT and EVAL. A time-out of RUN is the policy's and counts as an end that was none of them. Cancelled and lost attempts
say nothing at all.

    closed --the share is over the limit--> open --cool-down--> half_open --all probes did well--> closed
                                             ^                      |
                                             +---a probe failed-----+   (the cool-down doubles)
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Literal, TypeAlias

import msgspec

from prorld.domain.outcome import Outcome, OutcomeKind, Stage

__all__ = ["Breaker", "BreakerRules", "BreakerState", "Cause", "Refusal", "cause_of"]

BreakerState = Literal["closed", "open", "half_open"]

# The stage, and the kind of failure in it.
Cause: TypeAlias = tuple[Stage | None, str]

_SAYS_NOTHING = frozenset({OutcomeKind.CANCELLED, OutcomeKind.LOST})
_INFRASTRUCTURE = frozenset(
    {OutcomeKind.ENV_ERROR, OutcomeKind.LLM_ERROR, OutcomeKind.HANDLER_ERROR, OutcomeKind.GRADER_ERROR}
)


class BreakerRules(msgspec.Struct, frozen=True, kw_only=True):
    """More than ``share`` of the last ``window`` ends, at least ``min_count`` and none older than ``window_s``."""

    share: float = 0.5
    window: int = 64
    window_s: float = 600.0
    min_count: int = 16
    cooldown_s: float = 30.0
    cooldown_max_s: float = 960.0
    probes: int = 4


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why nothing is admitted. ``until`` is when to ask again; while probes run, nobody knows, and it is now."""

    until: float
    stage: Stage | None
    cause: str
    words: str


def cause_of(outcome: Outcome) -> Cause | None:
    """What an attempt failed of, as far as it speaks against what it ran on; ``None`` for any other end."""
    if outcome.kind in _INFRASTRUCTURE:
        return outcome.stage, outcome.kind.value
    if outcome.kind is OutcomeKind.TIMEOUT and outcome.stage in {"init", "eval"}:
        return outcome.stage, outcome.kind.value
    return None


class Breaker:
    """One breaker. ``now`` never goes backwards."""

    def __init__(self, rules: BreakerRules) -> None:
        self.rules = rules
        self._state: BreakerState = "closed"
        self._seen: deque[tuple[float, Cause | None]] = deque()
        self._counts: Counter[Cause] = Counter()
        self._cause: Cause = (None, "")
        self._words = ""
        self._until = 0.0
        self._cooldown_s = rules.cooldown_s
        # Probes that were let through, and that have come to a good end, in this half-open time.
        self._tried = 0
        self._did_well = 0
        self._tried_until = 0.0

    def state(self, now: float) -> BreakerState:
        """Where it is."""
        self._cool_down(now)
        return self._state

    @property
    def words(self) -> str:
        """Why it is not closed."""
        return self._words

    @property
    def until(self) -> float:
        """When it is, or was, to be tried again."""
        return self._until

    def would_allow(self, now: float) -> bool:
        """What ``allow`` would say, without taking a probe."""
        state = self.state(now)
        return state == "closed" or (state == "half_open" and self._tried < self.rules.probes)

    def allow(self, now: float) -> Refusal | None:
        """Whether an attempt may begin now. Where it is half open, this takes one of the probes."""
        self._cool_down(now)
        if self._state == "half_open" and self._tried < self.rules.probes:
            self._tried += 1
            self._tried_until = now + self._cooldown_s
            return None
        if self._state == "closed":
            return None
        until = self._until if self._state == "open" else now
        return Refusal(until=until, stage=self._cause[0], cause=self._cause[1], words=self._words)

    def note(self, outcome: Outcome, now: float) -> None:
        """An attempt has ended."""
        self._cool_down(now)
        if outcome.kind in _SAYS_NOTHING:
            # A probe that was cancelled has found nothing out; another one may be tried.
            if self._state == "half_open":
                self._tried = max(self._did_well, self._tried - 1)
            return
        cause = cause_of(outcome)
        if self._state == "half_open":
            # Which ends are those of probes is not told apart: one that began before says as much of today.
            self._probed(cause, now)
        elif self._state == "closed":
            self._count(cause, now)
        # While it is open, what had begun before ends; that says nothing new.

    def _count(self, cause: Cause | None, now: float) -> None:
        rules = self.rules
        self._seen.append((now, cause))
        if cause is not None:
            self._counts[cause] += 1
        while len(self._seen) > rules.window or self._seen[0][0] < now - rules.window_s:
            _, gone = self._seen.popleft()
            if gone is not None:
                self._counts[gone] -= 1
                if not self._counts[gone]:
                    del self._counts[gone]
        if cause is None or len(self._seen) < rules.min_count:
            return
        failed, seen = self._counts[cause], len(self._seen)
        if failed > rules.share * seen:
            where = "" if cause[0] is None else f" in {cause[0]}"
            self._open(cause, f"{failed} of the last {seen} attempts ended {cause[1]}{where}", now)

    def _open(self, cause: Cause, words: str, now: float) -> None:
        self._state = "open"
        self._cause, self._words = cause, words
        self._until = now + self._cooldown_s
        self._seen.clear()
        self._counts.clear()

    def _cool_down(self, now: float) -> None:
        if self._state == "open" and now >= self._until:
            self._state = "half_open"
            self._tried = self._did_well = 0
        elif self._state == "half_open" and self._tried > self._did_well and now >= self._tried_until:
            # Probes that nobody has heard of for so long are given up, so that it can't stay so for ever.
            self._tried = self._did_well

    def _probed(self, cause: Cause | None, now: float) -> None:
        if cause is not None:
            self._cooldown_s = min(2 * self._cooldown_s, self.rules.cooldown_max_s)
            where = "" if cause[0] is None else f" in {cause[0]}"
            self._open(cause, f"{self._words.split('; ')[0]}; a probe ended {cause[1]}{where}", now)
            return
        self._did_well += 1
        self._tried = max(self._tried, self._did_well)
        if self._did_well >= self.rules.probes:
            self._state, self._words = "closed", ""
            self._cooldown_s = self.rules.cooldown_s
