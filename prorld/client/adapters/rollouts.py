"""Rows in, ended rollouts out: in the trainer's order, each row with what became of it, none of it made up.

A call is one batch, or one for each size of group. Its id is made of the run, the step and all that was asked for, so
that a trainer that was killed and asks again finds its rollouts, and one that asks for something else never does.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, repeat
from math import fsum
from typing import Any, NamedTuple

import msgspec

from prorld.client.adapters.engines import use_engines
from prorld.client.adapters.settings import BAD_SETTINGS, AdapterSettings, plain
from prorld.client.errors import NOTHING_NEW, ClientError
from prorld.client.sync import Client
from prorld.domain.batch import BatchState, Informative, Quorum
from prorld.domain.job import Sampling
from prorld.export.reading import is_usable
from prorld.wire.batches import BatchEvent, BatchRecord, PackedBatchGroup, SubmitBatch
from prorld.wire.ops import SetBackend
from prorld.wire.trajectory import PackedTrajectory

__all__ = [
    "NO_USABLE",
    "Group",
    "Prompt",
    "Rollout",
    "Rollouts",
    "figures_of",
    "instance_from",
    "neutral_rewards",
    "prompts_of",
]

NO_USABLE = "no_usable_rollout"
BATCH_ENDED = "batch_ended_early"
# Stragglers are the daemon's to end, by the timeouts of their stages; a group never leaves them behind.
GRACE_S = 7 * 86400.0
# How often the same step is asked for again after its rollouts were used: a trainer that went back to a checkpoint.
REPEATS_MAX = 100
# How often a trainer's engines are looked for while nothing comes.
LOOK_S = 10.0
_DIGEST_CHARS = 16
# A spread needs two.
_SPREAD_MIN = 2
_FORGOTTEN = 410
_CANCELLED = "group.cancelled"
_ENDS_WITHOUT = frozenset({"group.failed", "group.filtered", "group.stale", "group.cancelled", "group.carried"})
_RUN_BYTES = 6


class Prompt(NamedTuple):
    """One instance, and how many rollouts of it are wanted."""

    instance: dict[str, Any]
    samples: int


class Rollout(NamedTuple):
    """What became of one sample. Without a document there is nothing of it: not a zero, and not a token.

    With one it may still be masked or dropped; ``is_usable`` says whether training may use it.
    """

    job_id: str | None = None
    verdict: str | None = None
    document: PackedTrajectory | None = None

    @property
    def is_usable(self) -> bool:
        """Whether it may be trained on."""
        return self.document is not None and is_usable(self.document)

    @property
    def reward(self) -> float | None:
        """Its reward, where it is usable."""
        return None if self.document is None or not self.is_usable else self.document.reward


class Group(NamedTuple):
    """The rollouts of one prompt by sample index; ``place`` is the prompt's, ``reason`` says why there are none.

    ``is_unfinished`` is one that was not needed any more; its prompt has not been used.
    """

    place: int
    rollouts: list[Rollout]
    reason: str | None = None
    is_unfinished: bool = False


class Rollouts:
    """Asks a daemon for rollouts, again and again, for one trainer. Blocks; not for several threads at once."""

    def __init__(self, settings: AdapterSettings, client: Client | None = None) -> None:
        self.settings = settings
        self.client = client or Client(settings.address, settings.token, settings.state_dir, patience_s=settings.away_s)
        # Without a name nobody can ask for these again, and what nobody can ask for is cancelled when we leave.
        self._is_named = settings.run is not None
        self._run = settings.run or f"run-{secrets.token_hex(_RUN_BYTES)}"
        self._used: list[tuple[str, int]] = []
        # The trainer's own, where it has some.
        self.engines: Sequence[SetBackend] = ()

    def close(self) -> None:
        """Acknowledge what was handed out last. For the end of training, when its last step is safe."""
        try:
            self._acknowledge()
        finally:
            self.client.close()

    def collect(
        self,
        step: str,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        is_eval: bool = False,
        target: int | None = None,
        is_more: bool = False,
    ) -> list[Group]:
        """The rollouts of these prompts, in their order; with ``target`` it stops when so many groups are there.

        What an earlier call handed out is acknowledged first, for who asks again has trained on that; with ``is_more``
        it has not. Raises ``ClientError`` where every group was wanted and not one rollout is usable.
        """
        if not is_more:
            self._acknowledge()
        groups: list[Group | None] = [None] * len(prompts)
        places: dict[int, list[int]] = {}
        for place, prompt in enumerate(prompts):
            places.setdefault(prompt.samples, []).append(place)
        asked: list[tuple[BatchRecord, list[int]]] = []
        try:
            for size, some in places.items():
                batch = self._batch(
                    [prompts[place].instance for place in some], size, sampling, target, is_eval=is_eval
                )
                asked.append((self._submit(step, batch), some))
            for record, some in asked:
                for group in self._read(record):
                    groups[some[group.place]] = group._replace(place=some[group.place])
        except BaseException:
            if not self._is_named:
                self._leave([record.batch_id for record, _ in asked])
            raise
        found = [group or _missing(place, prompts[place].samples) for place, group in enumerate(groups)]
        if prompts and target is None:
            _some_usable(found)
        return found

    def _batch(
        self, instances: list[dict[str, Any]], size: int, sampling: Sampling, target: int | None, *, is_eval: bool
    ) -> SubmitBatch:
        settings = self.settings
        wanted = min(target or len(instances), len(instances))
        # An evaluation is for its rewards, informative or not.
        rule = "all" if is_eval or size < _SPREAD_MIN else settings.informative
        quorum = Quorum(min_usable=_SPREAD_MIN if rule == "spread" else 1, grace_s=GRACE_S if size > 1 else 0.0)
        return SubmitBatch(
            instances=instances, last=True, handler=settings.handler, policy=settings.policy,
            purpose="eval" if is_eval else "train", samples_per_group=size, target_groups=wanted,
            max_running_groups=len(instances), max_ready_groups=len(instances), selection="submission",
            informative=Informative(rule=rule), quorum=quorum, leftovers="cancel", max_staleness=None,
            max_attempts=settings.max_attempts, sampling=sampling, agent=settings.agent,
            timeouts=settings.timeouts, priority=settings.priority,
        )  # fmt: skip

    def _submit(self, step: str, batch: SubmitBatch) -> BatchRecord:
        digest = hashlib.sha256(msgspec.json.encode(batch)).hexdigest()[:_DIGEST_CHARS]
        name = f"{self._run}-{step}-{digest}"
        for again in range(REPEATS_MAX):
            batch_id = name if not again else f"{name}-{again}"
            try:
                record = self.client.submit_batch(msgspec.structs.replace(batch, batch_id=batch_id))
            except ClientError as exc:
                if exc.status != _FORGOTTEN:
                    raise
                continue
            # Those were used already, or are gone: whoever asks for the step again has gone back, and gets new ones.
            if not record.acknowledged and record.state is not BatchState.CANCELLED:
                return record
        raise ClientError(f"{name} was asked for {REPEATS_MAX} times: name another run", code=BAD_SETTINGS)

    def _read(self, record: BatchRecord) -> Iterator[Group]:
        batch_id, settings = record.batch_id, self.settings
        for group in self._arriving(batch_id):
            yield _group_of(group)
        seq = 0
        for event in self.client.batch_events(batch_id, within_s=settings.rollouts_s, away_s=settings.away_s):
            seq = event.seq
            if event.event == "batch.end":
                _whole(batch_id, event)
            elif event.event in _ENDS_WITHOUT:
                yield _group_without(event, record.samples_per_group)
        self._used.append((batch_id, seq))

    def _arriving(self, batch_id: str) -> Iterator[PackedBatchGroup]:
        """Groups as they come. While nothing comes it is seen to that the trainer's engines are there."""
        settings, after, heard = self.settings, 0, time.monotonic()
        while True:
            left = max(0.0, heard + settings.rollouts_s - time.monotonic())
            try:
                for group in self.client.groups(
                    batch_id, after=after, trajectories=True, within_s=min(left, LOOK_S), away_s=settings.away_s
                ):
                    after, heard = group.seq, time.monotonic()
                    yield group
            except ClientError as exc:
                if exc.stable_code != NOTHING_NEW or left <= LOOK_S:
                    raise
            else:
                return
            # Those that can't be had now are asked for again: the wait has an end of its own.
            with suppress(ClientError):
                use_engines(self.client, settings.policy, self.engines)

    def _acknowledge(self) -> None:
        while self._used:
            batch_id, seq = self._used[-1]
            self.client.ack(batch_id, seq, away_s=self.settings.away_s)
            self._used.pop()

    def _leave(self, batch_ids: Sequence[str]) -> None:
        """Nobody will come for these. A daemon that can't be told loses nothing: they end by themselves."""
        for batch_id in batch_ids:
            with suppress(ClientError):
                self.client.cancel_batch(batch_id, reason="the trainer left")


