"""Cancel a scenario at every scheduler step, under seeded schedules.

It owns the loop "run once per step, cancel there, check" and the only use of two private names of trio, which make a
schedule repeatable. It never decides what must hold: the scenario asserts that itself, after its victim was cancelled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module

import msgspec
import trio
import trio.testing

__all__ = ["CancelAtStep", "SweepReport", "seeded_schedule", "sweep"]

STEPS_MAX = 20_000

# The private names of trio that make a schedule repeatable.
GENERATOR = "_r"
DETERMINISTIC = "_ALLOW_DETERMINISTIC_SCHEDULING"

Scenario = Callable[[trio.CancelScope], Awaitable[None]]


class SweepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a sweep did: ``runs`` in all, and the longest scenario in scheduler steps."""

    runs: int
    steps_max: int


class CancelAtStep(trio.abc.Instrument):
    """Cancels a scope right before the k-th step that any task of the run takes."""

    def __init__(self, scope: trio.CancelScope, step: int) -> None:
        self.step = step
        self.steps_seen = 0
        self.cancelled_at: float | None = None
        self._scope: trio.CancelScope | None = scope

    @property
    def fired(self) -> bool:
        """Whether the scenario lasted until the step."""
        return self.steps_seen >= self.step

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Count a step, and cancel at the chosen one."""
        if self._scope is None:
            return
        self.steps_seen += 1
        if self.steps_seen == self.step:
            self.cancelled_at = trio.current_time()
            self._scope.cancel(f"sweep, step {self.step}")

    def stop(self) -> None:
        """Count no further: what follows is trio's own shutdown."""
        self._scope = None


def sweep(scenario: Scenario, *, seeds: Iterable[int] = range(4), steps_max: int = STEPS_MAX) -> SweepReport:
    """Run ``scenario(victim)`` once per step and seed, cancelling the scope ``victim`` before that step.

    The scenario enters ``victim`` around what is to be cancelled and asserts its invariants outside of it. Each run is
    a ``trio.run`` of its own, under a virtual clock that jumps; the last run of each seed is not cancelled at all. What
    a run raises carries a note with the seed and the step.
    """
    runs = 0
    longest = 0
    for seed in seeds:
        for step in range(1, steps_max + 1):
            instrument = _run_once(scenario, seed, step)
            runs += 1
            if not instrument.fired:
                longest = max(longest, instrument.steps_seen)
                break
        else:
            raise AssertionError(f"seed {seed}: the scenario takes more than {steps_max} steps")
    return SweepReport(runs=runs, steps_max=longest)


def _run_once(scenario: Scenario, seed: int, step: int) -> CancelAtStep:
    victim = trio.CancelScope()
    instrument = CancelAtStep(victim, step)

    async def main() -> None:
        try:
            await scenario(victim)
        finally:
            instrument.stop()

    try:
        with seeded_schedule(seed):
            trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0), instruments=[instrument])
    except BaseException as exc:
        exc.add_note(f"sweep: seed {seed}, cancelled at step {step}")
        raise
    return instrument


@contextmanager
def seeded_schedule(seed: int) -> Iterator[None]:
    """Make every ``trio.run`` in the block take the order of steps that ``seed`` stands for.

    trio shuffles the tasks of each tick on purpose and offers no public seed; these two names are what pytest-trio uses
    under hypothesis. A test fails when trio renames them.
    """
    scheduler = vars(import_module("trio._core._run"))
    generator, deterministic = scheduler[GENERATOR], scheduler[DETERMINISTIC]
    state = generator.getstate()
    scheduler[DETERMINISTIC] = True
    generator.seed(seed)
    try:
        yield
    finally:
        generator.setstate(state)
        scheduler[DETERMINISTIC] = deterministic
