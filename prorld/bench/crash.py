"""A daemon that is killed at random instants while trainers work, and whether anything that was told is untrue later.

The engine lives on, as engines do. Each life of the daemon has the same port and the same state directory.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import trio
from msgspec import Meta

from prorld.bench.crash_caller import AskedInVain, Caller
from prorld.bench.crash_check import check_all, until_quiet
from prorld.bench.crash_daemon import Place, Running, left_of
from prorld.bench.crash_disk import measure_disk
from prorld.bench.crash_oracle import Oracle
from prorld.bench.crash_work import Work, chain, evaluations, singles, stream
from prorld.bench.figures import Aim, Some, quantile
from prorld.bench.sample import Machine, MachineFigures, missed_of
from prorld.errors import leaves
from prorld.testing.scripted_engine.script import Latency, Script
from prorld.testing.scripted_engine.serve import Serving, run_scripted_engine

__all__ = ["AIMS", "CrashFigures", "CrashPlan", "crash_script", "missed", "run_crash"]

BENCH_S_MAX = 7200.0
# What is left to be done when the last kill is over.
FINISH_S_MAX = 300.0
# A held request is answered by a life that is long enough for it; many are not.
PATIENCE_S = 900.0
SLOTS = 24
TOKEN_S = 0.004
GONE_S_MAX = 5.0


class CrashPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How often it is killed: a share of times while it starts, else at a random moment once it has answered.

    That comes within ``latest_s`` and the time that the start took.
    """

    kills: Some = 200
    seed: int = 0
    workers: Some = 3
    in_start: Annotated[float, Meta(ge=0, le=1)] = 0.2
    latest_s: float = 2.0
    disk: bool = True

    @classmethod
    def quick(cls) -> CrashPlan:
        """A look, and no proof."""
        return cls(kills=10, workers=2)


class CrashFigures(MachineFigures, frozen=True, kw_only=True):
    """What was done to it, and what became of what it had accepted. ``lies`` are in ``notes``.

    ``kills_in_start`` came before it answered for the first time in that life.
    """

    kills: int
    kills_in_start: int
    start_p50_s: float
    start_last_s: float
    jobs: int
    batches: int
    groups_done: int
    attempts_lost: int
    exchanges_broken: int
    lies: int
    unanswered: int
    left_processes: int
    exit_code: int
    journal_mb: float
    # Without room on the disk, and with writes that fail: answers 503, and whether readyz said so.
    disk_refused: int | None = None
    disk_said: int | None = None
    disk_lies: int | None = None
    io_refused: int | None = None
    io_said: int | None = None
    io_lies: int | None = None


AIMS: tuple[Aim, ...] = (
    Aim(figure="lies", bound=0, how="at most"),
    Aim(figure="unanswered", bound=0, how="at most"),
    Aim(figure="left_processes", bound=0, how="at most"),
    Aim(figure="exit_code", bound=0, how="at most"),
    Aim(figure="attempts_lost", bound=1, how="at least"),
)
_DISK_AIMS: tuple[Aim, ...] = (
    Aim(figure="disk_refused", bound=1, how="at least"),
    Aim(figure="disk_said", bound=2, how="at least"),
    Aim(figure="disk_lies", bound=0, how="at most"),
    Aim(figure="io_refused", bound=1, how="at least"),
    Aim(figure="io_said", bound=2, how="at least"),
    Aim(figure="io_lies", bound=0, how="at most"),
)


def missed(figures: CrashFigures, plan: CrashPlan) -> list[str]:
    """One line per aim that the figures miss."""
    kills = Aim(figure="kills", bound=plan.kills, how="at least")
    return missed_of(figures, (*AIMS, kills, *(_DISK_AIMS if plan.disk else ())))


def crash_script() -> Script:
    """An engine that says as much as it is asked for, in a while."""
    return Script(pick="asked", max_model_len=1 << 20, latency=Latency(decode_token_s=TOKEN_S))


async def run_crash(plan: CrashPlan, tell: Callable[[str], None]) -> CrashFigures:
    """Kill, start again, and look at what is left. ``tell`` hears what is being done."""
    machine = Machine()
    found: dict[str, Any] = {}
    notes: list[str] = []
    with trio.fail_after(BENCH_S_MAX), tempfile.TemporaryDirectory(prefix="prorld-crash-") as place:
        async with trio.open_nursery() as nursery:
            serving: Serving = await nursery.start(run_scripted_engine, crash_script(), name="scripted engine")
            tell(f"{plan.kills} kills")
            found |= await _killed(plan, Path(place), serving.url, notes, tell)
            if plan.disk:
                found |= await measure_disk(Path(place), serving.url, notes, tell)
            nursery.cancel_scope.cancel("everything is measured")
    return msgspec.convert({**found, **machine.figures(notes, warden_deaths=0)}, CrashFigures)


