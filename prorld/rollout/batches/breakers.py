"""The circuit breakers of training: one for each tenant, handler and policy, fed by every attempt that ends.

While one is open no training batch and no single training job of its key is accepted, and its running training
batches end ``failed``. After the cool-down a few jobs are let through to see. Evaluations pass: they train nobody.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.domain.breaker import Breaker, BreakerRules
from prorld.domain.job import JobSpec
from prorld.errors import Overloaded
from prorld.rollout.document import record_of
from prorld.store.batches import BatchSpec
from prorld.store.jobs import StoredJob

__all__ = ["Breakers", "Key"]

log: FilteringBoundLogger = structlog.get_logger("prorld.rollout")

# Those that were used longest ago are forgotten; one that is open is in use.
KEYS_MAX: Final = 1024
RETRY_AFTER_S_MIN: Final = 1.0


class Key(NamedTuple):
    """What a breaker is for."""

    tenant: str
    handler: str
    policy: str


class Breakers:
    """All breakers. ``opened`` is told of each that opens, with the cause; it may neither block nor raise."""

    def __init__(self, rules: BreakerRules | None = None) -> None:
        self._rules = rules or BreakerRules()
        self._all: OrderedDict[Key, Breaker] = OrderedDict()
        self.opened: Callable[[Key, str], None] | None = None
        self.closed: Callable[[Key], None] | None = None

    def _of(self, key: Key) -> Breaker:
        found = self._all.get(key)
        if found is None:
            found = self._all[key] = Breaker(self._rules)
            if len(self._all) > KEYS_MAX:
                self._all.popitem(last=False)
        self._all.move_to_end(key)
        return found

    # --- what happens -------------------------------------------------------------------------------------------------

    def ended(self, job: StoredJob) -> None:
        """A job has ended: each of its attempts says something."""
        spec = job.spec
        if spec.purpose != "train":
            return
        key = Key(spec.tenant, spec.handler, spec.policy)
        breaker, now = self._of(key), trio.current_time()
        before = breaker.state(now)
        record = record_of(job)
        # A job that ended before its first attempt says it by its outcome alone.
        outcomes = [attempt.outcome for attempt in record.attempts] or [job.trajectory.outcome]
        for outcome in outcomes:
            breaker.note(outcome, now)
        after = breaker.state(now)
        if after == before:
            return
        if after == "open":
            log.error("breaker.opened", **key._asdict(), cause=breaker.words)
            if self.opened is not None:
                self.opened(key, breaker.words)
        elif after == "closed":
            log.info("breaker.closed", **key._asdict())
            if self.closed is not None:
                self.closed(key)

    # --- admission ----------------------------------------------------------------------------------------------------

    def must_admit(self, tenant: str, handler: str, policy: str) -> None:
        """``Overloaded`` while the breaker of this key is open."""
        breaker = self._all.get(Key(tenant, handler, policy))
        now = trio.current_time()
        if breaker is None or breaker.state(now) != "open":
            return
        raise self._refusal(Key(tenant, handler, policy), breaker, now)

    def must_begin(self, spec: JobSpec) -> None:
        """The same for a single job, which takes one of the probes where there are such."""
        key = Key(spec.tenant, spec.handler, spec.policy)
        breaker = self._all.get(key)
        if spec.purpose != "train" or breaker is None:
            return
        now = trio.current_time()
        if breaker.allow(now) is not None:
            raise self._refusal(key, breaker, now)

    def _refusal(self, key: Key, breaker: Breaker, now: float) -> Overloaded:
        words = f"jobs of {key.handler} on policy {key.policy!r} keep failing: {breaker.words}"
        wait_s = max(RETRY_AFTER_S_MIN, breaker.until - now)
        return Overloaded(words, retry_after_s=wait_s, code="breaker_open")

    def allows(self, spec: BatchSpec) -> bool:
        """Whether a group of a batch may be started now."""
        breaker = self._all.get(Key(spec.tenant, spec.handler, spec.policy))
        return spec.purpose != "train" or breaker is None or breaker.would_allow(trio.current_time())

    def is_careful(self, spec: BatchSpec) -> bool:
        """Whether only a few are let through, so that groups are to be started one by one."""
        breaker = self._all.get(Key(spec.tenant, spec.handler, spec.policy))
        return breaker is not None and breaker.state(trio.current_time()) != "closed"

    def started(self, spec: BatchSpec, jobs: int) -> None:
        """One was: its jobs are probes, where there are such."""
        breaker = self._all.get(Key(spec.tenant, spec.handler, spec.policy))
        if spec.purpose == "train" and breaker is not None:
            now = trio.current_time()
            for _ in range(jobs):
                if breaker.allow(now) is not None:
                    return

    def next_look_at(self, spec: BatchSpec) -> float:
        """When ``allows`` may say something else without being told anything."""
        breaker = self._all.get(Key(spec.tenant, spec.handler, spec.policy))
        if spec.purpose != "train" or breaker is None or breaker.would_allow(trio.current_time()):
            return math.inf
        return max(breaker.until, trio.current_time() + RETRY_AFTER_S_MIN)

    # --- for operators ------------------------------------------------------------------------------------------------

    def open_ones(self) -> Iterator[tuple[Key, str]]:
        """Those that are not closed, and why."""
        now = trio.current_time()
        for key, breaker in self._all.items():
            if breaker.state(now) != "closed":
                yield key, breaker.words
