"""Where groups come from: a batch for each step, or one stream that never waits for the trainer.

Both hand out whole groups and acknowledge nothing: that is the loop's, once a checkpoint has what came of them. A batch
is fed as it wants to be, by number, so a life that goes on feeds it the very same prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from prorld.client import Client, ClientError, usable
from prorld.domain.batch import BatchState, Informative
from prorld.export.rows import rows_of
from prorld.train.prompts import Prompts
from prorld.train.records import Seen
from prorld.train.run_config import RunSettings
from prorld.train.shapes import TrainGroup, TrainSample
from prorld.wire.batches import BatchRecord, PackedBatchGroup, SubmitBatch

__all__ = ["AWAY_S", "Collected", "Rollouts", "Source", "StepBatches", "Stopped", "Stream", "source_of"]

# How long a daemon may be gone.
AWAY_S = 600.0
# How often a batch is asked what it wants while nothing comes, and how often the engines are looked at.
SLICE_S = 1.0
LOOK_S = 10.0
_ENDED = "batch_ended"
# The second: an earlier life met the first, and submitted the batch without.
_NOTHING_LEFT = frozenset({"leftovers_expired", "batch_exists"})
# Never there, or forgotten.
_GONE = (404, 410)
# A group that waits for its end is worth waiting for as long as the rollouts may take; past that somebody should look.
STALLED_S = 3600.0


class Stopped(Exception):
    """The run was told to stop while it waited for groups."""


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of a step. ``cursor``, ``seq`` and ``seen_all`` are where the source is after them."""

    batch_id: str
    groups: list[TrainGroup]
    seen: Seen
    seen_all: Seen
    cursor: int
    seq: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """What both kinds of source need.

    ``look`` is called now and then while nothing comes, ``say`` hears how far it is, ``warn`` what went wrong.
    """

    client: Client
    settings: RunSettings
    prompts: Prompts
    run_id: str
    should_stop: Callable[[], bool]
    look: Callable[[], None]
    say: Callable[[str], None]
    warn: Callable[[str], None]

    def batch(self, batch_id: str, cursor: int, first: int) -> SubmitBatch:
        """What is the same for both, with the first prompts."""
        settings, groups = self.settings, self.settings.groups
        return SubmitBatch(
            batch_id=batch_id,
            handler=settings.tasks.handler,
            policy=settings.policy,
            instances=self.prompts(cursor, first),
            last=False,
            samples_per_group=groups.samples,
            informative=Informative(rule=groups.rule),
            max_running_groups=groups.running,
            max_staleness=groups.max_staleness,
            sampling=settings.sampling.sampling(),
            agent=settings.sampling.limits(),
        )

    def feed(self, batch_id: str, cursor: int, ahead: Callable[[BatchRecord], int] | None = None) -> BatchRecord:
        """Give a batch what it wants, from the prompts after ``cursor``; what is known of it now.

        ``ahead`` says how many it may be given at most by now, all told.
        """
        record = self.client.batch(batch_id)
        total = record.wants if ahead is None else min(record.wants, ahead(record))
        more = total - record.next_offset
        if record.state is BatchState.RUNNING and more > 0 and not record.is_last:
            new = self.prompts(cursor + record.next_offset, more)
            try:
                self.client.append_instances(batch_id, new, offset=record.next_offset)
            except ClientError as exc:
                if exc.stable_code != _ENDED:
                    raise
        return record

    def arriving(self, batch_id: str, after: int, feed: Callable[[], object]) -> Iterator[PackedBatchGroup | None]:
        """Groups as they come, feeding the batch meanwhile; ``None`` each time that nothing came for a moment."""
        looked = heard = time.monotonic()
        while True:
            if self.should_stop():
                raise Stopped
            try:
                for group in self.client.groups(
                    batch_id, after=after, trajectories=True, within_s=SLICE_S, away_s=AWAY_S
                ):
                    after, heard = group.seq, time.monotonic()
                    yield group
                    feed()
            except ClientError as exc:
                if exc.stable_code != "nothing_new":
                    raise
            else:
                return
            now = time.monotonic()
            if now - heard > STALLED_S:
                raise ClientError(f"no group of batch {batch_id} came within {STALLED_S:g} s", code="stalled")
            if now - looked > LOOK_S:
                self.look()
                looked = now
            yield None


class Source(Protocol):
    """Where a step's groups come from."""

    def collect(self, step: int, cursor: int, seq: int, seen: Seen) -> Collected:
        """The groups of the step after ``step`` ones. Raises ``Stopped``."""
        ...

    def given(self) -> int:
        """How many prompts what goes on was given that no ``cursor`` counts."""
        ...

    def close(self, step: int) -> None:
        """End what goes on for nobody."""
        ...