async def _killed(
    plan: CrashPlan, directory: Path, engine: str, notes: list[str], tell: Callable[[str], None]
) -> dict[str, Any]:
    place = Place(directory / "killed", engine, slots=SLOTS)
    oracle = Oracle()
    async with place.alive() as first:
        starts = [await first.ready()]
        token = place.token()
        await first.kill()
    unanswered: list[str] = []
    with closing(Caller(place.address, token, connections_max=64, patience_s=PATIENCE_S)) as caller:
        work = Work(caller, oracle, plan.seed)
        async with trio.open_nursery() as nursery:
            for trainer in _trainers(plan, work):
                nursery.start_soon(_until_told, trainer, unanswered)
            early = await _lives(plan, place, work, starts, tell)
            async with place.alive() as last:
                starts.append(await last.ready())
                tell("let everything end")
                await _finish(nursery, caller, unanswered)
                looked_at = await _checked(work, unanswered)
                await last.kill()
        tell("look at it all once more, after another kill")
        async with place.alive() as again:
            starts.append(await again.ready())
            await _checked(work, unanswered)
            exit_code = await again.stop()
        broken = caller.broken
    notes += [*oracle.lies, *unanswered]
    return {
        "kills": plan.kills,
        "kills_in_start": early,
        "start_p50_s": quantile(starts, 0.5),
        "start_last_s": starts[-1],
        "exchanges_broken": broken,
        "lies": oracle.lies_total,
        "unanswered": len(unanswered),
        "left_processes": len(await _left(place.directory, notes)),
        "exit_code": exit_code,
        "journal_mb": sum(file.stat().st_size for file in place.state.glob("journal.sqlite*")) / 1e6,
        **looked_at,
    }


def _trainers(plan: CrashPlan, work: Work) -> list[Callable[[], Any]]:
    """Everybody who works while it is killed."""
    workers = [partial(singles, work, worker) for worker in range(plan.workers)]
    return [partial(chain, work), partial(stream, work), partial(evaluations, work), *workers]


async def _until_told(trainer: Callable[[], Any], unanswered: list[str]) -> None:
    try:
        await trainer()
    except* AskedInVain as group:
        unanswered += [str(exc) for exc in leaves(group)]


async def _lives(plan: CrashPlan, place: Place, work: Work, starts: list[float], tell: Callable[[str], None]) -> int:
    """So many lives, each ended by SIGKILL; how many were ended before they had begun to answer."""
    dice = random.Random(plan.seed + 1)  # noqa: S311 - no secret
    early = 0
    for number in range(plan.kills):
        async with place.alive() as life:
            if dice.random() < plan.in_start:
                early += await _killed_in_start(life, dice.uniform(0, max(starts[-5:])), starts)
            else:
                starts.append(await life.ready())
                # On a machine where starting takes long, so does everything else.
                await trio.sleep(dice.uniform(0, plan.latest_s + starts[-1]))
            await life.kill()
        if (number + 1) % 20 == 0:
            tell(f"{number + 1} kills, {len(work.oracle.done)} jobs done, {work.oracle.lies_total} lies")
    work.stopping.set()
    return early


async def _killed_in_start(life: Running, seconds: float, starts: list[float]) -> bool:
    """Whether its time comes before it answers."""
    with trio.move_on_after(seconds) as scope:
        starts.append(await life.ready())
    return scope.cancelled_caught


async def _finish(nursery: trio.Nursery, caller: Caller, unanswered: list[str]) -> None:
    """Wait for the trainers to be done, and for every job."""
    with trio.move_on_after(FINISH_S_MAX) as scope:
        await trio.lowlevel.checkpoint()
        while nursery.child_tasks:  # noqa: ASYNC110 - a nursery tells nobody
            await trio.sleep(0.1)
    if scope.cancelled_caught:
        unanswered.append(f"{len(nursery.child_tasks)} trainers were not done {FINISH_S_MAX:g} s after the last kill")
        nursery.cancel_scope.cancel("it takes too long")
    if not await until_quiet(caller):
        unanswered.append("jobs were left that did not end")


async def _checked(work: Work, unanswered: list[str]) -> dict[str, int]:
    try:
        return await check_all(work)
    except AskedInVain as exc:
        unanswered.append(str(exc))
        return {"jobs": 0, "batches": 0, "groups_done": 0, "attempts_lost": 0}


async def _left(directory: Path, notes: list[str]) -> list[str]:
    """Processes that are still there a moment after the last end."""
    left: list[str] = []
    with trio.move_on_after(GONE_S_MAX):
        await trio.lowlevel.checkpoint()
        while left := left_of(directory):  # noqa: ASYNC110 - processes tell nobody
            await trio.sleep(0.1)
    notes += left
    return left
