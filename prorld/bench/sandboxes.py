"""The bench of the sandboxes: what it takes to make one, keep it, and be rid of it, beside the bare runtime.

Bare is the very command line that the daemon starts a sandbox with, spawned by a small process without a daemon, up to
the first byte that its bash says. Ours has started when the runtime hands it out, its shell ready for a command.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import trio

from prorld.bench.figures import Aim, Some
from prorld.bench.leftovers import Leftovers, below_process, found_left
from prorld.bench.live import Crowd
from prorld.bench.peers import Spawner, open_spawner
from prorld.bench.processes import BenchFailed
from prorld.bench.sample import (
    NO_DEATHS,
    Machine,
    MachineFigures,
    by_wall,
    left_out,
    missed_of,
    p50_p95,
    pss_kb,
    ratio,
    tree_cpu_ms,
)
from prorld.bench.sandbox_world import BOOT_ID, World, open_runtimes
from prorld.sandbox.contract import Sandbox, SandboxRuntime, SandboxSpec
from prorld.sandbox.warm import WarmRuntime
from prorld.sandbox.warm_plan import WarmRules

__all__ = [
    "AIMS",
    "WALLS",
    "SandboxesFigures",
    "SandboxesPlan",
    "aims_of",
    "left_figures",
    "measure_warm",
    "missed",
    "run_sandboxes",
]

WALLS = ("bubblewrap", "apptainer")
BENCH_S_MAX = 1800.0
LIMIT_S = 30.0
WARM_LOOK_S = 0.02
SETTLE_S = 0.5  # before memory is looked at


class SandboxesPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is done. ``rounds`` are pairs of ours and bare, in turns, and take-overs from a pool."""

    walls: tuple[str, ...] = WALLS
    image: str | None = None
    rounds: Some = 40
    idle: Some = 20
    live: Some = 300

    @classmethod
    def quick(cls) -> SandboxesPlan:
        """A look, and no proof: of everything a little."""
        return cls(rounds=5, idle=4, live=20)


_NAMES = (
    # From the call until it is handed out, and until its shell has answered. From the end of its scope to the end.
    *(f"{what}_{share}_ms" for what in ("start", "answer", "end") for share in ("p50", "p95")),
    # The same command line without the daemon: until its first byte; from the end of its socket to its own end.
    *(f"{what}_{share}_ms" for what in ("bare_start", "bare_end") for share in ("p50", "p95")),
    *("start_ratio", "answer_ratio", "end_ratio"),
    # A sandbox that stood ready in a pool.
    *("warm_p50_ms", "warm_p95_ms"),
    # CPU from beginning to end: the daemon's, the warden's and the sandbox's.
    *("cpu_ms", "bare_cpu_ms"),
    # Memory of a sandbox with nothing to do.
    *("idle_pss_kb", "idle_processes"),
    # Many at once.
    *("live", "live_start_per_s", "live_answer_s", "live_end_s"),
    # What is there when all of them have ended.
    *("left_processes", "left_fuse", "left_mounts", "left_directories"),
)

SandboxesFigures = cast(
    "type[MachineFigures]",
    msgspec.defstruct("SandboxesFigures", by_wall(WALLS, _NAMES), bases=(MachineFigures,), frozen=True, kw_only=True),
)

_AIMS = (
    Aim(figure="start_ratio", bound=1.3, how="at most"),
    Aim(figure="answer_ratio", bound=1.3, how="at most"),
    Aim(figure="end_ratio", bound=1.3, how="at most"),
    Aim(figure="warm_p50_ms", bound=5),
    Aim(figure="left_processes", bound=0, how="at most"),
    Aim(figure="left_fuse", bound=0, how="at most"),
    Aim(figure="left_mounts", bound=0, how="at most"),
    Aim(figure="left_directories", bound=0, how="at most"),
)
AIMS: tuple[Aim, ...] = tuple(
    msgspec.structs.replace(aim, figure=f"{wall}_{aim.figure}") for wall in WALLS for aim in _AIMS
)


def aims_of(plan: SandboxesPlan) -> tuple[Aim, ...]:
    """The aims, with as many live sandboxes as were asked for."""
    return (*AIMS, NO_DEATHS, *(Aim(figure=f"{wall}_live", bound=plan.live, how="at least") for wall in WALLS))


