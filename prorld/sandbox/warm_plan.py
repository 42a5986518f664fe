"""Which sandboxes are worth making before a job asks: the decision alone, over plain numbers.

Three reasons, in this order: the operator named the image, a job has said that it will soon want one, or jobs keep
asking. It never awaits and reads no clock; times are given to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

__all__ = ["EXPECTED_S", "Demand", "WarmRules", "allot", "room"]

K = TypeVar("K")

# How long an announced want is believed. The job that announced it may have been cancelled or wait at a gate.
EXPECTED_S = 30.0
RETRY_S = 1.0
RETRY_MAX_S = 60.0
# An idle sandbox is two shells; none takes less than this.
BYTES_EACH_MIN = 1 << 20


class WarmRules(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator allows.

    ``total`` idle sandboxes in all, 0 being none; of one spec at most ``per_spec`` because jobs keep asking, and of
    ``specs`` specs; ``memory_bytes`` for all idle ones. A want counts for ``idle_s``; a sandbox that has waited for
    ``age_s`` is replaced. ``images`` says how many are kept of an image whatever jobs ask; the empty name stands for
    tasks that name none.
    """

    total: Annotated[int, Meta(ge=0)] = 8
    per_spec: Annotated[int, Meta(ge=1)] = 4
    specs: Annotated[int, Meta(ge=1)] = 8
    memory_bytes: Annotated[int, Meta(ge=0)] = 1 << 30
    idle_s: Annotated[float, Meta(gt=0)] = 300.0
    age_s: Annotated[float, Meta(gt=0)] = 3600.0
    images: Mapping[str, Annotated[int, Meta(ge=1)]] = {}


class Demand:
    """How much one spec is wanted. ``fixed`` is what the operator has said."""

    def __init__(self, rules: WarmRules, *, now: float, fixed: int = 0) -> None:
        self.fixed = fixed
        self.last = now
        self.retry_at = now
        self._rules = rules
        self._proved = False
        self._failures = 0
        self._asked: deque[float] = deque(maxlen=rules.per_spec)
        self._expected: deque[float] = deque(maxlen=max(1, rules.total))

    def ask(self, now: float) -> None:
        """A job wants one now. The first ones are a crowd, not a habit: they count from when one has come up.

        One that was announced does not count: the next one will be announced, too.
        """
        self.last = now
        while self._expected and self._expected[0] <= now:
            self._expected.popleft()
        if self._expected:
            self._expected.popleft()
        elif self._proved:
            self._asked.append(now)

    def expect(self, now: float) -> None:
        """A job will want one soon."""
        self.last = now
        self._expected.append(now + EXPECTED_S)

    def came_up(self) -> None:
        """One was started without trouble."""
        self._proved = True

    def served(self) -> None:
        """A job got a sound one; failures before that are forgotten."""
        self._failures = 0

    def failed(self, now: float) -> None:
        """One made in advance did not come up, or died unused: none is made for a while, longer each time."""
        self.retry_at = now + min(RETRY_MAX_S, RETRY_S * 2 ** min(self._failures, 16))
        self._failures += 1

    def is_pressing(self, now: float) -> bool:
        """Whether somebody has said that it is wanted."""
        return self.fixed > 0 or bool(self._expected and self._expected[-1] > now)

    def wanted(self, now: float) -> int:
        """How many should be there."""
        habit = sum(asked > now - self._rules.idle_s for asked in self._asked)
        return max(self.fixed, habit) + self._announced(now)

    def _announced(self, now: float) -> int:
        return sum(until > now for until in self._expected)


def room(rules: WarmRules, bytes_each: int) -> int:
    """How many idle sandboxes there may be when one takes so much memory."""
    return min(rules.total, rules.memory_bytes // max(bytes_each, BYTES_EACH_MIN))


def allot(demands: Mapping[K, Demand], rules: WarmRules, *, now: float, bytes_each: int) -> dict[K, int]:
    """How many of each there should be, the most important first; what should have none is left out."""
    left, shares = room(rules, bytes_each), dict[K, int]()
    for key in sorted(demands, key=lambda key: (demands[key].is_pressing(now), demands[key].last), reverse=True):
        if not left or len(shares) == rules.specs:
            break
        share = min(left, demands[key].wanted(now))
        if share:
            shares[key] = share
            left -= share
    return shares
