"""A batch's book with everything around it: what is written down, who is told, and the laws that hold at each step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from prorld.domain.batch import (
    BatchBook,
    BatchRules,
    BatchState,
    CancelSamples,
    Decision,
    End,
    PolicyNow,
    Settle,
    Start,
    Wants,
)
from prorld.domain.group import GroupEnd, SampleEnd, advantages, is_informative, usable_samples
from prorld.domain.outcome import OutcomeKind, Verdict
from prorld.domain.policy import is_stale
from prorld.domain.versions import PolicyVersion


def rules(**changes: object) -> BatchRules:
    """Groups of two, in a small window."""
    n = changes.get("samples_per_group", 2)
    defaults: dict[str, object] = {
        "samples_per_group": n,
        "target_groups": 2,
        "max_running_groups": 3,
        "max_ready_groups": 4,
        "min_usable": n,
    }
    return BatchRules(**{**defaults, **changes})  # type: ignore[arg-type]


def used(index: int, reward: float, version: int = 0, **changes: object) -> SampleEnd:
    """A sample that was graded."""
    fields: dict[str, object] = {
        "sample_index": index,
        "kind": OutcomeKind.OK,
        "verdict": Verdict.USE,
        "reward": reward,
        "oldest": PolicyVersion(0, version),
        "duration_s": 1.0,
        "sampled_tokens": 10,
    }
    return SampleEnd(**{**fields, **changes})  # type: ignore[arg-type]


def lost(index: int, kind: OutcomeKind = OutcomeKind.ENV_ERROR, **changes: object) -> SampleEnd:
    """A sample that does not count."""
    verdict = Verdict.MASK if kind is OutcomeKind.TIMEOUT else Verdict.DROP
    fields: dict[str, object] = {"sample_index": index, "kind": kind, "verdict": verdict, "duration_s": 1.0}
    return SampleEnd(**{**fields, **changes})  # type: ignore[arg-type]


def at(version: int, *rollbacks: int) -> PolicyNow:
    """A policy."""
    return PolicyNow(version=PolicyVersion(len(rollbacks), version), rollbacks=rollbacks)


@dataclass
class Disk:
    """What would be written down of a batch."""

    appended: list[str] = field(default_factory=list)
    is_last: bool = False
    started: set[str] = field(default_factory=set)
    ends: dict[str, dict[int, SampleEnd]] = field(default_factory=dict)
    settled: dict[str, Settle] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)
    wanted: int = 0

    def book(self, rules: BatchRules, *, order: int = 0) -> BatchBook:
        """The book built again; ``order`` turns round the order in which facts are told."""
        book = BatchBook(rules)
        book.append(self.appended)
        if self.is_last:
            book.no_more()
        book.wanted(self.wanted)
        ends = [(group, end) for group, ends in self.ends.items() for end in ends.values()]
        started, settled = sorted(self.started), list(self.settled.values())
        if order % 2:
            ends.reverse()
            started.reverse()
            settled.reverse()
        for step in range(3):
            match (step + order) % 3:
                case 0:
                    for group in started:
                        book.started(group)
                case 1:
                    for one in settled:
                        book.settled(one, is_acknowledged=one.group_id in self.acknowledged)
                case _:
                    for group, end in ends:
                        book.sample_ended(group, end)
        return book


class World:
    """Follows every decision, writes it down, and checks it."""

    def __init__(self, asked: BatchRules) -> None:
        self.rules = asked
        self.book = BatchBook(asked)
        self.disk = Disk()
        self.policy = PolicyNow()
        self.now = 0.0
        self.end: End | None = None
        self.running: dict[str, set[int]] = {}
        self.accepted: list[str] = []
        self.starts: list[str] = []
        self.told: list[Decision] = []
        self.met_at: int | None = None

    # --- what happens ---------------------------------------------------------------------------------------------

    def append(self, count: int) -> None:
        ids = [f"g{len(self.disk.appended) + number}" for number in range(count)]
        self.disk.appended += ids
        self.book.append(ids)

    def no_more(self) -> None:
        self.disk.is_last = True
        self.book.no_more()

    def sample_ends(self, group: str, end: SampleEnd) -> None:
        self.running[group].discard(end.sample_index)
        self.disk.ends.setdefault(group, {}).setdefault(end.sample_index, end)
        self.book.sample_ended(group, end)

    def acknowledge(self, groups: list[str]) -> None:
        self.disk.acknowledged.update(groups)
        self.book.acknowledged(groups)

    def step(self, *, may_start: bool = True) -> list[Decision]:
        """Ask what follows and do it."""
        out = self.book.decide(self.now, self.policy, may_start=may_start)
        for decision in out:
            assert self.end is None, "something followed the end"
            self.follow(decision, may_start=may_start)
        self.check()
        assert self.book.decide(self.now, self.policy, may_start=may_start) == [], "decided twice"
        self.told += out
        return out

    # --- what follows ---------------------------------------------------------------------------------------------

    def follow(self, decision: Decision, *, may_start: bool) -> None:
        match decision:
            case Start(group_id=group):
                assert may_start
                assert group not in self.disk.started
                assert group not in self.disk.settled
                self.disk.started.add(group)
                self.starts.append(group)
                self.running[group] = set(range(self.rules.samples_per_group))
                live = sum(group not in self.disk.settled and not self.is_held(group) for group in self.running)
                assert live <= self.rules.max_running_groups
            case CancelSamples(group_id=group, samples=samples):
                assert set(samples) == self.running[group]
            case Settle():
                self.settle(decision)
            case Wants(total=total):
                assert total > self.disk.wanted
                assert not self.disk.is_last
                self.disk.wanted = total
            case End():
                self.end = decision

    def is_held(self, group: str) -> bool:
        """Whether it has enough: all samples, or so many usable ones."""
        ends = self.disk.ends.get(group, {})
        usable = usable_samples(ends.values(), self.rules.informative, self.rules.on_timeout)
        return len(ends) == self.rules.samples_per_group or len(usable) >= self.rules.min_usable

    def settle(self, end: Settle) -> None:
        group, n = end.group_id, self.rules.samples_per_group
        assert group not in self.disk.settled, "settled twice"
        assert self.disk.appended[end.index] == group
        self.disk.settled[group] = end
        ends = self.disk.ends.get(group, {})
        usable = usable_samples(ends.values(), self.rules.informative, self.rules.on_timeout)
        assert list(end.ends) == [ends[index] for index in sorted(ends)]
        if end.end in {GroupEnd.DONE, GroupEnd.FILTERED}:
            assert list(end.advantages) == advantages(usable, n)
        else:
            assert end.advantages == (None,) * n
        counting = {sample.sample_index for sample in usable}
        assert {index for index, value in enumerate(end.advantages) if value is not None} <= counting
        if end.end is GroupEnd.DONE:
            self.accept(group, end)
        elif end.end is GroupEnd.FILTERED:
            assert not self.rules.is_eval
            assert not is_informative(usable, self.rules.informative)
        elif end.end is GroupEnd.FAILED:
            assert len(usable) + n - len(ends) < self.rules.min_usable
            assert end.reason
        elif end.end is GroupEnd.CARRIED:
            assert self.rules.leftovers == "carry"

    def accept(self, group: str, end: Settle) -> None:
        asked, ends = self.rules, self.disk.ends.get(group, {})
        usable = usable_samples(ends.values(), asked.informative, asked.on_timeout)
        self.accepted.append(group)
        ready = [one for one in self.accepted if one not in self.disk.acknowledged]
        if asked.is_stream:
            assert len(ready) <= asked.max_ready_groups
        if asked.selection == "submission" and asked.max_groups is None:
            earlier = self.disk.appended[: end.index]
            assert all(one in self.disk.settled or self.is_held(one) for one in earlier), "out of order"
            assert [self.disk.settled[one].index for one in self.accepted] == sorted(
                self.disk.settled[one].index for one in self.accepted
            )
        if asked.is_eval:
            return
        assert len(usable) >= asked.min_usable
        assert is_informative(usable, asked.informative)
        sampled = [sample.oldest for sample in usable if sample.oldest is not None]
        assert not is_stale(sampled, self.policy.version, self.policy.rollbacks, asked.max_staleness)

    def check(self) -> None:
        """The laws."""
        counts = Counter(end.end for end in self.disk.settled.values())
        assert {end: counts[end] for end in GroupEnd} == dict(self.book.ends)
        ready = [group for group in self.accepted if group not in self.disk.acknowledged]
        assert self.book.ready == len(ready)
        assert self.book.submitted == len(self.disk.appended)
        live = self.book.waiting + self.book.running + self.book.held
        assert live + counts.total() == self.book.submitted
        assert self.starts == sorted(self.starts, key=lambda group: int(group[1:])), "not in order"
        target = self.rules.target
        if target is not None and self.rules.leftovers != "drain":
            assert len(self.accepted) <= target
        if self.rules.max_groups is not None:
            assert len(self.disk.started) <= self.rules.max_groups
        if self.end is not None:
            assert live == 0
            assert self.book.is_over
            assert set(self.disk.settled) == set(self.disk.appended)
            if self.end.state is BatchState.COMPLETE and target is not None:
                assert len(self.accepted) >= target
