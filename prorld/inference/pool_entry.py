"""One engine in the pool: its client, what its probe found, its places, and what is counted of it."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import msgspec
import trio

from prorld.domain.admission import (
    CALLS_MAX,
    Admission,
    AdmissionRules,
    Pressure,
    Sight,
    bounded,
    followed,
    opening,
    pressure_of,
)
from prorld.domain.backends import BackendRow, BackendState
from prorld.errors import BackendError, ContextOverflow, EngineBusy, NoBackend
from prorld.inference.contract import Backend, Capabilities, EngineLoad
from prorld.inference.counts import CallCounts
from prorld.inference.places import Places
from prorld.wire.ops import AddBackend, BackendInfo

__all__ = [
    "DOWN_SECONDS_MIN",
    "EngineRules",
    "PoolEntry",
    "Quarantine",
    "QuarantineCode",
    "is_strike",
    "is_unreachable",
]

# ``model``: it serves another one. ``version``: it says another one. ``failed``: it did not take one, or not surely.
QuarantineCode = Literal["model", "version", "failed"]

# How long an engine that was found down stays so, even if its health check is cheerful: twice as long each time, until
# a call on it goes well.
DOWN_SECONDS_MIN = 5.0
DOWN_SECONDS_MAX = 300.0


class Quarantine(NamedTuple):
    """Why an engine may not serve, although it answers."""

    code: QuarantineCode
    message: str


class EngineRules(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for every engine.

    ``stall_s``: an engine that has calls and works on none of their tokens for so long is given up. ``call_s``: one
    call may take so long.
    """

    admission: AdmissionRules = AdmissionRules()
    stall_s: float = math.inf
    call_s: float = math.inf


