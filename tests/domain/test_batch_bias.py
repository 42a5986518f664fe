"""The book in a simulated world: with carry-over speed does not decide what is trained on, with aborting it does.

A slot is a rollout at a time; difficult prompts take longer, and are solved less often. Each step of training takes a
batch. All groups that are ever drawn are known here, so that what was trained on can be compared with all of them.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from prorld.domain.batch import BatchBook, BatchRules, CancelSamples, End, PolicyNow, Settle, Start
from prorld.domain.group import GroupEnd
from prorld.domain.versions import PolicyVersion
from tests.domain.batch_world import used

N, TARGET, SLOTS, STEPS, WARM_UP = 8, 16, 64, 40, 5


@dataclass
class Prompt:
    """A group as it was drawn: how long each of its samples takes, and what it earns."""

    seconds: list[float]
    rewards: list[float]

    @property
    def is_informative(self) -> bool:
        return len(set(self.rewards)) > 1


def drawn(source: random.Random) -> Prompt:
    hardness = source.gauss(0, 1)
    solved = min(0.999, max(0.001, 1 / (1 + math.exp(1.2 * hardness + 0.9 * source.gauss(0, 1)))))
    seconds = [min(1800.0, source.lognormvariate(math.log(60) + 0.7 * hardness, 0.5)) for _ in range(N)]
    return Prompt(seconds, [float(source.random() < solved) for _ in range(N)])


@dataclass
class Slots:
    """The engine: so many samples at once, the others in line; time is the end of the next one."""

    prompts: dict[str, Prompt]
    now: float = 0.0
    free: int = SLOTS
    line: deque[tuple[str, int]] = field(default_factory=deque)
    ends: list[tuple[float, str, int]] = field(default_factory=list)
    dropped: set[tuple[str, int]] = field(default_factory=set)

    def start(self, group: str) -> None:
        self.line.extend((group, sample) for sample in range(N))
        self.fill()

    def fill(self) -> None:
        while self.free and self.line:
            group, sample = self.line.popleft()
            if (group, sample) not in self.dropped:
                self.free -= 1
                heapq.heappush(self.ends, (self.now + self.prompts[group].seconds[sample], group, sample))

    def drop(self, group: str) -> None:
        self.dropped.update((group, sample) for sample in range(N))
        self.line = deque(one for one in self.line if one[0] != group)
        gone = [end for end in self.ends if end[1] == group]
        self.ends = [end for end in self.ends if end[1] != group]
        heapq.heapify(self.ends)
        self.free += len(gone)
        self.fill()

    def next_end(self) -> tuple[str, int]:
        self.now, group, sample = heapq.heappop(self.ends)
        self.free += 1
        self.fill()
        return group, sample


@dataclass
class Run:
    """Some steps of training, one batch after the other."""

    rules: BatchRules
    source: random.Random
    prompts: dict[str, Prompt] = field(default_factory=dict)
    trained: list[float] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    started: set[str] = field(default_factory=set)
    ended: dict[str, list[int]] = field(default_factory=dict)
    began: dict[str, int] = field(default_factory=dict)

    def go(self) -> Slots:
        slots = Slots(self.prompts)
        for step in range(STEPS):
            self.batch(step, slots)
        return slots

    def batch(self, step: int, slots: Slots) -> None:
        book = BatchBook(self.rules)
        # The versions are for the record only: nothing is too old here.
        policy = PolicyNow(version=PolicyVersion(0, step))
        carried, self.left = self.left, []
        book.append(carried)
        for group in carried:
            if group in self.started:
                book.started(group)
                for sample in self.ended.get(group, []):
                    book.sample_ended(group, used(sample, self.prompts[group].rewards[sample], self.began[group]))
        while not book.is_over:
            self.more(book)
            for decision in book.decide(slots.now, policy):
                match decision:
                    case Start(group_id=group):
                        self.started.add(group)
                        self.began[group] = step
                        slots.start(group)
                    case Settle():
                        self.settled(step, decision, slots)
                    case CancelSamples() | End():
                        pass
                    case _:
                        continue
            if not book.is_over:
                group, sample = slots.next_end()
                self.ended.setdefault(group, []).append(sample)
                book.sample_ended(group, used(sample, self.prompts[group].rewards[sample], self.began[group]))
        # Leftovers that run go on, so their ends are heard by whichever batch is next.

    def more(self, book: BatchBook) -> None:
        while book.waiting < self.rules.max_running_groups:
            name = f"g{len(self.prompts)}"
            self.prompts[name] = drawn(self.source)
            book.append([name])

    def settled(self, step: int, end: Settle, slots: Slots) -> None:
        if end.end is GroupEnd.DONE and step >= WARM_UP:
            self.trained += self.prompts[end.group_id].seconds
        elif end.end is GroupEnd.CARRIED:
            self.left.append(end.group_id)
        elif end.end is GroupEnd.CANCELLED:
            slots.drop(end.group_id)


def outcome(selection: str, leftovers: str) -> tuple[float, float]:
    """Bias of the durations that were trained on, and seconds a step."""
    rules = BatchRules(
        samples_per_group=N,
        target_groups=TARGET,
        max_running_groups=TARGET * 3 // 2,
        max_ready_groups=96,
        min_usable=N,
        max_staleness=None,
        selection=selection,  # type: ignore[arg-type]
        leftovers=leftovers,  # type: ignore[arg-type]
    )
    trained: list[float] = []
    all_of_them: list[float] = []
    seconds = 0.0
    for seed in range(5):
        run = Run(rules, random.Random(seed))
        seconds += run.go().now / STEPS / 5
        trained += run.trained
        population = random.Random(1000 + seed)
        for _ in range(3000):
            prompt = drawn(population)
            all_of_them += prompt.seconds if prompt.is_informative else []
    return (sum(trained) / len(trained)) / (sum(all_of_them) / len(all_of_them)) - 1, seconds


@pytest.mark.parametrize("selection", ["arrival", "submission"])
def test_carrying_over_is_not_biased_by_speed(selection: str):
    """What is trained on takes as long as what could be, within a few parts in a hundred."""
    bias, _ = outcome(selection, "carry")
    assert abs(bias) < 0.04


def test_aborting_is_biased_and_slower():
    """The first to finish, and the rest thrown away: the long ones never come, and their work is done again."""
    bias, seconds = outcome("arrival", "cancel")
    _, carried = outcome("arrival", "carry")
    assert bias < -0.15
    assert seconds > 1.1 * carried


def test_submission_order_is_not_biased_even_without_carrying():
    """It waits for the slow ones, and pays for it with time."""
    bias, seconds = outcome("submission", "drain")
    _, carried = outcome("arrival", "carry")
    assert abs(bias) < 0.06
    assert seconds > carried
