"""The book of a batch over any history: nothing is lost, twice or too much, and a book built again decides the same."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prorld.domain.batch import BatchRules, BatchState, CancelSamples, Decision, check_rules
from prorld.domain.group import Informative, SampleEnd
from prorld.domain.outcome import OutcomeKind
from prorld.domain.versions import PolicyVersion
from prorld.errors import Impossible
from tests.domain.batch_world import World, at, lost, used

RULES = st.builds(
    BatchRules,
    samples_per_group=st.just(3),
    target_groups=st.none() | st.integers(min_value=1, max_value=5),
    max_running_groups=st.integers(min_value=1, max_value=5),
    max_ready_groups=st.integers(min_value=1, max_value=4),
    max_groups=st.none() | st.integers(min_value=5, max_value=20),
    informative=st.sampled_from(
        [
            Informative(),
            Informative(rule="all"),
            Informative(metric="tests"),
            Informative(rule="mean_between", low=0.2, high=0.8),
        ]
    ),
    selection=st.sampled_from(["arrival", "submission"]),
    min_usable=st.integers(min_value=1, max_value=3),
    grace_s=st.sampled_from([0.0, 5.0]),
    on_timeout=st.sampled_from(["mask", "zero", "drop"]),
    leftovers=st.sampled_from(["carry", "drain", "cancel"]),
    max_staleness=st.none() | st.integers(min_value=0, max_value=2),
    is_eval=st.sampled_from([False, False, False, True]),
)


def is_possible(asked: BatchRules) -> bool:
    try:
        check_rules(asked)
    except Impossible:
        return False
    return True


def some_end(index: int, draw: int, version: int) -> SampleEnd:
    """Mostly graded; now and then in trouble, out of time, or without the part that a rule asks for."""
    if draw < 6:
        return used(index, float(draw % 2), version, metrics={"tests": float(draw % 3)})
    if draw == 6:
        return used(index, 1.0, version)
    if draw == 7:
        return lost(index, OutcomeKind.TIMEOUT, stage="run")
    if draw == 8:
        return lost(index, OutcomeKind.TIMEOUT, stage="init", reward=1.0)
    return lost(index, reward=0.5, metrics={"tests": 1.0})


class Batches(RuleBasedStateMachine):
    """Prompts come, samples end, versions rise, trainers acknowledge, the daemon dies: in any order."""

    @initialize(asked=RULES.filter(is_possible), count=st.integers(min_value=0, max_value=8))
    def begin(self, asked: BatchRules, count: int) -> None:
        self.world = World(asked)
        self.world.append(count)
        self.world.step()

    def going(self) -> bool:
        return self.world.end is None

    @precondition(lambda self: self.going() and not self.world.disk.is_last)
    @rule(count=st.integers(min_value=1, max_value=6), may_start=st.booleans())
    def append(self, count: int, may_start: bool) -> None:
        self.world.append(count)
        self.world.step(may_start=may_start)

    @precondition(lambda self: self.going() and len(self.world.disk.appended) > 25)
    @rule()
    def no_more(self) -> None:
        self.world.no_more()
        self.world.step()

    @precondition(lambda self: self.going() and any(self.world.running.values()))
    @rule(
        ends=st.lists(
            st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 9), st.integers(0, 2)),
            min_size=1,
            max_size=6,
        )
    )
    def samples_end(self, ends: list[tuple[int, int, int, int]]) -> None:
        for which, sample, draw, age in ends:
            groups = sorted(group for group, left in self.world.running.items() if left)
            if not groups:
                break
            group = groups[which % len(groups)]
            left = sorted(self.world.running[group])
            version = max(0, self.world.policy.version.version - age)
            end = some_end(left[sample % len(left)], draw, version)
            if end.oldest is not None:
                end = msgspec.structs.replace(end, oldest=PolicyVersion(self.world.policy.version.epoch, version))
            self.world.sample_ends(group, end)
        self.world.step()

    @precondition(lambda self: self.going())
    @rule()
    def weights_change(self) -> None:
        now = self.world.policy
        self.world.policy = at(now.version.version + 1, *now.rollbacks)
        self.world.step()

    @precondition(lambda self: self.going() and self.world.policy.version.version > 3)
    @rule()
    def weights_go_back(self) -> None:
        now = self.world.policy
        point = now.version.version - 2
        self.world.policy = at(point, *now.rollbacks, point)
        self.world.step()

    @precondition(lambda self: self.world.accepted)
    @rule(count=st.integers(min_value=1, max_value=4))
    def acknowledge(self, count: int) -> None:
        ready = [group for group in self.world.accepted if group not in self.world.disk.acknowledged]
        self.world.acknowledge(ready[:count])
        self.world.step()

    @precondition(lambda self: self.going())
    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds
        look_at = self.world.book.next_look_at()
        self.world.step()
        if look_at is not None and look_at <= self.world.now:
            assert self.world.book.next_look_at() != look_at

    @precondition(lambda self: self.going() and len(self.world.disk.appended) > 15)
    @rule(how=st.sampled_from(["cancel", "fail", "time_is_up", "none", "none", "none"]))
    def stop(self, how: str) -> None:
        match how:
            case "cancel":
                self.world.book.cancel("somebody wanted it")
            case "fail":
                self.world.book.fail("too many of one kind of failure")
            case "time_is_up":
                self.world.book.time_is_up()
            case _:
                return
        self.world.step()
        assert self.world.end is not None
        assert self.world.end.state is not BatchState.RUNNING

    @precondition(lambda self: self.going())
    @rule(order=st.integers(min_value=0, max_value=5), lives_on=st.booleans(), passes=st.booleans())
    def dies_and_comes_back(self, order: int, lives_on: bool, passes: bool) -> None:
        """From what is on the disk comes a book that decides the same, whichever of the two goes on.

        Where stragglers have their grace, that begins anew, and only the laws can be checked.
        """
        world = self.world
        had_graces = world.book.next_look_at() is not None
        world.now += 6.0 if passes else 0.0
        other, twin = world.disk.book(world.rules, order=order), world.disk.book(world.rules, order=order + 1)
        if lives_on:
            other, world.book = world.book, other
        mine = told_anew(world.step())
        theirs = told_anew(other.decide(world.now, world.policy))
        twins = told_anew(twin.decide(world.now, world.policy))
        books = (other, twin, world.book)
        if world.rules.grace_s and (had_graces or any(book.next_look_at() is not None for book in books)):
            return
        assert mine == theirs == twins
        counts = [(book.ready, book.submitted, book.waiting, book.running, book.held) for book in books]
        assert counts == counts[:1] * 3

    @precondition(lambda self: not self.going())
    @rule(group=st.integers(min_value=0, max_value=30))
    def stays_ended(self, group: int) -> None:
        """What is heard late changes nothing."""
        self.world.book.sample_ended(f"g{group}", used(0, 1.0))
        self.world.book.cancel("too late")
        assert self.world.step() == []

    @invariant()
    def nothing_is_forgotten_or_kept(self) -> None:
        if hasattr(self, "world"):
            assert len(self.world.book._live) == (
                self.world.book.waiting + self.world.book.running + self.world.book.held
            )

    def teardown(self) -> None:
        """If samples end, prompts last and the trainer acknowledges, the batch ends."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for turn in range(2000):
            if world.end is not None:
                break
            world.acknowledge(list(world.accepted))
            wants = world.disk.wanted - len(world.disk.appended)
            if not world.disk.is_last and len(world.disk.appended) < 120:
                assert wants > 0 or world.book.waiting + world.book.running + world.book.held, "starved"
                world.append(max(0, wants))
            elif not world.disk.is_last:
                world.no_more()
            left = [(group, index) for group, some in world.running.items() for index in some]
            if left:
                group, index = left[turn % len(left)]
                end = used(index, float(turn % 2), world.policy.version.version, metrics={"tests": float(turn % 3)})
                epoch, version = world.policy.version.epoch, world.policy.version.version
                end = msgspec.structs.replace(end, oldest=PolicyVersion(epoch, version))
                world.sample_ends(group, end)
            world.now += 6.0
            world.step()
        assert world.end is not None, "it never ends"


def told_anew(decisions: list[Decision]) -> list[Decision]:
    """All but what a new life says again: that stragglers have to end."""
    return [one for one in decisions if not isinstance(one, CancelSamples)]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_any_history(number: int):
    """Several seeds, each hundreds of histories of up to so many steps."""
    machine = seed(number)(Batches)
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=60, deadline=None))