class PoolEntry:
    """Only the pool and the leases it gave out touch this, each change between two awaits."""

    def __init__(
        self, row: BackendRow, request: AddBackend, backend: Backend, found: Capabilities, rules: EngineRules
    ) -> None:
        self.row = row
        self.request = request
        self.backend = backend
        self.found = found
        self.rules = rules
        self.load = EngineLoad()
        self.admission = opening(rules.admission, request.max_inflight)
        self.pressure: Pressure | None = None
        self.places = Places(self.admission.limit)
        self.counts = CallCounts()
        self.missed = 0
        self.draining = False
        self.quarantine: Quarantine | None = None
        # Of the set no more; forgotten when its last lease ends.
        self.leaving = False
        self.removed = False
        # Named while the daemon ran, and written down: the next life of the daemon has it, too.
        self.kept = False
        self.in_check = False
        # It was told to pause, and not yet to go on.
        self.asleep = False
        self.struck_at = -math.inf
        self.heard_at = trio.current_time()
        # When it last showed that it works: a call ended well, or its count of tokens moved.
        self.moved_at = trio.current_time()
        self.down_s = DOWN_SECONDS_MIN
        self._down_s_next = DOWN_SECONDS_MIN

    def __repr__(self) -> str:
        return f"<PoolEntry {self.backend_id} {self.request.url}: {self.row.state.value}>"

    @property
    def backend_id(self) -> str:
        """Its name in the pool."""
        return self.row.backend_id

    @property
    def policy(self) -> str:
        """Whom it serves."""
        return self.request.policy

    @property
    def reachable_state(self) -> BackendState:
        """What it is while it answers."""
        if self.quarantine is not None:
            return BackendState.QUARANTINED
        if self.draining:
            return BackendState.DRAINING
        return BackendState.SUSPECT if self.row.strikes else BackendState.UP

    @property
    def takes_calls(self) -> bool:
        """Whether those who hold a lease on it may call it."""
        return not self.removed and self.row.state not in (BackendState.DOWN, BackendState.QUARANTINED)

    @property
    def can_score(self) -> bool:
        """Whether it may be asked what it thinks of given tokens: also where it is kept out for its version alone."""
        if self.removed or self.row.state is not BackendState.QUARANTINED:
            return self.takes_calls
        return self.quarantine is not None and self.quarantine.code == "version"

    def gone(self) -> NoBackend:
        """What a call is told that can't be made here any more."""
        state = "removed" if self.removed else self.row.state.value
        return NoBackend(f"engine {self.backend_id} of policy {self.policy!r} is {state}")

    # --- how it is ---

    def call_went_well(self) -> None:
        """A reply came that can be believed."""
        self.row.strikes = 0
        self.counts.served += 1
        self.moved_at = trio.current_time()
        self._down_s_next = DOWN_SECONDS_MIN

    def went_down(self) -> None:
        """Found down: it stays so for a while, longer each time that it comes back and serves nobody."""
        self.struck_at = trio.current_time()
        self.down_s, self._down_s_next = self._down_s_next, min(DOWN_SECONDS_MAX, 2 * self._down_s_next)

    def came_back(self) -> None:
        """It answers its probe again: nothing is held against it, and its cache is cold."""
        self.row.strikes = 0
        self.missed = 0
        self.moved_at = trio.current_time()
        self.set_admission(opening(self.rules.admission, self.request.max_inflight))

    @property
    def is_stalled(self) -> bool:
        """Whether it has calls and shows no work on any; only one that counts its tokens can be told so from here."""
        if not self.counts.inflight or self.load.tokens_total is None:
            return False
        return trio.current_time() - self.moved_at >= self.rules.stall_s

    # --- how much it is given ---

    @property
    def needs_a_look(self) -> bool:
        """Whether its load is to be read soon: pressure is on, or a limit that could grow holds somebody up."""
        if self.counts.refused or self.pressure:
            return True
        could_grow = self.admission.limit < (self.request.max_inflight or CALLS_MAX)
        return could_grow and (bool(self.places.waiting) or self.counts.peak >= self.admission.limit)

    def take_load(self, load: EngineLoad, *, is_paused: bool) -> None:
        """The engine's own view has come; the limit follows it, but for an engine that is meant to stand still."""
        before, self.load = self.load, load
        if load.tokens_total != before.tokens_total:
            self.moved_at = trio.current_time()
        counts = self.counts
        seen = Sight(
            inflight=counts.inflight, peak=counts.peak, queued=self.places.waiting, served=counts.served,
            refused=counts.refused, preempted=_risen(before.preempted_total, load.preempted_total),
            running=load.running, waiting=load.waiting, kv_usage=load.kv_usage,
        )  # fmt: skip
        counts.look()
        if is_paused:
            self.pressure, self.moved_at = None, trio.current_time()
            return
        rules = self.rules.admission
        self.pressure = pressure_of(seen, rules) if rules.enabled else None
        self.set_admission(followed(self.admission, seen, rules, self.request.max_inflight))

    def set_admission(self, admission: Admission) -> None:
        """Give it so many calls at once from now on."""
        self.admission = admission
        if admission.limit != self.places.limit:
            self.places.set_limit(admission.limit)

    def take_request(self, request: AddBackend) -> None:
        """Other settings for the same engine."""
        self.request = request
        self.set_admission(bounded(self.admission, self.rules.admission, request.max_inflight))

    # --- what is told ---

    def info(self) -> BackendInfo:
        """Everything about it that is told."""
        counts = self.counts
        return BackendInfo(
            backend_id=self.backend_id,
            id=self.backend_id,
            url=self.request.url,
            kind=self.request.kind,
            policy=self.policy,
            state=self.row.state.value,
            model=self.found.model,
            max_context_tokens=self.found.max_context_tokens,
            leases=self.row.leases,
            inflight=counts.inflight,
            max_inflight=self.request.max_inflight,
            weight=self.row.weight,
            version=self.found.version,
            calls_total=counts.calls,
            errors_total=counts.errors_total,
            node=self.request.node,
            queued=self.places.waiting,
            call_limit=self.places.limit if self.places.limit < CALLS_MAX else None,
            strikes=self.row.strikes,
            errors=dict(counts.errors),
            tokens_prompted_total=counts.prompted,
            tokens_sampled_total=counts.sampled,
            tokens_cached_total=counts.cached,
            migrated_in_total=counts.migrated_in,
            migrated_away_total=counts.migrated_away,
            busy_s=counts.busy_s(trio.current_time()),
            details={
                **self.found.details,
                **({} if self.quarantine is None else {"quarantine": self.quarantine.message}),
                "assigned_total": self.row.assigned_total,
                "engine_running": self.load.running,
                "engine_waiting": self.load.waiting,
                "kv_usage": self.load.kv_usage,
                "pressure": self.pressure,
                "leaving": self.leaving,
            },
        )


# Redirects, and refusals that any request would get: a key or a payment that is missing, a route or model that is not
# there. An engine that fails all its calls so quickly has always the fewest of them, and would get every job.
_OF_THE_ENGINE = frozenset({*range(300, 400), 401, 402, 404, 405, 407})


def is_strike(error: BackendError) -> bool:
    """Whether an error speaks against the engine. Other refusals (4xx) speak against the request."""
    if isinstance(error, EngineBusy | ContextOverflow):
        return False
    return error.status is None or error.status >= 500 or error.status in _OF_THE_ENGINE


def is_unreachable(error: BackendError) -> bool:
    """Whether nobody listens there any more."""
    return error.stable_code == "engine_unreachable"


def _risen(before: int | None, now: int | None) -> int:
    """How far a counter of the engine rose; a fall is a restart."""
    return 0 if before is None or now is None else max(0, now - before)
