"""How a trainer can collect informative groups. The strategies without batches are as good as their kind is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Literal

import trio

from prorld.bench.dapo_figures import StepDone, Trained
from prorld.bench.dapo_trainer import RunningGroup, Trainer
from prorld.bench.dapo_workload import GroupPlan, Workload
from prorld.bench.processes import BenchFailed

__all__ = ["Collector", "collector_of", "run_steps"]

# What a batch is given beside its leftovers: enough that its prompts last, also if few of them are of use.
PROMPTS_PER_TARGET = 3


class Collector:
    """Collects what each step trains on. ``met`` are the groups that it started so far."""

    def __init__(self, trainer: Trainer, workload: Workload, nursery: trio.Nursery) -> None:
        self._trainer = trainer
        self._workload = workload
        self._nursery = nursery
        self._next = 0
        self.met: list[GroupPlan] = []

    async def collect(self) -> list[Trained]:
        """The groups of one step."""
        raise NotImplementedError

    async def alive(self, sampled: int) -> int:
        """Of so many tokens, those that a next step would get. A trainer that throws away what is left has none."""
        await trio.lowlevel.checkpoint()
        return 0

    def _new(self) -> GroupPlan:
        self._next += 1
        return self._workload.group(self._next - 1)


class _Singles(Collector):
    """What those have in common that hand in single jobs."""

    def __init__(self, trainer: Trainer, workload: Workload, nursery: trio.Nursery) -> None:
        super().__init__(trainer, workload, nursery)
        self._send, self._ended = trio.open_memory_channel[RunningGroup](10_000)

    def _start(self, plan: GroupPlan) -> RunningGroup:
        self.met.append(plan)
        group = RunningGroup(plan, f"g-{plan.number}-{plan.draw}", self._trainer.version)
        self._nursery.start_soon(self._run, group, name=f"group {group.group_id}")
        return group

    async def _run(self, group: RunningGroup) -> None:
        async with trio.open_nursery() as nursery:
            for sample in range(len(group.plan.samples)):
                nursery.start_soon(self._trainer.roll, group, sample)
        if not group.is_cancelled:
            self._send.send_nowait(group)

    def _trained(self, groups: list[RunningGroup]) -> list[Trained]:
        now = self._trainer.version
        return [Trained(group=group.plan, staleness=now - group.version) for group in groups]


class BatchByBatch(_Singles):
    """A round of as many groups as are wanted, all of it waited for; the next round while some are missing."""

    async def collect(self) -> list[Trained]:
        """Rounds until there are enough."""
        target = self._trainer.plan.target
        good: list[RunningGroup] = []
        while len(good) < target:
            for _ in range(target):
                self._start(self._new())
            ended = [await self._ended.receive() for _ in range(target)]
            good += sorted((group for group in ended if group.is_informative), key=lambda group: group.plan.number)
        return self._trained(good[:target])


class AsCompleted(_Singles):
    """So many groups at once, the first that are of use taken, and everything else cancelled."""

    def __init__(self, trainer: Trainer, workload: Workload, nursery: trio.Nursery, *, requeues: bool) -> None:
        """``requeues``: the prompts of what was cancelled come first in the next step, to be sampled anew."""
        super().__init__(trainer, workload, nursery)
        self._requeues = requeues
        self._again: deque[GroupPlan] = deque()

    async def collect(self) -> list[Trained]:
        """Until there are enough."""
        plan = self._trainer.plan
        running: dict[str, RunningGroup] = {}
        good: list[RunningGroup] = []
        while len(good) < plan.target:
            while len(running) < plan.running:
                group = self._start(self._following())
                running[group.group_id] = group
            ended = await self._ended.receive()
            if running.pop(ended.group_id, None) is not None and ended.is_informative:
                good.append(ended)
        left = list(running.values())
        await self._trainer.cancel(left)
        if self._requeues:
            self._again.extendleft(reversed([self._workload.group(one.plan.number, one.plan.draw + 1) for one in left]))
        return self._trained(good)

    def _following(self) -> GroupPlan:
        return self._again.popleft() if self._again else self._new()


class Batches(Collector):
    """The service's own: a batch a step, each with the leftovers of the one before."""

    def __init__(
        self,
        trainer: Trainer,
        workload: Workload,
        nursery: trio.Nursery,
        *,
        selection: Literal["arrival", "submission"],
    ) -> None:
        super().__init__(trainer, workload, nursery)
        self._selection = selection
        self._steps = 0
        self._before: str | None = None
        self._leftovers = 0
        self._known: dict[str, GroupPlan] = {}
        self._useful = self._filtered = 0
        self._settled: set[int] = set()

    async def collect(self) -> list[Trained]:
        """A batch to its end."""
        plan = self._trainer.plan
        batch_id = f"step-{self._steps}"
        new = [self._new() for _ in range(max(0, PROMPTS_PER_TARGET * plan.target + plan.running - self._leftovers))]
        await self._trainer.start_batch(batch_id, new, carry_from=self._before, selection=self._selection)
        # Claimed groups keep their ids; its own are numbered as they were sent.
        self._known |= {f"{batch_id}:{place}": group for place, group in enumerate(new)}
        return await self._finish(batch_id)

    async def _finish(self, batch_id: str) -> list[Trained]:
        trained: list[Trained] = []
        after = 0
        while True:
            page = await self._trainer.groups(batch_id, after)
            for one in page.items:
                after = one.seq
                trained.append(Trained(group=self._known[one.group_id], staleness=one.staleness or 0))
            if page.is_over:
                break
        if page.state != "complete" or len(trained) != self._trainer.plan.target:
            raise BenchFailed(f"the batch {batch_id} ended {page.state} with {len(trained)} groups")
        await self._trainer.acknowledge(batch_id, after)
        await self._settle(batch_id, trained)
        self._before = batch_id
        self._steps += 1
        return trained

    async def _settle(self, batch_id: str, trained: list[Trained]) -> None:
        """Count the ends of its groups: each is trained on, of no use, or carried."""
        ends = await self._trainer.ends(batch_id)
        self._leftovers = sum(1 for event, _ in ends if event == "group.carried")
        strange = [event for event, _ in ends if event not in ("group.done", "group.filtered", "group.carried")]
        if strange:
            raise BenchFailed(f"groups of {batch_id} ended {', '.join(sorted(set(strange)))}")
        filtered = [self._known[group] for event, group in ends if event == "group.filtered"]
        self._useful += sum(one.group.tokens for one in trained)
        self._filtered += sum(group.tokens for group in filtered)
        self._settled |= {group.number for group in (*filtered, *(one.group for one in trained))}
        # Groups start in the order of the stream, and as many run as may while prompts last.
        self.met = self._workload.first(min(self._next, len(self._settled) + self._trainer.plan.running))

    async def alive(self, sampled: int) -> int:
        """What is in the leftovers of the last batch: never more than they will have been worth."""
        await trio.lowlevel.checkpoint()
        left = sum(group.tokens for group in self.met if group.number not in self._settled)
        return min(left, max(0, sampled - self._useful - self._filtered))


def collector_of(name: str) -> Callable[[Trainer, Workload, trio.Nursery], Collector]:
    """The strategy of that name."""
    made: dict[str, Callable[[Trainer, Workload, trio.Nursery], Collector]] = {
        "batches": BatchByBatch,
        "abort": partial(AsCompleted, requeues=False),
        "requeue": partial(AsCompleted, requeues=True),
        "carry": partial(Batches, selection="arrival"),
        "submission": partial(Batches, selection="submission"),
    }
    return made[name]


async def run_steps(collector: Collector, trainer: Trainer, steps: int, tell: Callable[[int], None]) -> list[StepDone]:
    """Collect and train, so many times."""
    done: list[StepDone] = []
    for number in range(steps):
        began = trio.current_time()
        trained = await collector.collect()
        await trainer.train()
        done.append(StepDone(seconds=trio.current_time() - began, trained=trained))
        tell(number)
    return done
