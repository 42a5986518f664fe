"""What a batch has seen, whatever it let through: rewards before the filter, durations, ages, waste. Pure, adds up.

A group counts in the batch in which it ends for good; one that is carried counts in the batch that claims it. Durations
are per sample, in seconds of work: of accepted groups, of all groups that training could have learnt from, and of
everything that ended by itself. Where the first is below the second, speed has decided what is trained on.
"""

from __future__ import annotations

import msgspec

from prorld.domain.batch_rules import BatchRules, Settle
from prorld.domain.group import GroupEnd, SampleEnd, Usable, usable_samples
from prorld.domain.outcome import OutcomeKind

__all__ = ["HISTOGRAM_REWARDS", "OTHER_REWARDS", "BatchStatistics", "Mean"]

# Different rewards that are counted apart; all others are counted under one name.
HISTOGRAM_REWARDS = 32
OTHER_REWARDS = "other"

# Samples of these groups no trainer gets.
_WASTED = frozenset({GroupEnd.FILTERED, GroupEnd.FAILED, GroupEnd.STALE, GroupEnd.CANCELLED})


class Mean(msgspec.Struct):
    """A mean that can be added to."""

    count: int = 0
    total: float = 0.0

    def add(self, value: float) -> None:
        """One more."""
        self.count += 1
        self.total += value

    @property
    def value(self) -> float | None:
        """The mean; ``None`` of nothing."""
        return self.total / self.count if self.count else None


class BatchStatistics(msgspec.Struct, kw_only=True):
    """All of it, as it is written down with the batch.

    ``groups`` ran to their end, and training could learn from ``kept`` of them. ``rewards`` are of their usable
    samples, as their groups count them. A sample is solved where its metric is 1 or more, and not at all at 0 or less.
    """

    groups: int = 0
    kept: int = 0
    rewards: Mean = msgspec.field(default_factory=Mean)
    histogram: dict[str, int] = {}
    solved_none: int = 0
    solved_all: int = 0
    accepted_s: Mean = msgspec.field(default_factory=Mean)
    informative_s: Mean = msgspec.field(default_factory=Mean)
    all_s: Mean = msgspec.field(default_factory=Mean)
    staleness: Mean = msgspec.field(default_factory=Mean)
    staleness_max: int | None = None
    wasted_jobs: int = 0
    wasted_tokens: int = 0
    wasted_s: float = 0.0

    def settled(self, settle: Settle, rules: BatchRules) -> None:
        """A group has its end in the batch; once for each."""
        if settle.end is GroupEnd.CARRIED:
            return
        for end in settle.ends:
            self._sample_ended(settle.end, end)
        if settle.end is GroupEnd.DONE and settle.staleness is not None:
            self.staleness.add(settle.staleness)
            self.staleness_max = max(settle.staleness, self.staleness_max or 0)
        if settle.informative is not None:
            counted = usable_samples(settle.ends, rules.informative, rules.on_timeout)
            self._ran_to_its_end(settle, counted)

    def sample_ended_late(self, group_end: GroupEnd, end: SampleEnd) -> None:
        """A sample of a group that was settled before has ended now."""
        if group_end is not GroupEnd.CARRIED:
            self._sample_ended(group_end, end)

    def thrown_away(self, end: SampleEnd) -> None:
        """A sample of a carried group that nobody has claimed in time."""
        self._sample_ended(GroupEnd.CANCELLED, end)

    @property
    def kept_fraction(self) -> float | None:
        """The share of groups that training could learn from."""
        return self.kept / self.groups if self.groups else None

    @property
    def bias(self) -> float | None:
        """How much longer accepted samples took than those of all informative groups: -0.3 for 30 % shorter."""
        accepted, informative = self.accepted_s.value, self.informative_s.value
        return accepted / informative - 1 if accepted is not None and informative else None

    def _sample_ended(self, group_end: GroupEnd, end: SampleEnd) -> None:
        if end.kind is not OutcomeKind.CANCELLED:
            self.all_s.add(end.duration_s)
        if group_end in _WASTED:
            self.wasted_jobs += 1
            self.wasted_tokens += end.sampled_tokens
            self.wasted_s += end.duration_s

    def _ran_to_its_end(self, settle: Settle, counted: list[Usable]) -> None:
        self.groups += 1
        self.kept += bool(settle.informative)
        for sample in counted:
            self.rewards.add(sample.reward)
            self._in_histogram(sample.reward)
        if counted:
            self.solved_none += all(sample.metric <= 0 for sample in counted)
            self.solved_all += all(sample.metric >= 1 for sample in counted)
        if not settle.informative:
            return
        usable = {sample.sample_index for sample in counted}
        for end in settle.ends:
            if end.sample_index in usable:
                self.informative_s.add(end.duration_s)
                if settle.end is GroupEnd.DONE:
                    self.accepted_s.add(end.duration_s)

    def _in_histogram(self, reward: float) -> None:
        # Adding 0.0 makes one zero of both.
        name = f"{reward + 0.0:.4g}"
        if name not in self.histogram and len(self.histogram) >= HISTOGRAM_REWARDS:
            name = OTHER_REWARDS
        self.histogram[name] = self.histogram.get(name, 0) + 1