def prompts_of(instances: Iterable[dict[str, Any]], names: Iterable[object] | None = None) -> list[Prompt]:
    """Rows as trainers repeat them: neighbours with the same instance, and the same name, are samples of one prompt."""
    rows = [(one, name) for one, name in zip(instances, repeat(None) if names is None else names, strict=False)]
    runs = [[one for one, _ in some] for _, some in groupby(rows, key=_same)]
    return [Prompt(run[0], len(run)) for run in runs]


def _same(row: tuple[dict[str, Any], object]) -> tuple[bytes, str]:
    return msgspec.json.encode(row[0], order="sorted"), str(row[1])


def neutral_rewards(groups: Sequence[Group]) -> list[float]:
    """A number for each rollout, for trainers that want one in every row: its reward where it is usable.

    Any other one gets the mean of its group's usable ones, so that it moves no baseline; in a group without any, that
    of all. Such a row has an empty mask. (The deviation within its group becomes a little smaller by it.)
    """
    known = [[one.reward for one in group.rollouts if one.reward is not None] for group in groups]
    every = [reward for some in known for reward in some]
    middle = fsum(every) / len(every) if every else 0.0
    found: list[float] = []
    for group, some in zip(groups, known, strict=True):
        neutral = fsum(some) / len(some) if some else middle
        found += [neutral if one.reward is None else one.reward for one in group.rollouts]
    return found