def missed(figures: MachineFigures, plan: SandboxesPlan) -> list[str]:
    """One line per aim that the figures miss; what could not be measured misses its aim."""
    return missed_of(figures, aims_of(plan))


async def run_sandboxes(plan: SandboxesPlan, tell: Callable[[str], None]) -> MachineFigures:
    """Measure every wall that can be had here. This process is the daemon."""
    machine = Machine()
    found: dict[str, Any] = {}
    with trio.fail_after(BENCH_S_MAX):
        async with open_runtimes(plan.walls, plan.image) as world:
            notes = left_out(WALLS, plan.walls, world.missing)
            async with open_spawner(world.warden.uid, world.warden.gid) as spawner:
                for wall in world.runtimes:
                    before = found_left(world)
                    tell(f"{plan.rounds} pairs, {wall}")
                    found |= await _pairs(world, wall, spawner, plan, notes)
                    found |= await measure_warm(world, wall, plan)
                    tell(f"{plan.idle} idle sandboxes, {wall}")
                    found |= await _idle(world, wall, plan, notes)
                    tell(f"{plan.live} sandboxes at once, {wall}")
                    found |= await _crowd(world, wall, plan, notes)
                    found |= left_figures(wall, found_left(world), before)
            deaths = world.warden.deaths
    return msgspec.convert({**found, **machine.figures(notes, deaths)}, SandboxesFigures)


def left_figures(wall: str, after: Leftovers, before: Leftovers) -> dict[str, float]:
    """How much more there is than before. Nobody is given time to go: a sandbox that has ended has left nothing."""
    return {
        f"{wall}_left_{name}": float(len(getattr(after, name) - getattr(before, name)))
        for name in Leftovers.__struct_fields__
    }


# --- one at a time ----------------------------------------------------------------------------------------------------


