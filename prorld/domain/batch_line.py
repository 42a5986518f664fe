"""The groups of a batch that are not settled: what is known of each, and lines of them in submission order. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Literal

from prorld.domain.batch_rules import BatchRules, PolicyNow, Settle
from prorld.domain.group import GroupEnd, SampleEnd, Usable, advantages, causes, is_informative, rewards, usable_sample
from prorld.domain.policy import is_stale
from prorld.domain.versions import PolicyVersion

__all__ = ["Group", "Line"]

# Entries of a line's heap that may be out of date before it is built again.
_SLACK = 64


class Group:
    """One group that is not settled. ``held``: it has run to its end and passes, and waits to be accepted."""

    __slots__ = ("counts_at", "ends", "group_id", "index", "is_cut", "phase", "sampled", "usable")

    def __init__(self, group_id: str, index: int) -> None:
        self.group_id = group_id
        self.index = index
        self.phase: Literal["waiting", "running", "held", "settled"] = "waiting"
        self.ends: dict[int, SampleEnd] = {}
        self.usable: dict[int, Usable] = {}
        self.sampled: set[PolicyVersion] = set()
        # When its stragglers had their grace, and whether they were told to end.
        self.counts_at: float | None = None
        self.is_cut = False

    def sample_ended(self, end: SampleEnd, rules: BatchRules) -> bool:
        """Note it; false for one that is known."""
        assert 0 <= end.sample_index < rules.samples_per_group, end
        if end.sample_index in self.ends:
            return False
        self.ends[end.sample_index] = end
        usable = usable_sample(end, rules.informative, rules.on_timeout)
        if usable is not None:
            self.usable[end.sample_index] = usable
            self.sampled.update(usable.sampled)
        return True

    def missing(self, rules: BatchRules) -> int:
        """Samples that have not ended."""
        return rules.samples_per_group - len(self.ends)

    def stragglers(self, rules: BatchRules) -> tuple[int, ...]:
        """Those that have not ended, by index."""
        return tuple(index for index in range(rules.samples_per_group) if index not in self.ends)

    def counted(self) -> list[Usable]:
        """The usable samples by index."""
        return [self.usable[index] for index in sorted(self.usable)]

    def is_informative(self, rules: BatchRules) -> bool:
        """Whether training can learn from it."""
        return is_informative(self.counted(), rules.informative)

    def is_stale(self, policy: PolicyNow, rules: BatchRules) -> bool:
        """Whether it is too old already. It can't get younger."""
        if rules.is_eval:
            return False
        return is_stale(self.sampled, policy.version, policy.rollbacks, rules.max_staleness)

    def staleness(self, policy: PolicyNow) -> int | None:
        """Versions that the policy went on since its oldest usable sample; unknown where no version is."""
        oldest = min((version.version for version in self.sampled), default=None)
        return None if oldest is None else max(0, policy.version.version - oldest)

    def settle(self, end: GroupEnd, reason: str, rules: BatchRules, policy: PolicyNow) -> Settle:
        """Its end in the batch, with everything that is known of its samples."""
        is_judged = self.phase == "held" or end is GroupEnd.FILTERED
        counted, n = self.counted(), rules.samples_per_group
        gets_advantages = end in {GroupEnd.DONE, GroupEnd.FILTERED}
        return Settle(
            group_id=self.group_id,
            index=self.index,
            end=end,
            reason=reason,
            rewards=rewards(self.ends.values(), counted, n),
            advantages=tuple(advantages(counted, n)) if gets_advantages else (None,) * n,
            staleness=self.staleness(policy) if end is GroupEnd.DONE else None,
            informative=self.is_informative(rules) if is_judged else None,
            ends=tuple(self.ends[index] for index in sorted(self.ends)),
        )

    def why_stale(self, policy: PolicyNow, rules: BatchRules) -> str:
        """The reason of a group that is too old."""
        allowed = rules.max_staleness
        limit = "what a rollback took back is too old" if allowed is None else f"allowed are {allowed} versions"
        return f"sampled from {min(self.sampled).label} on, and the policy has {policy.version.label}; {limit}"

    def why_failed(self, rules: BatchRules) -> str:
        """The reason of its failure, with the causes counted."""
        n, missing = rules.samples_per_group, self.missing(rules)
        words = f"{len(self.usable)} of {n} samples can be used, and {rules.min_usable} are needed"
        counted = causes(self.ends.values(), rules.informative, rules.on_timeout)
        ended = f"; {missing} that still ran could not change that" if missing else ""
        return f"{words}: {counted}{ended}"


class Line:
    """Groups by index. The first is found, one is added or taken out in O(log n), at most, on average."""

    __slots__ = ("_heap", "_members")

    def __init__(self) -> None:
        self._members: dict[str, Group] = {}
        self._heap: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._members.values())

    def add(self, group: Group) -> None:
        """Put it in its place."""
        self._members[group.group_id] = group
        heapq.heappush(self._heap, (group.index, group.group_id))

    def discard(self, group: Group) -> None:
        """Take it out."""
        if self._members.pop(group.group_id, None) is None:
            return
        # What is out of date is dropped when it comes to the top, and all of it before it is the larger part.
        if len(self._heap) > 2 * len(self._members) + _SLACK:
            self._heap = [(member.index, member.group_id) for member in self._members.values()]
            heapq.heapify(self._heap)

    def first(self) -> Group | None:
        """The one that was submitted first."""
        while self._heap:
            member = self._members.get(self._heap[0][1])
            if member is not None:
                return member
            heapq.heappop(self._heap)
        return None