def figures_of(groups: Sequence[Group]) -> dict[str, float]:
    """What a trainer logs beside its own: how many rollouts may be trained on, and how many of each other verdict."""
    every = [one for group in groups for one in group.rollouts]
    told = Counter(str(one.verdict) for one in every if not one.is_usable)
    return {
        "prorld/usable": float(sum(one.is_usable for one in every)),
        **{f"prorld/unusable_{verdict}": float(count) for verdict, count in sorted(told.items())},
    }


def instance_from(value: Any, where: str) -> dict[str, Any]:
    """An instance as it stands in a row: a mapping, or its JSON. Raises ``ClientError`` that names the row."""
    if isinstance(value, str | bytes):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as exc:
            raise ClientError(f"{where} is no instance as JSON: {exc}", code=BAD_SETTINGS) from exc
    elif value is not None:
        value = plain(value)
    if not isinstance(value, Mapping) or not value:
        raise ClientError(f"{where} is no instance, but {_shown(value)}", code=BAD_SETTINGS)
    return {str(name): item for name, item in value.items()}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _group_of(group: PackedBatchGroup) -> Group:
    documents = group.trajectories or [None] * len(group.rewards)
    ends = zip(group.job_ids, group.verdicts, documents, strict=True)
    return Group(group.index, [Rollout(*end) for end in ends])


def _group_without(event: BatchEvent, size: int) -> Group:
    job_ids = event.job_ids if isinstance(event.job_ids, list) else [None] * size
    verdicts = event.verdicts if isinstance(event.verdicts, list) else [None] * size
    reason = f"{event.event}: {event.reason}" if isinstance(event.reason, str) else event.event
    rollouts = [Rollout(*end) for end in zip(job_ids, verdicts, strict=True)]
    return Group(event.index if isinstance(event.index, int) else 0, rollouts, reason, event.event == _CANCELLED)


def _missing(index: int, size: int) -> Group:
    return Group(index, [Rollout()] * size, "the batch ended before it")


def _whole(batch_id: str, event: BatchEvent) -> None:
    """A batch that was cut off is no result: what is missing of it would look like prompts that are too hard."""
    if event.state in {BatchState.FAILED, BatchState.CANCELLED}:
        message = f"batch {batch_id} ended {event.state}: {event.reason}"
        raise ClientError(message, code=BATCH_ENDED, details={"batch_id": batch_id})


def _some_usable(groups: Sequence[Group]) -> None:
    if any(rollout.is_usable for group in groups for rollout in group.rollouts):
        return
    verdicts = Counter(str(rollout.verdict) for group in groups for rollout in group.rollouts)
    reasons = [group.reason for group in groups if group.reason is not None]
    told = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    message = f"no rollout of {verdicts.total()} may be trained on ({told})"
    raise ClientError(message + (f"; the first: {reasons[0]}" if reasons else ""), code=NO_USABLE)
