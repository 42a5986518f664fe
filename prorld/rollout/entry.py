"""A live job's row in the book: what was asked, where it is, how it ends. Changed by ``life`` alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

import msgspec
import trio

from prorld.domain.ids import SandboxId
from prorld.domain.job import STATE_OF_STAGE, Attempt, JobSpec, JobState, Timing, TokenCounts, advance
from prorld.domain.messages import Message
from prorld.domain.outcome import Outcome, OutcomeKind, Stage, StopReason, Verdict
from prorld.errors import NoBackend
from prorld.handlers.base import AgentHandler, Grade, RunResult
from prorld.inference.contract import Turn
from prorld.inference.session import ModelSession
from prorld.kit.allowance import Allowance
from prorld.rollout.clock import Clock
from prorld.rollout.trail import JobTrail
from prorld.store.jobs import AttemptBegan, AttemptEnded, LiveJob
from prorld.store.journal import Journal
from prorld.wire.events import JobEvent
from prorld.wire.jobs import Drift, JobRecord

__all__ = ["JobEntry"]

LOST_BY_RESTART: Final = Outcome(
    kind=OutcomeKind.LOST, code="restart", message="the daemon ended before this attempt did", retryable=True
)


class JobEntry:
    """One accepted job.

    ``scope`` bounds everything the job does. ``cancel_reason`` is set before the scope is cancelled, so that the
    outcome can say why. ``done`` is set when the end is on the disk, after every resource of the job is gone.
    ``serial`` numbers the jobs of a state directory; ids chosen by clients are unique per tenant only.

    ``doom`` is an outcome that stands before anything has begun: nothing runs then. Of a job that is scored again,
    ``past`` is the transcript of its rollout.
    """

    def __init__(
        self,
        spec: JobSpec,
        handler: AgentHandler[msgspec.Struct],
        instance: msgspec.Struct,
        *,
        serial: int,
        digest: str,
        size_bytes: int,
        clock: Clock,
        tell: Callable[[JobEvent], None] | None = None,
        journal: Journal | None = None,
        earlier: LiveJob | None = None,
    ) -> None:
        """``earlier`` is the job as an earlier life of the daemon left it; ``resumes`` goes on from there."""
        self.spec = spec
        self.handler = handler
        self.instance = instance
        self.serial = serial
        self.digest = digest
        self.request_bytes = size_bytes
        self.clock = clock
        self.scope = trio.CancelScope()
        self.cancel_reason: str | None = None
        self.done = trio.Event()
        self.trail = JobTrail(journal, tell=tell, past=() if earlier is None else earlier.events)
        self.events = self.trail.events
        self.doom: Outcome | None = None
        self.state = JobState.QUEUED
        self.waiting_for: Stage | Literal["journal"] | None = "init"
        self._waits_told: Stage | None = None
        self.stage: Stage | None = None
        self.allowance: Allowance | None = None
        self.timing = Timing()
        self.attempts: list[Attempt] = [] if earlier is None else list(earlier.attempts)
        self.trail.attempts_seen = len(self.attempts)
        self.past: Sequence[Message] = ()
        self.session: ModelSession | None = None
        self.wants_engine = False
        self.sandbox_id: SandboxId | None = None
        self.stop: StopReason | None = None
        self.result: RunResult | None = None
        self.carried: Mapping[str, bytes] = {}
        self.grade: Grade | None = None
        self.metrics: dict[str, float] = {}
        self.outcome: Outcome | None = None
        self.verdict: Verdict | None = None
        self.created_at = clock.wall() if earlier is None else earlier.created_at
        self.ended_at: str | None = None
        self._attempt_started: tuple[int, str] | None = None if earlier is None else earlier.open_attempt

    def __repr__(self) -> str:
        return f"<JobEntry {self.spec.job_id} {self.state}>"

    # --- steps of its life ------------------------------------------------------------------------------------------

    def accepted(self) -> None:
        """It is on the disk; from now on it is told of."""
        self.trail.open(self.serial)
        self.events.emit("job.queued", self.created_at)

    def resumes(self, boot_id: str) -> None:
        """A new life of the daemon has it: what the last one interrupted is lost, and counts for nothing."""
        self.trail.open(self.serial)
        if not self.events.newest:
            self.events.emit("job.queued", self.created_at)
        interrupted = None if self._attempt_started is None else self._attempt_started[0]
        self.attempt_ends(LOST_BY_RESTART)
        self.events.emit("job.restored", self.clock.wall(), interrupted=interrupted, boot_id=boot_id)

    @property
    def tries(self) -> int:
        """Attempts that have ended and count."""
        return sum(attempt.outcome.kind is not OutcomeKind.LOST for attempt in self.attempts)

    def attempt_begins(self) -> int:
        """A new try: nothing of the last one counts any more. Its number."""
        n = self.attempts[-1].n + 1 if self.attempts else 1
        started_at = self.clock.wall()
        self._attempt_started = (n, started_at)
        self.trail.tried(AttemptBegan(serial=self.serial, n=n, started_at=started_at))
        self.session = None
        self.wants_engine = False
        self.stop = None
        self.result = None
        self.carried = {}
        self.grade = None
        self.metrics = {}
        self.events.emit("job.attempt", started_at, n=n, what="began")
        return n

    def attempt_ends(self, outcome: Outcome) -> None:
        """The try is over; fine to call when none is open."""
        if self._attempt_started is None:
            return
        n, started_at = self._attempt_started
        self._attempt_started = None
        if self.session is not None:
            self.timing.llm_s += self.session.llm_s
        ended_at = self.clock.wall()
        attempt = Attempt(n=n, outcome=outcome, started_at=started_at, ended_at=ended_at)
        self.attempts.append(attempt)
        self.trail.tried(AttemptEnded(serial=self.serial, attempt=attempt))
        self.events.emit("job.attempt", ended_at, n=n, what="ended", outcome=outcome.kind.value, code=outcome.code)

    def waits_for(self, stage: Stage) -> None:
        """For a stage's turn: the state stays what it was. Told once, however many lines there are to stand in."""
        if self._waits_told == stage:
            return
        self._waits_told = stage
        self.stage = None
        self.waiting_for = stage
        self.events.emit("job.stage", self.clock.wall(), stage=stage, what="waiting")

    def enters(self, stage: Stage) -> None:
        """Through the gate."""
        self.state = advance(self.state, STATE_OF_STAGE[stage])
        self.stage = stage
        self.waiting_for = None
        self._waits_told = None
        self.events.emit("job.stage", self.clock.wall(), stage=stage, what="entered")

    def spoke(self, turn: int, said: Turn) -> None:
        """The policy took a turn."""
        calls = [call.name for call in said.tool_calls]
        self.events.emit("job.turn", self.clock.wall(), turn=turn, sampled=said.sampled, tool_calls=calls)

    def leaves(self, stage: Stage) -> None:
        """Out of the stage, in whatever way."""
        self.events.emit("job.stage", self.clock.wall(), stage=stage, what="left")

    def ends(self, outcome: Outcome, verdict: Verdict) -> None:
        """The terminal event. Happens exactly once, and nothing in it awaits. Told of when it is on the disk."""
        self.trail.shut()
        self.attempt_ends(outcome)
        self.waiting_for = "journal"
        self.stage = None
        self.outcome = outcome
        self.verdict = verdict
        self.ended_at = self.clock.wall()
        self.events.emit(
            "job.done", self.ended_at, outcome=outcome.kind.value, verdict=verdict.value, reward=self.reward
        )

    def is_unkept(self, why: str) -> None:
        """What it left can't be written. Nobody has seen its end yet, so it may still be another one."""
        self.grade = None
        self.stop = None
        self.outcome = Outcome(kind=OutcomeKind.HANDLER_ERROR, code="unkeepable", message=why)
        self.verdict = Verdict.DROP
        if self.attempts:
            self.attempts[-1] = msgspec.structs.replace(self.attempts[-1], outcome=self.outcome)
        self.events.amend(outcome=self.outcome.kind.value, verdict=self.verdict.value, reward=None)

    def is_told(self) -> None:
        """The end is on the disk, and everybody may see it."""
        self.state = advance(self.state, JobState.DONE)
        self.waiting_for = None
        self.trail.ended()
        self.done.set()

    # --- what is read -----------------------------------------------------------------------------------------------

    @property
    def lacking(self) -> str | None:
        """The code of what the job waits for beyond its own doing, while it does."""
        if self.wants_engine:
            return NoBackend.code
        return None if self.session is None else self.session.lacking

    @property
    def reward(self) -> float | None:
        """The reward; ``None`` unless a grader ran to its end."""
        return None if self.grade is None else self.grade.reward

    @property
    def transcript(self) -> Sequence[Message]:
        """The conversation so far."""
        return self.past if self.session is None else self.session.transcript

    def record(self) -> JobRecord:
        """The record as it is now. What is not on the disk yet is not in it: a restart would make it untrue."""
        if self.state is JobState.DONE:
            return self.final_record()
        return msgspec.structs.replace(
            self._record(),
            state=self.state,
            waiting_for=self.waiting_for,
            outcome=None,
            verdict=None,
            reward=None,
            reward_parts={},
            metrics={},
            stop_reason=None,
            attempts=self.attempts[: self.trail.attempts_seen],
            ended_at=None,
        )

    def final_record(self) -> JobRecord:
        """The record as it will be when the end is on the disk."""
        if self.outcome is None:
            raise AssertionError(f"{self.spec.job_id} has not ended")
        return self._record()

    def _record(self) -> JobRecord:
        spec, session = self.spec, self.session
        timing = msgspec.structs.replace(self.timing)
        if self.allowance is not None:
            timing.paused_s += self.allowance.held_s
        if session is not None and self._attempt_started is not None:
            timing.llm_s += session.llm_s
        return JobRecord(
            job_id=spec.job_id,
            handler=spec.handler,
            policy=spec.policy,
            tenant=spec.tenant,
            state=JobState.DONE,
            outcome=self.outcome,
            verdict=self.verdict,
            reward=self.reward,
            reward_parts={} if self.grade is None else self.grade.parts,
            metrics=dict(self.metrics),
            stop_reason=self.stop,
            attempts=list(self.attempts),
            timing=timing,
            turns=0 if session is None else session.turns,
            tokens=TokenCounts() if session is None else session.token_counts(),
            backends=[] if session is None else session.backends_used(),
            policy_versions=[] if session is None else session.versions_used(),
            drift=drift_of(session),
            group_id=spec.group_id,
            sample_index=spec.sample_index,
            metadata=spec.metadata,
            requeued_from=spec.requeued_from,
            created_at=self.created_at,
            ended_at=self.ended_at,
        )


def drift_of(session: ModelSession | None) -> Drift:
    """Exact while histories only grew; forked when one had to be rendered anew. What a sub-agent was asked is new."""
    forks = [] if session is None else [b for b in session.branches if b.reason not in (None, "sub_agent")]
    if not forks:
        return Drift()
    return Drift(verdict="forked", first_index=forks[0].fork_at, tokens_affected=sum(len(fork) for fork in forks))