class StepBatches:
    """A batch for each step. What one leaves unfinished the next one goes on with."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._all = rollouts

    def _name(self, step: int) -> str:
        return f"{self._all.run_id}-{step}"

    def collect(self, step: int, cursor: int, seq: int, seen: Seen) -> Collected:
        """Submit the batch, or find the one that an earlier life submitted, and wait for its end."""
        everything, settings = self._all, self._all.settings.groups
        began, name = time.monotonic(), self._name(step)
        carries = settings.leftovers == "carry" and step > 0
        batch = msgspec.structs.replace(
            everything.batch(name, cursor, settings.per_step),
            # Where every group counts there is none to replace: no prompt more, and nothing runs beside training.
            last=settings.rule == "all",
            target_groups=settings.per_step,
            max_groups=settings.per_step * settings.prompts_per_group,
            leftovers=settings.leftovers,
            carry_from=self._name(step - 1) if carries else None,
        )
        self._submit(batch)
        found: list[TrainGroup] = []
        last = 0
        feed = (lambda: None) if batch.last else partial(everything.feed, name, cursor)
        for group in everything.arriving(name, 0, feed):
            if group is not None:
                found.append(to_train(group))
                last = group.seq
            else:
                feed()
            everything.say(f"step {step + 1}: {len(found)} of {settings.per_step} groups")
        record = everything.client.batch(name)
        if record.state in (BatchState.FAILED, BatchState.CANCELLED):
            raise ClientError(f"batch {name} {record.state.value}: {record.reason}", code="batch_lost")
        return Collected(
            batch_id=name,
            groups=found,
            seen=seen_of(record),
            seen_all=Seen(),
            cursor=cursor + record.next_offset,
            seq=last,
            seconds=time.monotonic() - began,
        )

    def _submit(self, batch: SubmitBatch) -> None:
        """With what the batch before left, unless that is gone: a pause of the run may be longer than it is kept."""
        try:
            self._all.client.submit_batch(batch)
        except ClientError as exc:
            if batch.carry_from is None or exc.stable_code not in _NOTHING_LEFT:
                raise
            self._all.client.submit_batch(msgspec.structs.replace(batch, carry_from=None))

    def given(self) -> int:
        """None: each batch has ended with its step."""
        return 0

    def close(self, step: int) -> None:
        """What the last batch left is for no other one."""
        if step:
            _cancel(self._all.client, self._name(step - 1))


class Stream:
    """One batch without a target: rollouts go on while the trainer trains, as far ahead as ``max_ready`` lets them.

    At the end of the run it is cancelled; where the run goes on later it has another, of the next ``number``.
    """

    def __init__(self, rollouts: Rollouts, number: int) -> None:
        self._all = rollouts
        self._names = [f"{rollouts.run_id}-stream{n or ''}" for n in range(number + 1)]
        self._name = self._names[-1]

    def collect(self, step: int, cursor: int, seq: int, seen: Seen) -> Collected:
        """The next groups of the stream; fewer where so many prompts taught nothing that it looks solved."""
        everything, settings = self._all, self._all.settings.groups
        began = time.monotonic()
        stream = everything.batch(self._name, cursor, settings.per_step)
        bound = everything.settings.unacknowledged
        everything.client.submit_batch(msgspec.structs.replace(stream, max_ready_groups=bound))
        found: list[TrainGroup] = []

        def feed() -> BatchRecord:
            return everything.feed(self._name, cursor, partial(self._ahead, seen.used + len(found)))

        feed()
        tried_max = settings.per_step * settings.prompts_per_group
        for group in everything.arriving(self._name, seq, feed):
            if group is not None:
                found.append(to_train(group))
                seq = group.seq
                if len(found) == settings.per_step:
                    break
            elif seen_of(feed()).since(seen).groups >= tried_max:
                break
            everything.say(f"step {step + 1}: {len(found)} of {settings.per_step} groups")
        record = everything.client.batch(self._name)
        if record.state in (BatchState.FAILED, BatchState.CANCELLED):
            raise ClientError(f"batch {self._name} {record.state.value}: {record.reason}", code="batch_lost")
        now = msgspec.structs.replace(seen_of(record), used=seen.used + len(found))
        return Collected(
            batch_id=self._name,
            groups=found,
            seen=now.since(seen),
            seen_all=now,
            cursor=cursor,
            seq=seq,
            seconds=time.monotonic() - began,
        )

    def _ahead(self, used: int, record: BatchRecord) -> int:
        """How many prompts it may have by now: those that run, and so many that wait for the trainer beside them."""
        groups, settings = record.groups, self._all.settings.groups
        lost = groups.uninformative + groups.failed + groups.stale + groups.cancelled
        return used + lost + settings.running + settings.max_ready

    def given(self) -> int:
        """All of its prompts, where there is one."""
        try:
            return self._all.client.batch(self._name).next_offset
        except ClientError as exc:
            if exc.status not in _GONE:
                raise
            return 0

    def close(self, step: int) -> None:
        """Nobody takes what still runs; of the one before, too, where a life was killed before it had said so."""
        for name in self._names[-2:]:
            _cancel(self._all.client, name)


def source_of(rollouts: Rollouts, streams: int) -> Source:
    """The one that the settings ask for, after so many streams."""
    return Stream(rollouts, streams) if rollouts.settings.mode == "async" else StepBatches(rollouts)


def _cancel(client: Client, batch_id: str) -> None:
    try:
        client.cancel_batch(batch_id, reason="the run is over")
    except ClientError as exc:
        # Gone already, or never there: then there is nothing to end.
        if exc.status not in (*_GONE, 409):
            raise


def to_train(group: PackedBatchGroup) -> TrainGroup:
    """The samples that count, with a row for each of their branches."""
    samples = [
        TrainSample(
            sample_index=sample.sample_index,
            reward=sample.reward,
            advantage=sample.advantage,
            rows=[] if sample.trajectory is None else rows_of(sample.trajectory),
        )
        for sample in usable(group)
    ]
    return TrainGroup(group_id=group.group_id, staleness=group.staleness or 0, samples=samples)


def seen_of(record: BatchRecord) -> Seen:
    """All groups of a batch that ran to their end."""
    before = record.before_filter
    return Seen(
        groups=before.groups,
        samples=before.samples,
        reward_sum=(before.reward_mean or 0.0) * before.samples,
        solved_all=before.solved_all,
        solved_none=before.solved_none,
        wasted_rollouts=record.waste.jobs,
        wasted_tokens=record.waste.sampled_tokens,
    )
