"""The loop of a run: keeps so many jobs in the daemon, takes what has ended, outlives restarts of the daemon.

Single-threaded and synchronous, as every trainer's client can be. It decides nothing about a rollout: every line it
writes is the daemon's record.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from prorld.cli.run_out import OutFile, OutLine
from prorld.cli.run_plan import Sample
from prorld.cli.run_stats import Progress, Stats
from prorld.client import Client, ClientError
from prorld.domain.job import JobState
from prorld.domain.outcome import OutcomeKind
from prorld.wire.jobs import JobRecord

__all__ = ["Driver"]

T = TypeVar("T")

# What one look asks for at most.
PAGE = 200
STRAGGLERS = 16
SWEEP_S = 0.25
POLL_S = 0.25
AGAIN_MAX = 20
INTERRUPTED = "the run was interrupted"
CANCELS = 5000
_BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_AWAY = frozenset({"no_daemon", "connection_lost", "bad_reply", "draining"})
_UNKNOWN = frozenset({"unknown_job", "forgotten"})


class Away(Exception):
    """The daemon can't be talked to now."""

    def __init__(self, error: ClientError) -> None:
        super().__init__(error.message)
        self.error = error


class Driver:
    """One run over the samples that are still to do."""

    def __init__(
        self,
        connect: Callable[[], Client],
        samples: Sequence[Sample],
        out: OutFile,
        stats: Stats,
        progress: Progress,
        *,
        inflight_max: int,
        patience_s: float,
        trajectories: bool = False,
    ) -> None:
        self._connect = connect
        self._todo = deque(samples)
        self._out = out
        self._stats = stats
        self._progress = progress
        self._inflight_max = inflight_max
        self._patience_s = patience_s
        self._trajectories = trajectories
        self._running: dict[str, Sample] = {}
        self._submit_at = 0.0
        self._sweep_at = 0.0
        self._client: Client | None = None

    @property
    def running(self) -> list[str]:
        """Ids of jobs that were handed in and have not ended."""
        return list(self._running)

    def run(self) -> None:
        """To the end of every sample. Raises the daemon's last error when it stays away longer than the patience."""
        failures, until = 0, 0.0
        while self._todo or self._running:
            try:
                self._client = self._client or self._talk(self._connect)
                self._submit()
                self._collect()
                failures = 0
            except Away as away:
                if failures == 0:
                    until = time.monotonic() + self._patience_s
                    self._progress.say(f"{away.error.message}; waiting up to {self._patience_s:g} s")
                self._lose_connection()
                pause = _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]
                if time.monotonic() + pause > until:
                    raise away.error from away
                failures += 1
                time.sleep(pause)  # noqa: TID251 - there is no event loop on this side
            self._stats.running = len(self._running)
            self._progress.show(self._stats)

    def cancel(self) -> int:
        """End what runs; how many are on their way out."""
        cancelled = 0
        if self._running:
            with self._connect() as client:
                for i in range(0, len(self._running), CANCELS):
                    ids = self.running[i : i + CANCELS]
                    cancelled += client.cancel_many(job_ids=ids, reason=INTERRUPTED)
        return cancelled

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _lose_connection(self) -> None:
        """What runs is handed in again: the same job to a daemon that knows it, a new one to any other."""
        self.close()
        self._todo.extendleft(reversed(self._running.values()))
        self._running.clear()

    # --- handing in ---------------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        began = time.monotonic()
        while self._todo and len(self._running) < self._inflight_max and time.monotonic() >= self._submit_at:
            sample = self._todo.popleft()
            # Before it is sent, so that an interrupt finds it, too.
            self._running[sample.job_id] = sample
            try:
                record = self._talk(partial(self._daemon.submit, sample.job))
            except ClientError as exc:
                del self._running[sample.job_id]
                self._refused(sample, exc)
                continue
            self._accepted(sample, record)
            if time.monotonic() - began > POLL_S:
                return

    def _accepted(self, sample: Sample, record: JobRecord) -> None:
        ended = record.state is JobState.DONE and record.outcome is not None
        cancelled = ended and record.outcome is not None and record.outcome.kind is OutcomeKind.CANCELLED
        if cancelled and sample.again < AGAIN_MAX:
            # By an earlier run of ours that was interrupted.
            self._run_again(sample)
        elif ended:
            self._finish(sample, record)

    def _refused(self, sample: Sample, error: ClientError) -> None:
        if error.stable_code in _UNKNOWN and sample.again < AGAIN_MAX:
            # It ended, and nobody took it before it was forgotten.
            self._todo.appendleft(sample.another())
        elif error.may_retry:
            self._submit_at = time.monotonic() + (error.retry_after_s or 1.0)
            self._todo.appendleft(sample)
        else:
            self._stats.refused += 1
            self._progress.refused(f"line {sample.line} is refused: {error.message}")

    # --- taking what has ended ----------------------------------------------------------------------------------------

    def _collect(self) -> None:
        if not self._running:
            if self._todo and (pause := self._submit_at - time.monotonic()) > 0:
                time.sleep(min(pause, POLL_S))  # noqa: TID251
            return
        self._look(next(iter(self._running)), POLL_S)
        if time.monotonic() < self._sweep_at:
            return
        # Newest first: most of what has just ended is on the first pages, stragglers are asked for one by one.
        after: str | None = None
        for _ in range(2 + 2 * len(self._running) // PAGE):
            page = self._talk(partial(self._daemon.list, state="done", limit=PAGE, after=after))
            for record in page.items:
                sample = self._running.get(record.job_id)
                if sample is not None:
                    self._finish(sample, record)
            after = page.next
            if after is None or not self._running:
                break
        for job_id in self.running[:STRAGGLERS]:
            self._look(job_id, 0.0)
        self._sweep_at = time.monotonic() + SWEEP_S

    def _look(self, job_id: str, within_s: float) -> None:
        sample = self._running[job_id]
        try:
            record = self._talk(partial(self._daemon.wait, job_id, within_s=within_s))
        except ClientError as exc:
            self._lost(sample, exc)
            return
        if record.state is JobState.DONE:
            self._finish(sample, record)
        else:
            # To the end of the line, so that the next look is at another one.
            self._running[job_id] = self._running.pop(job_id)

    def _finish(self, sample: Sample, record: JobRecord) -> None:
        if _was_interrupted(record) and sample.again < AGAIN_MAX:
            # By an earlier run of ours, whose cancel was still under way when this one handed the job in.
            self._run_again(sample)
            return
        trajectory = None
        if self._trajectories:
            try:
                trajectory = self._talk(partial(self._daemon.trajectory, sample.job_id))
            except ClientError as exc:
                self._lost(sample, exc)
                return
        assert record.outcome is not None
        self._out.append(OutLine(line=sample.line, instance=sample.job.instance, record=record, trajectory=trajectory))
        del self._running[sample.job_id]
        self._stats.count(record.outcome, record.reward, sampled=record.tokens.sampled)
        self._progress.show(self._stats)

    def _run_again(self, sample: Sample) -> None:
        """Under another id: its own has ended without a result."""
        del self._running[sample.job_id]
        self._todo.appendleft(sample.another())

    def _lost(self, sample: Sample, error: ClientError) -> None:
        """The daemon does not know the job, as one on another state directory, or has forgotten it: once more."""
        if error.stable_code not in _UNKNOWN or sample.again >= AGAIN_MAX:
            raise error
        del self._running[sample.job_id]
        self._todo.appendleft(sample.another() if error.stable_code == "forgotten" else sample)

    # --- the daemon ---------------------------------------------------------------------------------------------------

    @property
    def _daemon(self) -> Client:
        assert self._client is not None
        return self._client

    def _talk(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except ClientError as exc:
            if exc.stable_code in _AWAY:
                raise Away(exc) from exc
            raise


def _was_interrupted(record: JobRecord) -> bool:
    """Whether it was cancelled by the end of a run."""
    outcome = record.outcome
    return outcome is not None and outcome.kind is OutcomeKind.CANCELLED and outcome.message == INTERRUPTED
