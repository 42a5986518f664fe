"""Random histories of a journal whose disk fails at random, against a model of what may be in the file.

Nothing that was told is lost, nothing that was refused is there once the disk is well again, what was owed is there
exactly once and in the order of its owner; and the same holds for a file that is opened again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import trio
import trio.testing
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from prorld.errors import Overloaded
from prorld.store.journal import Change, Journal
from tests.store.faulty import Fault, FaultyLane, Line, Table, lines

OWNERS = "abc"
ACTIONS = st.one_of(
    st.tuples(st.just("commit"), st.sampled_from(OWNERS), st.integers(1, 3)),
    st.tuples(st.just("owe"), st.sampled_from(OWNERS), st.integers(1, 3)),
    st.tuples(st.just("grow"), st.sampled_from(OWNERS), st.integers(1, 5)),
    st.tuples(st.just("wait"), st.sampled_from((0.0, 0.01, 0.6, 3.0)), st.just(0)),
    st.tuples(st.just("fault"), st.sampled_from(("before", "after", None)), st.just(0)),
)


@dataclass
class Trail:
    """Numbers that an owner's trail has grown by and shown."""

    owner: str
    grown: int = 0
    shown: int = 0
    taken: int = 0

    def __hash__(self) -> int:
        return id(self)

    def take(self) -> Change | None:
        self.taken = self.grown
        if self.grown == self.shown:
            return None
        return _Many([Line(f"trail {self.owner}", n) for n in range(self.shown, self.grown)])

    def written(self) -> None:
        self.shown = self.taken


@dataclass
class _Many:
    changes: list[Line]

    def apply(self, db) -> None:
        for change in self.changes:
            change.apply(db)

    def disown(self, db) -> None:
        raise AssertionError("a trail is never refused")


@dataclass
class Model:
    """What was told of each line."""

    told: set[tuple[str, int]] = field(default_factory=set)
    refused: set[tuple[str, int]] = field(default_factory=set)
    owed: list[tuple[str, int]] = field(default_factory=list)
    paid: set[tuple[str, int]] = field(default_factory=set)
    trails: dict[str, Trail] = field(default_factory=lambda: {owner: Trail(owner) for owner in OWNERS})

    def check(self, found: list[tuple[str, int]]) -> None:
        assert len(found) == len(set(found))
        there = set(found)
        assert self.told <= there
        assert not self.refused & there
        assert self.paid == set(self.owed) <= there
        for owner in OWNERS:
            name = f"owed {owner}"
            assert [line for line in found if line[0] == name] == [line for line in self.owed if line[0] == name]
            trail = self.trails[owner]
            assert trail.shown == trail.grown
            assert [n for who, n in found if who == f"trail {owner}"] == list(range(trail.grown))
        trails = {line for line in there if line[0].startswith("trail ")}
        assert there == self.told | self.paid | trails


@given(actions=st.lists(ACTIONS, max_size=40))
@example(
    actions=[
        ("fault", "before", 0), ("owe", "a", 1), ("owe", "a", 2), ("owe", "a", 1), ("commit", "a", 1),
        ("wait", 0.6, 0),
               ("grow", "b", 2), ("fault", "after", 0), ("wait", 3.0, 0), ("owe", "a", 1), ("fault", None, 0),
        ("grow", "b", 1),
    ]
)  # fmt: skip
@settings(max_examples=40, deadline=None, phases=(Phase.explicit, Phase.generate))
def test_the_file_holds_what_was_told(actions: list[tuple[str, object, int]]) -> None:
    with TemporaryDirectory() as directory:
        model = Model()
        trio.run(_history, Path(directory), model, actions, clock=MockClock(autojump_threshold=0))
        trio.run(_reopened, Path(directory), model)


async def _history(directory: Path, model: Model, actions: list[tuple[str, object, int]]) -> None:
    lane = FaultyLane()
    journal = Journal(directory, lane=lane)
    await journal.open()
    async with trio.open_nursery() as actor:
        await actor.start(journal.run)
        await journal.commit(Table())
        with trio.fail_after(10_000):
            async with trio.open_nursery() as asking:
                for number, (what, which, size) in enumerate(actions):
                    await _act(journal, lane, model, asking, number, what, which, size)
                lane.fault = None
            # A refusal may still have to be taken back, and a trail to be written.
            while journal.trouble is not None or any(trail.shown < trail.grown for trail in model.trails.values()):  # noqa: ASYNC110 - has no event
                await trio.sleep(0.1)
            await journal.commit(Line("last", 1))
            model.told.add(("last", 1))
        model.check(await journal.read(lines))
        actor.cancel_scope.cancel()


async def _act(
    journal: Journal, lane: FaultyLane, model: Model, asking: trio.Nursery, number: int, what: str, which, size: int
) -> None:
    if what == "wait":
        await trio.sleep(which)
    elif what == "fault":
        fault: Fault | None = which
        lane.fault = fault
    elif what == "grow":
        model.trails[which].grown += size
        journal.soon(model.trails[which])
    else:
        made = [Line(f"{'owed' if what == 'owe' else 'wish'} {which}", 10 * number + i) for i in range(size)]
        _ask(journal, model, asking, what, made)
        # Its turn is the one in which it was asked for.
        await trio.testing.wait_all_tasks_blocked(0.0)


def _ask(journal, model, asking, what, made) -> None:
    keys = [(line.owner, line.n) for line in made]

    async def owe() -> None:
        await journal.owe(*made)
        model.paid.update(keys)

    async def commit() -> None:
        try:
            await journal.commit(*made)
        except Overloaded:
            model.refused.update(keys)
        else:
            model.told.update(keys)

    if what == "owe":
        model.owed += keys
    asking.start_soon(owe if what == "owe" else commit)


async def _reopened(directory: Path, model: Model) -> None:
    journal = Journal(directory)
    await journal.open()
    model.check(await journal.read(lines))
    await journal.read(lambda db: db.close())
