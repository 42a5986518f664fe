"""What is counted of a batch, and how it is shown: the statistics of the domain, and groups by their ends. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from prorld.domain.batch import BatchRules, Settle
from prorld.domain.batch_stats import BatchStatistics
from prorld.domain.group import GroupEnd, SampleEnd
from prorld.wire.batches import BeforeFilter, Durations, EndCounts, GroupCounts, StalenessSeen, Waste

__all__ = ["Tally"]


class Tally(msgspec.Struct, kw_only=True):
    """All of it. It is written with the events that it counts."""

    ends: dict[str, int] = {}
    stats: BatchStatistics = msgspec.field(default_factory=BatchStatistics)

    def settle(self, settle: Settle, samples: Iterable[SampleEnd], rules: BatchRules) -> None:
        """A group has its end; ``samples`` are all of its samples that ended, by now."""
        self.ends[settle.end.value] = self.ends.get(settle.end.value, 0) + 1
        self.stats.settled(settle, rules)
        known = {end.sample_index for end in settle.ends}
        for end in samples:
            if end.sample_index not in known:
                self.stats.sample_ended_late(settle.end, end)

    # --- what is shown ------------------------------------------------------------------------------------------------

    def counts(self, *, waiting: int = 0, running: int = 0) -> GroupCounts:
        """Groups by where they are."""
        found = {GroupEnd(name): count for name, count in self.ends.items()}
        return GroupCounts(
            waiting=waiting, running=running, informative=found.get(GroupEnd.DONE, 0),
            uninformative=found.get(GroupEnd.FILTERED, 0), failed=found.get(GroupEnd.FAILED, 0),
            stale=found.get(GroupEnd.STALE, 0), cancelled=found.get(GroupEnd.CANCELLED, 0),
            carried=found.get(GroupEnd.CARRIED, 0),
        )  # fmt: skip

    def end_counts(self) -> EndCounts:
        """All groups of a batch that is over."""
        return EndCounts(submitted=sum(self.ends.values()), **self.ends)

    def before_filter(self) -> BeforeFilter:
        """Rewards of all that ran to their end."""
        stats = self.stats
        return BeforeFilter(
            groups=stats.groups, samples=stats.rewards.count, reward_mean=stats.rewards.value,
            reward_histogram=dict(stats.histogram), solved_none=stats.solved_none, solved_all=stats.solved_all,
            kept_fraction=stats.kept_fraction,
        )  # fmt: skip

    def durations(self) -> Durations:
        """How long rollouts took, and what that means for those that were accepted."""
        stats = self.stats
        return Durations(
            accepted_mean_s=stats.accepted_s.value, informative_mean_s=stats.informative_s.value,
            all_mean_s=stats.all_s.value, bias=stats.bias,
        )  # fmt: skip

    def waste(self) -> Waste:
        """What no trainer gets."""
        stats = self.stats
        return Waste(jobs=stats.wasted_jobs, sampled_tokens=stats.wasted_tokens, seconds=round(stats.wasted_s, 6))

    def staleness_seen(self) -> StalenessSeen:
        """Of the accepted groups."""
        return StalenessSeen(mean=self.stats.staleness.value, max=self.stats.staleness_max)
