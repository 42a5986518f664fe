"""The book of a batch: which group runs, which is accepted, which is thrown away, and when it is over. Pure.

It is told what happened (``append``, ``sample_ended``, ``acknowledged``, ...) and asked with ``decide`` what follows
from all that. The same history gives the same decisions, and what happened between two questions has no order. It knows
no jobs, no events, no clock and no disk: whoever acts on a decision writes it down before anybody hears of it. An
earlier life's book is built again with ``append``, ``started``, ``settled``, ``sample_ended`` and ``wanted`` in any
order; the grace of stragglers begins anew then, and they are told to end again.

What happens to a group, in this order: it *fails* once too few of its samples can still be usable; it is *stale* once a
usable sample is too old; when all samples have ended, or enough are usable and the others had their grace, it is
*filtered* if training can't learn from it, and else *held* until it is accepted (*done*). Under ``arrival`` it is so at
once; under ``submission`` when all earlier groups are settled or held; in a stream when there is room for one more that
is not acknowledged.

When it is over, the groups that are left are *carried* or *cancelled*. ``carry``: all of them are carried, but for a
batch that was cancelled (none is) or failed (those that run are cancelled). ``drain``: when the target is met, groups
that run go on and are delivered, beyond the target, too, and those that wait are cancelled; at any other end all are
cancelled. ``cancel``: all are cancelled.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence

from prorld.domain import batch_window as window
from prorld.domain.batch_line import Group, Line
from prorld.domain.batch_rules import (
    BatchRules,
    BatchState,
    CancelSamples,
    Decision,
    End,
    Leftovers,
    PolicyNow,
    Selection,
    Settle,
    Start,
    Wants,
    check_rules,
)
from prorld.domain.group import GroupEnd, Informative, OnError, OnTimeout, Quorum, SampleEnd

__all__ = [
    "BatchBook",
    "BatchRules",
    "BatchState",
    "CancelSamples",
    "Decision",
    "End",
    "Informative",
    "Leftovers",
    "OnError",
    "OnTimeout",
    "PolicyNow",
    "Quorum",
    "Selection",
    "Settle",
    "Start",
    "Wants",
    "check_rules",
]

# ``Wants`` is told when it grew by this part of the window, so that a stream does not tell it for every group.
_WANTS_STEPS = 8


class BatchBook:
    """The groups of one batch in the order they were submitted.

    ``past`` counts groups that were settled and acknowledged and of which nothing else is known any more.
    """

    def __init__(self, rules: BatchRules, *, past: Mapping[GroupEnd, int] | None = None) -> None:
        self.rules = rules
        self._live: dict[str, Group] = {}
        self._waiting, self._running, self._held = Line(), Line(), Line()
        self._ready: set[str] = set()
        self._ends: Counter[GroupEnd] = Counter(past or {})
        self._next_index = self._ends.total()
        # Groups that were ever started; a settled one counts, whether it was or not.
        self._begun = self._ends.total()
        self._touched: dict[str, Group] = {}
        self._graces: list[tuple[float, int, str]] = []
        self._policy = PolicyNow()
        self._is_last = False
        self._is_draining = False
        self._wanted = 0
        self._stop: End | None = None
        self._end: End | None = None

    # --- what happened ------------------------------------------------------------------------------------------------

    def append(self, group_ids: Sequence[str], *, at: int | None = None) -> None:
        """More groups at the end of the line. An id that is known is a bug of the caller's.

        ``at`` is the index of the first, where groups before it were forgotten.
        """
        assert self._end is None
        index = self._next_index if at is None else at
        for group_id in group_ids:
            assert group_id not in self._live, group_id
            assert group_id not in self._ready, group_id
            self._live[group_id] = group = Group(group_id, index)
            self._waiting.add(group)
            index += 1
        self._next_index = max(self._next_index, index)

    def no_more(self) -> None:
        """No group will be appended any more."""
        self._is_last = True

    def started(self, group_id: str) -> None:
        """Its samples run already: of an earlier life of the daemon, or of the batch that it was carried from."""
        group = self._live.get(group_id)
        if group is not None and group.phase == "waiting":
            self._begin(group)

    def put_back(self, group_id: str) -> None:
        """A ``Start`` could not be followed, nothing of it runs: it is the first in the line again."""
        group = self._live.get(group_id)
        if group is not None and group.phase == "running" and not group.ends:
            self._begun -= 1
            self._move(group, "waiting")

    def settled(self, end: Settle, *, is_acknowledged: bool = False) -> None:
        """It was settled like this in an earlier life of the daemon."""
        group = self._live[end.group_id]
        self._forget(group, end.end)
        if is_acknowledged:
            self._ready.discard(end.group_id)

    def wanted(self, total: int) -> None:
        """So much was told as ``Wants`` in an earlier life of the daemon."""
        self._wanted = max(self._wanted, total)

    def sample_ended(self, group_id: str, end: SampleEnd) -> None:
        """A sample has ended. One of a group that is settled, or that ended before, changes nothing."""
        group = self._live.get(group_id)
        if group is not None and group.sample_ended(end, self.rules):
            if group.phase == "waiting":
                self._begin(group)
            self._touched[group_id] = group

    def acknowledged(self, group_ids: Sequence[str]) -> None:
        """The trainer has these accepted groups safe; they are not ready any more."""
        self._ready.difference_update(group_ids)

    def cancel(self, reason: str) -> None:
        """Somebody wants it to end: whatever runs is cancelled, and nothing more is accepted or carried."""
        if self._stop is None or self._stop.state is BatchState.EXHAUSTED:
            self._stop = End(state=BatchState.CANCELLED, reason=reason)

    def fail(self, reason: str) -> None:
        """The circuit breaker opened: it ends ``failed``, and whatever runs is cancelled."""
        if self._stop is None:
            self._stop = End(state=BatchState.FAILED, reason=reason)

    def time_is_up(self) -> None:
        """``max_wall_s`` has passed: it ends ``exhausted`` with what there is."""
        if self._stop is None:
            words = f"max_wall_s has passed: {self._ends[GroupEnd.DONE]} groups are there"
            self._stop = End(state=BatchState.EXHAUSTED, reason=words)

    # --- what follows -------------------------------------------------------------------------------------------------

    def decide(self, now: float, policy: PolicyNow, *, may_start: bool = True) -> list[Decision]:
        """Everything that follows now, in the order in which it has to be done. Nothing is decided twice.

        ``may_start`` is false while nothing may be admitted (a breaker, a full daemon): no ``Start`` then.
        """
        out: list[Decision] = []
        if self._end is not None:
            return out
        self._look_at_those_touched(now, policy, out)
        if self._stop is None or self._stop.state is not BatchState.CANCELLED:
            self._accept(out)
        self._drain(out)
        self._end = self._why_over()
        if self._end is not None:
            self._settle_leftovers(self._end, out)
            out.append(self._end)
            return out
        if may_start and not self._is_draining:
            self._fill(out)
        self._want(out)
        return out

    def next_look_at(self) -> float | None:
        """When a grace period ends, so that ``decide`` should be asked again without an event."""
        while self._graces:
            at, _, group_id = self._graces[0]
            group = self._live.get(group_id)
            if group is not None and group.counts_at == at and not group.is_cut:
                return at
            heapq.heappop(self._graces)
        return None

    # --- what is read -------------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether ``End`` was decided."""
        return self._end is not None

    @property
    def end(self) -> End | None:
        """How it ended."""
        return self._end

    @property
    def ready(self) -> int:
        """Accepted groups that are not acknowledged."""
        return len(self._ready)

    @property
    def submitted(self) -> int:
        """Groups so far."""
        return self._next_index

    @property
    def waiting(self) -> int:
        """Groups that were not started."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Groups whose samples run."""
        return len(self._running)

    @property
    def held(self) -> int:
        """Groups that have run to their end and wait to be accepted."""
        return len(self._held)

    @property
    def ends(self) -> Mapping[GroupEnd, int]:
        """Settled groups by their end."""
        return {end: self._ends[end] for end in GroupEnd}

    # --- groups on their way ------------------------------------------------------------------------------------------

    def _begin(self, group: Group) -> None:
        self._begun += 1
        self._move(group, "running")

    def _move(self, group: Group, phase: str) -> None:
        lines = {"waiting": self._waiting, "running": self._running, "held": self._held}
        if group.phase in lines:
            lines[group.phase].discard(group)
        match phase:
            case "waiting" | "running" | "held":
                group.phase = phase
                lines[phase].add(group)
            case _:
                group.phase = "settled"

    def _forget(self, group: Group, end: GroupEnd) -> None:
        if group.phase == "waiting":
            self._begun += 1
        self._move(group, "settled")
        del self._live[group.group_id]
        self._touched.pop(group.group_id, None)
        self._ends[end] += 1
        if end is GroupEnd.DONE:
            self._ready.add(group.group_id)

    def _settle(self, group: Group, end: GroupEnd, reason: str, out: list[Decision]) -> None:
        out.append(group.settle(end, reason, self.rules, self._policy))
        self._forget(group, end)

    def _look_at_those_touched(self, now: float, policy: PolicyNow, out: list[Decision]) -> None:
        if policy != self._policy:
            self._policy = policy
            for group in (*self._running, *self._held):
                self._touched[group.group_id] = group
        while self._graces and self._graces[0][0] <= now:
            _, _, group_id = heapq.heappop(self._graces)
            if group_id in self._live:
                self._touched[group_id] = self._live[group_id]
        touched, self._touched = self._touched, {}
        for group in sorted(touched.values(), key=lambda group: group.index):
            self._look_at(group, now, out)

    def _look_at(self, group: Group, now: float, out: list[Decision]) -> None:
        rules = self.rules
        missing = group.missing(rules)
        if not rules.is_eval and len(group.usable) + missing < rules.min_usable:
            self._settle(group, GroupEnd.FAILED, group.why_failed(rules), out)
            return
        is_stale = group.is_stale(self._policy, rules)
        if missing and not group.is_cut:
            if is_stale:
                self._settle(group, GroupEnd.STALE, group.why_stale(self._policy, rules), out)
                return
            if len(group.usable) < rules.min_usable or self._has_grace(group, now):
                return
            group.is_cut = True
            words = f"{len(group.usable)} of {rules.samples_per_group} samples are usable, and the group stands"
            out.append(CancelSamples(group_id=group.group_id, samples=group.stragglers(rules), reason=words))
        # From here on it has run to its end.
        if not rules.is_eval and not group.is_informative(rules):
            self._settle(group, GroupEnd.FILTERED, "", out)
            return
        if group.phase != "held":
            self._move(group, "held")
        if is_stale:
            self._settle(group, GroupEnd.STALE, group.why_stale(self._policy, rules), out)

    def _has_grace(self, group: Group, now: float) -> bool:
        if group.counts_at is None:
            group.counts_at = now + self.rules.grace_s
            if group.counts_at > now:
                heapq.heappush(self._graces, (group.counts_at, group.index, group.group_id))
        return group.counts_at > now

    # --- acceptance ---------------------------------------------------------------------------------------------------

    def _accept(self, out: list[Decision]) -> None:
        while (group := self._held.first()) is not None and self._may_accept(group):
            self._settle(group, GroupEnd.DONE, "", out)

    def _may_accept(self, group: Group) -> bool:
        rules = self.rules
        if rules.is_stream and len(self._ready) >= rules.max_ready_groups:
            return False
        if self._has_target and not self._is_draining:
            return False
        if rules.selection == "arrival":
            return True
        earlier = [self._running.first()]
        if self._can_begin_more:
            earlier.append(self._waiting.first())
        return all(other is None or group.index < other.index for other in earlier)

    @property
    def _has_target(self) -> bool:
        target = self.rules.target
        return target is not None and self._ends[GroupEnd.DONE] >= target

    @property
    def _can_begin_more(self) -> bool:
        """Whether groups that wait may ever be started."""
        most = self.rules.max_groups
        return not self._is_draining and (most is None or self._begun < most)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _drain(self, out: list[Decision]) -> None:
        if self.rules.leftovers != "drain" or not self._has_target or self._stop is not None:
            return
        self._is_draining = True
        for group in sorted(self._waiting, key=lambda group: group.index):
            self._settle(group, GroupEnd.CANCELLED, "the target was met before it was started", out)
        self._accept(out)

    def _why_over(self) -> End | None:
        if self._has_target:
            met = f"the target is met: {self._ends[GroupEnd.DONE]} of {self.rules.target}"
            if not self._is_draining or not len(self._running) + len(self._held):
                return End(state=BatchState.COMPLETE, reason=met)
            if self._stop is not None and self._stop.state is BatchState.EXHAUSTED:
                return End(state=BatchState.COMPLETE, reason=f"{met}; {self._stop.reason}")
        if self._stop is not None:
            return self._stop
        if len(self._running) or len(self._held):
            return None
        return self._why_dry()

    def _why_dry(self) -> End | None:
        """Nothing runs any more: the end, unless there is something that could."""
        rules, done = self.rules, self._ends[GroupEnd.DONE]
        is_dry = self._is_last and not len(self._waiting)
        if not is_dry and self._can_begin_more:
            return None
        if is_dry and rules.is_eval:
            return End(state=BatchState.COMPLETE, reason=f"all {self.submitted} groups are there")
        why = "the prompts ran out" if is_dry else f"max_groups, {rules.max_groups}, were started"
        of_target = "" if rules.target is None else f" of {rules.target}"
        found = f"{done}{of_target} informative groups" if done else "no group was informative"
        return End(state=BatchState.EXHAUSTED, reason=f"{why}: {found}")

    def _settle_leftovers(self, end: End, out: list[Decision]) -> None:
        for group in sorted(self._live.values(), key=lambda group: group.index):
            carries = self.rules.leftovers == "carry" and end.state is not BatchState.CANCELLED
            if end.state is BatchState.FAILED and group.phase == "running":
                carries = False
            self._settle(group, GroupEnd.CARRIED if carries else GroupEnd.CANCELLED, end.reason, out)

    # --- more of it ---------------------------------------------------------------------------------------------------

    def _fill(self, out: list[Decision]) -> None:
        while len(self._running) < self.rules.max_running_groups and self._can_begin_more and self._has_use_for_more():
            group = self._waiting.first()
            if group is None:
                return
            self._begin(group)
            out.append(Start(group_id=group.group_id))

    def _has_use_for_more(self) -> bool:
        next_one, oldest_held = self._waiting.first(), self._held.first()
        if self.rules.is_stream and len(self._ready) >= self.rules.max_ready_groups:
            return False
        if oldest_held is None or next_one is None or next_one.index < oldest_held.index:
            # Those that are held may well wait for this one.
            return True
        return len(self._held) < window.held_max(self.rules, done=self._ends[GroupEnd.DONE], ready=len(self._ready))

    def _want(self, out: list[Decision]) -> None:
        if self._is_last or self._is_draining:
            return
        more = 0
        if self._has_use_for_more():
            more = window.more_wanted(self.rules, self._ends, running=len(self._running), held=len(self._held))
        total = self.submitted - len(self._waiting) + more
        if self.rules.max_groups is not None:
            total = min(total, self.rules.max_groups)
        step = max(1, self.rules.max_running_groups // _WANTS_STEPS)
        if total >= self._wanted + step or (total > self._wanted and not len(self._waiting)):
            self._wanted = total
            out.append(Wants(total=total))
