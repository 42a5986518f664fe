"""Playing: so many rollouts at once, each a job of its own in one world.

An instance is judged and told when the last of its rollouts has ended.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import trio

from prorld.cli.preflight_judge import Report, Tried, report_of, troubled
from prorld.cli.preflight_plan import LIMITS, Settings, Task, plays_of
from prorld.cli.try_world import PLAY_TURN_TOKENS, Plays, open_plays
from prorld.config import Loaded
from prorld.domain.job import Sampling
from prorld.handlers.play import Play
from prorld.handlers.registry import Registry
from prorld.kit.process import Child, child
from prorld.wire.jobs import SubmitJob

__all__ = ["preflight"]

# Of one rollout, where sandboxes or graders fail: what is told after that is "unsure".
ATTEMPTS: Final = 3
TICK_S: Final = 0.25

# Keeps one CPU busy, and ends with the process that started it.
_BUSY = """
import os
parent = os.getppid()
while os.getppid() == parent:
    sum(range(200_000))
"""


class _Bench:
    """An instance that is being played."""

    def __init__(self, task: Task, plays: Sequence[Play], times: int) -> None:
        self.task = task
        self.plays = plays
        self.left = len(plays) * times
        self.tried: list[list[Tried]] = [[] for _ in plays]


class _Rollout(msgspec.Struct, frozen=True):
    bench: _Bench
    play: int
    number: int

    def job(self, handler: str, instance: dict[str, Any]) -> SubmitJob:
        """The job that it is."""
        turns = len(self.bench.plays[self.play].turns)
        return SubmitJob(
            job_id=f"{self.bench.task.digest}.{self.play}.{self.number}",
            handler=handler,
            instance=instance,
            sampling=Sampling(max_tokens=PLAY_TURN_TOKENS),
            agent=msgspec.structs.replace(LIMITS, max_turns=max(LIMITS.max_turns, turns)),
            max_attempts=ATTEMPTS,
        )


async def preflight(
    registry: Registry,
    tasks: Sequence[Task],
    settings: Settings,
    *,
    jobs: int,
    sandbox: str | None,
    loaded: Loaded,
    on_report: Callable[[Report], None],
    on_running: Callable[[int], None],
    on_tick: Callable[[], None],
) -> bool:
    """Play all tasks, or until a signal comes; whether none came. ``on_report`` is told of each as it is judged.

    ``on_running`` is told that one rollout more, or one less, is under way.
    """
    to_the_end = False
    async with trio.open_nursery() as side:
        # An exception, as Ctrl-C usually is one, could come up in the middle of a handler and be taken for its own.
        await side.start(_until_signal, side.cancel_scope, name="signals")
        for _ in range(settings.load):
            argv = [sys.executable, "-S", "-c", _BUSY]
            _started: Child = await side.start(partial(child, argv, env=dict(os.environ)), name="load")
        async with open_plays(registry, sandbox=sandbox, loaded=loaded, jobs=jobs) as plays:
            # Its ``open`` may have failed.
            registry.get(settings.handler)
            work = _work(registry, tasks, settings, on_report)
            async with trio.open_nursery() as players:
                players.start_soon(_tick, on_tick, name="progress")
                async with trio.open_nursery() as busy:
                    for _ in range(jobs):
                        busy.start_soon(_player, plays, settings, work, on_report, on_running, name="player")
                players.cancel_scope.cancel("all is played")
        to_the_end = True
        side.cancel_scope.cancel("all is played")
    return to_the_end


async def _until_signal(
    scope: trio.CancelScope, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            scope.cancel("interrupted")
            return


def _work(
    registry: Registry, tasks: Sequence[Task], settings: Settings, on_report: Callable[[Report], None]
) -> Iterator[_Rollout]:
    """Every rollout, those of one instance next to each other and its plays in turn."""
    handler = registry.get(settings.handler)
    for task in tasks:
        found, trouble = plays_of(handler, msgspec.json.decode(task.text))
        plays = settings.chosen(found)
        trouble = task.trouble or trouble or (None if plays else "the handler has none of the plays for it")
        if trouble is not None:
            on_report(troubled(task.line, task.digest, trouble))
            continue
        bench = _Bench(task, plays, settings.times)
        for number in range(settings.times):
            for play in range(len(plays)):
                yield _Rollout(bench, play, number)


async def _player(
    plays: Plays,
    settings: Settings,
    work: Iterator[_Rollout],
    on_report: Callable[[Report], None],
    on_running: Callable[[int], None],
) -> None:
    for rollout in work:
        bench = rollout.bench
        job = rollout.job(settings.handler, msgspec.json.decode(bench.task.text))
        on_running(1)
        played = await plays.play(job, bench.plays[rollout.play].turns)
        on_running(-1)
        bench.tried[rollout.play].append(Tried(record=played.record, told=played.told))
        bench.left -= 1
        if bench.left == 0:
            on_report(report_of(bench.task.line, bench.task.digest, [*zip(bench.plays, bench.tried, strict=True)]))


async def _tick(on_tick: Callable[[], None]) -> None:
    while True:
        on_tick()
        await trio.sleep(TICK_S)
