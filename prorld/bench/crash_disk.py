"""What becomes of what was accepted when the disk is full, and when writes fail; with a kill in the middle of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import trio

from prorld.bench.crash_caller import AskedInVain, Caller
from prorld.bench.crash_check import check_all, until_quiet
from prorld.bench.crash_daemon import Place, Running, small_disk
from prorld.bench.crash_oracle import Oracle
from prorld.bench.crash_work import Work, chain, settings, singles
from prorld.bench.processes import BenchFailed
from prorld.errors import leaves

__all__ = ["measure_disk"]

SLOTS = 16
WORKERS = 3
PATIENCE_S = 120.0
CALM_S = 1.5
TROUBLE_S = 3.0
REFUSED_S_MAX = 30.0
FINISH_S_MAX = 120.0
FAILING = "journal_failing"
LOOK_S = 0.1
# Every write beyond the first page fails: there is no journal so small.
FILE_BYTES = 4096

Trouble = Callable[[Running], None]


async def measure_disk(
    directory: Path, engine: str, notes: list[str], tell: Callable[[str], None]
) -> dict[str, int | None]:
    """Both, one after the other. Where no small file system can be had ``notes`` says so, and its figures are null."""
    tell("writes that fail")
    place = Place(directory / "io", engine, slots=SLOTS)
    found = await _troubled(
        place, "io", lambda life: life.limit_files(FILE_BYTES), lambda life: life.limit_files(None), notes
    )
    tell("a full disk")
    state = directory / "disk" / "state"
    try:
        async with small_disk(state) as disk:
            place = Place(directory / "disk", engine, slots=SLOTS, disk=disk)
            found |= await _troubled(place, "disk", lambda _: disk.fill(), lambda _: disk.make_room(), notes)
    except BenchFailed as exc:
        notes.append(f"disk: {exc}")
    return found


async def _troubled(place: Place, name: str, begin: Trouble, end: Trouble, notes: list[str]) -> dict[str, int | None]:
    """Trouble twice, the first time over before a kill, the second time after it. The next life has none."""
    oracle = Oracle()
    said = refused = 0
    unanswered: list[str] = []
    async with trio.open_nursery() as nursery:
        async with place.alive() as life:
            await life.ready()
            caller = Caller(place.address, place.token(), connections_max=32, patience_s=PATIENCE_S)
            work = Work(caller, oracle, seed=1, with_sandboxes=False)
            for trainer in (partial(chain, work), *(partial(singles, work, number) for number in range(WORKERS))):
                nursery.start_soon(_until_told, trainer, unanswered)
            await trio.sleep(CALM_S)
            begin(life)
            said += await _said(caller, is_failing=True)
            refused += await _refused(work)
            await trio.sleep(TROUBLE_S)
            end(life)
            if not await _said(caller, is_failing=False):
                oracle.lie(f"{name}: there is room again, and the daemon does not see it")
            await trio.sleep(CALM_S)
            begin(life)
            said += await _said(caller, is_failing=True)
            refused += await _refused(work)
            await life.kill()
            end(life)
        with closing(caller):
            async with place.alive() as life:
                await life.ready()
                work.stopping.set()
                with trio.move_on_after(FINISH_S_MAX) as scope:
                    await trio.lowlevel.checkpoint()
                    while nursery.child_tasks:  # noqa: ASYNC110 - a nursery tells nobody
                        await trio.sleep(LOOK_S)
                if scope.cancelled_caught or not await until_quiet(caller):
                    oracle.lie(f"{name}: not all came to an end")
                    nursery.cancel_scope.cancel("it takes too long")
                await check_all(work)
                await life.stop()
    notes += [f"{name}: {lie}" for lie in (*oracle.lies, *unanswered)]
    return {
        f"{name}_refused": refused,
        f"{name}_said": said,
        f"{name}_lies": oracle.lies_total + len(unanswered),
    }


async def _until_told(trainer: Callable[[], Any], unanswered: list[str]) -> None:
    try:
        await trainer()
    except* AskedInVain as group:
        unanswered += [str(exc) for exc in leaves(group)]


async def _refused(work: Work) -> int:
    """Hand a job in, once; 1 where it is refused for the journal. One that is accepted all the same has to end."""
    job_id = f"single-in-trouble-{work.dice.randrange(10**9)}:0"
    answer = await work.caller.once("POST", "/v1/jobs", {**settings(), "job_id": job_id, "instance": work.instance()})
    if answer is None:
        return 0
    status, found = answer
    if status < 300:
        work.oracle.job(found)
        return 0
    return int((status, found.get("error", {}).get("code")) == (503, FAILING))


async def _said(caller: Caller, *, is_failing: bool) -> int:
    """Wait until the daemon says in ``readyz`` that the journal fails, or does not say so any more; 1 when it does."""
    with trio.move_on_after(REFUSED_S_MAX):
        while True:
            answer = await caller.once("GET", "/readyz")
            if answer is not None:
                codes = {condition["code"] for condition in answer[1].get("missing", [])}
                if (FAILING in codes) == is_failing:
                    return 1
            await trio.sleep(LOOK_S)
    return 0