class _Life(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox of ours, in milliseconds."""

    start: float
    answer: float
    end: float


async def _live(runtime: SandboxRuntime, wall: str, spec: SandboxSpec, sandbox_id: str) -> _Life:
    async def run(task_status: trio.TaskStatus[Sandbox] = trio.TASK_STATUS_IGNORED) -> None:
        await runtime.run(spec, sandbox_id=sandbox_id, job_id="bench", task_status=task_status)

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        sandbox: Sandbox = await nursery.start(run)
        started = time.perf_counter()
        await _answers(sandbox, wall, "hi")
        ending = time.perf_counter()
        nursery.cancel_scope.cancel("it is measured")
    ended = time.perf_counter()
    return _Life(
        start=(started - began) * 1e3,
        answer=(ending - began) * 1e3,
        end=(ended - ending) * 1e3,
    )


async def _answers(sandbox: Sandbox, wall: str, word: str) -> None:
    result = await sandbox.bash(f"echo {word}", limit_s=LIMIT_S)
    if (result.exit_code, result.output) != (0, f"{word}\n".encode()):
        raise BenchFailed(f"{wall}: a sandbox answers {result}")


async def _pairs(world: World, wall: str, spawner: Spawner, plan: SandboxesPlan, notes: list[str]) -> dict[str, float]:
    """Ours and bare in turns; the first pair is not counted."""
    recipe = await world.recipe(wall)
    ours: list[_Life] = []
    bare_start: list[float] = []
    bare_end: list[float] = []
    bare_cpu_ms, ours_cpu_ms = 0.0, 0.0
    why = ""
    for number in range(plan.rounds + 1):
        cpu_before = tree_cpu_ms(world.warden_pid)
        life = await _live(world.runtimes[wall], wall, world.spec(wall), f"{wall}-pair-{number}")
        used_ms = tree_cpu_ms(world.warden_pid) - cpu_before
        with recipe.prepared(world.runtime_dir / f"pair-{number}") as order:
            outcome = await spawner.carry_out(order)
        why = why or outcome.why
        if number:
            ours.append(life)
            ours_cpu_ms += used_ms
            bare_start.append(outcome.start_ms)
            bare_end.append(outcome.end_ms)
            bare_cpu_ms += outcome.cpu_ms
    found = {
        **p50_p95(f"{wall}_start", [life.start for life in ours]),
        **p50_p95(f"{wall}_answer", [life.answer for life in ours]),
        **p50_p95(f"{wall}_end", [life.end for life in ours]),
        f"{wall}_cpu_ms": ours_cpu_ms / plan.rounds,
    }
    if why:
        notes.append(f"{wall} without the daemon {why}")
        return found
    found |= p50_p95(f"{wall}_bare_start", bare_start) | p50_p95(f"{wall}_bare_end", bare_end)
    found[f"{wall}_bare_cpu_ms"] = bare_cpu_ms / plan.rounds
    for what, bare in (("start", "start"), ("answer", "start"), ("end", "end")):
        found |= ratio(found, f"{wall}_{what}_ratio", f"{wall}_{what}_p50_ms", f"{wall}_bare_{bare}_p50_ms")
    return found


async def _until_one_stands_ready(warm: WarmRuntime) -> None:
    with trio.fail_after(LIMIT_S):
        await trio.lowlevel.checkpoint()
        while not warm.idle:  # noqa: ASYNC110 - the pool tells nobody
            await trio.sleep(WARM_LOOK_S)


async def measure_warm(world: World, wall: str, plan: SandboxesPlan) -> dict[str, float]:
    """Sandboxes that stand ready, taken one at a time; what refills the pool is awaited in between."""
    warm, spec = WarmRuntime(world.runtimes[wall], WarmRules(total=1), boot_id=BOOT_ID), world.spec(wall)
    samples: list[float] = []
    async with trio.open_nursery() as nursery:
        await nursery.start(warm.keep)
        for number in range(plan.rounds):
            warm.expect(spec)
            await _until_one_stands_ready(warm)
            samples.append((await _live(warm, wall, spec, f"{wall}-warm-{number}")).start)
        nursery.cancel_scope.cancel("it is measured")
    return p50_p95(f"{wall}_warm", samples)


# --- many at once -----------------------------------------------------------------------------------------------------


async def _answering(sandboxes: Sequence[Sandbox], wall: str) -> int:
    """How many of them answer, all asked at once, each for a word of its own."""
    good = 0

    async def ask(number: int, sandbox: Sandbox) -> None:
        nonlocal good
        await _answers(sandbox, wall, f"sandbox-{number}")
        good += 1

    async with trio.open_nursery() as nursery:
        for number, sandbox in enumerate(sandboxes):
            nursery.start_soon(ask, number, sandbox)
    return good


async def _idle(world: World, wall: str, plan: SandboxesPlan, notes: list[str]) -> dict[str, float]:
    crowd = Crowd(world, wall, "idle")
    before = below_process(world.warden_pid)
    async with trio.open_nursery() as nursery:
        await crowd.begin(plan.idle, nursery)
        await trio.sleep(SETTLE_S)
        pids = below_process(world.warden_pid) - before
        held = pss_kb(pids)
        nursery.cancel_scope.cancel("it is measured")
    notes += crowd.notes()
    if not crowd.sandboxes:
        return {}
    found = {f"{wall}_idle_processes": len(pids) / len(crowd.sandboxes)}
    if held is None:
        notes.append(f"{wall}_idle_pss_kb: the kernel does not show this user the memory of its sandboxes")
        return found
    return {**found, f"{wall}_idle_pss_kb": held / len(crowd.sandboxes)}


async def _crowd(world: World, wall: str, plan: SandboxesPlan, notes: list[str]) -> dict[str, float]:
    crowd = Crowd(world, wall, "live")
    async with trio.open_nursery() as nursery:
        began = time.perf_counter()
        await crowd.begin(plan.live, nursery)
        started = time.perf_counter()
        answering = await _answering(crowd.sandboxes, wall)
        ending = time.perf_counter()
        nursery.cancel_scope.cancel("it is measured")
    ended = time.perf_counter()
    notes += crowd.notes()
    return {
        f"{wall}_live": float(answering),
        f"{wall}_live_start_per_s": len(crowd.sandboxes) / (started - began),
        f"{wall}_live_answer_s": ending - started,
        f"{wall}_live_end_s": ended - ending,
    }
