"""The bench of the tools: a command and a cell in our sessions, beside what others do for the same, in one run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Annotated, Any, cast

import msgspec
import trio
from msgspec import Meta

from prorld.bench.figures import Aim, Some, quantile
from prorld.bench.live import Crowd
from prorld.bench.peers import PEERS, Spawner, open_spawner, peer_round
from prorld.bench.processes import BenchFailed
from prorld.bench.sample import NO_DEATHS, Machine, MachineFigures, by_wall, cpu_ms, left_out, missed_of, p50_p95, ratio
from prorld.bench.sandbox_world import WALLS, Recipe, World, open_runtimes
from prorld.errors import ProrldError, chain, leaves
from prorld.sandbox.contract import Kernel, Sandbox
from prorld.testing.sandbox_contract import open_sandbox

__all__ = ["AIMS", "ToolsFigures", "ToolsPlan", "aims_of", "missed", "run_tools", "with_ratios"]

BENCH_S_MAX = 1800.0
LIMIT_S = 30.0
COMMAND, ANSWER = "echo hi", b"hi\n"
CELL = "x = 1; print(x); x + 1"
KERNELS: tuple[Kernel, ...] = ("ipython", "plain")
SANDBOXES = ("bubblewrap", "apptainer")
WARM_COMMANDS = 20  # of ours, and cells, before any is counted

_IS_IPYTHON = "print('IPython' in __import__('sys').modules)"


class ToolsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is done. ``rounds`` of everything, each of so many commands; ``live`` sandboxes at once."""

    walls: tuple[str, ...] = WALLS
    image: str | None = None
    rounds: Some = 5
    commands: Some = 200
    fresh: Some = 10
    tmux: Some = 3
    tmux_eager: Some = 5
    rex: Some = 10
    cells: Some = 100
    live: Some = 300
    seconds: Annotated[float, Meta(gt=0, le=60)] = 5.0

    @classmethod
    def quick(cls) -> ToolsPlan:
        """A look, and no proof: of everything a little."""
        return cls(rounds=2, commands=50, fresh=3, tmux=1, tmux_eager=2, rex=3, cells=20, live=20, seconds=1.0)


_NAMES = (
    # A command of ours, and CPU of this process and of the shell for it.
    *("echo_p50_ms", "echo_p95_ms", "echo_cpu_ms"),
    # The same by others, as fast as they are behind this wall; a fresh process is a fresh sandbox, too.
    *(f"{peer}_{figure}" for peer in PEERS for figure in ("p50_ms", "p95_ms", "cpu_ms", "wrong")),
    # Others without any wall, over ours behind this one.
    *(f"{peer}_ratio" for peer in PEERS),
    # A new interpreter until its first answer; a cell of one that is warm.
    *(f"{kernel}_{what}_{share}_ms" for kernel in KERNELS for what in ("first", "cell") for share in ("p50", "p95")),
    # Many sandboxes driven by this one process, and its CPU for a command.
    *("live", "live_per_s", "live_cpu_ms"),
)

ToolsFigures = cast(
    "type[MachineFigures]",
    msgspec.defstruct("ToolsFigures", by_wall(WALLS, _NAMES), bases=(MachineFigures,), frozen=True, kw_only=True),
)

_AIMS = (
    Aim(figure="echo_p50_ms", bound=0.3),
    Aim(figure="rex_ratio", bound=100, how="at least"),
    Aim(figure="tmux_ratio", bound=1000, how="at least"),
    Aim(figure="ipython_cell_p50_ms", bound=1.5),
    Aim(figure="ipython_first_p50_ms", bound=300),
    Aim(figure="live_per_s", bound=2000, how="at least"),
)
AIMS: tuple[Aim, ...] = tuple(
    msgspec.structs.replace(aim, figure=f"{wall}_{aim.figure}") for wall in SANDBOXES for aim in _AIMS
)


def aims_of(plan: ToolsPlan) -> tuple[Aim, ...]:
    """The aims, with as many live sandboxes as were asked for."""
    return (*AIMS, NO_DEATHS, *(Aim(figure=f"{wall}_live", bound=plan.live, how="at least") for wall in SANDBOXES))


def missed(figures: MachineFigures, plan: ToolsPlan) -> list[str]:
    """One line per aim that the figures miss; what could not be measured misses its aim."""
    return missed_of(figures, aims_of(plan))


async def run_tools(plan: ToolsPlan, tell: Callable[[str], None]) -> MachineFigures:
    """Measure everything. This process is the daemon: it drives the sandboxes with the daemon's own code."""
    machine = Machine()
    with trio.fail_after(BENCH_S_MAX):
        async with open_runtimes(plan.walls, plan.image) as world:
            notes = left_out(WALLS, plan.walls, world.missing)
            found = await _commands(world, plan, tell, notes)
            for wall in world.runtimes:
                for kernel in KERNELS:
                    tell(f"{kernel} cells, {wall}")
                    found |= await _cells(world, wall, kernel, plan, notes)
            # What has no wall comes last: it is asked for nothing, and its end is the slowest.
            for wall in sorted(world.runtimes, key=lambda wall: wall == "bare"):
                tell(f"{plan.live} live sandboxes, {wall}")
                found |= await _crowd(world, wall, plan, notes)
            deaths = world.warden.deaths
    return msgspec.convert({**found, **machine.figures(notes, deaths)}, ToolsFigures)


# --- commands ---------------------------------------------------------------------------------------------------------


class _Desk(msgspec.Struct, frozen=True, kw_only=True):
    """What commands are measured on behind one wall. The peers have a sandbox of their own."""

    wall: str
    ours: Sandbox
    shell: int
    theirs: Sandbox
    recipe: Recipe


class _Tally:
    """Samples of all rounds, by what was measured."""

    def __init__(self) -> None:
        self.ms: dict[str, list[float]] = defaultdict(list)
        self.cpu_ms: dict[str, list[float]] = defaultdict(list)
        self.wrong: dict[str, int] = defaultdict(int)

    def add(self, name: str, ms: Sequence[float], cpu_ms_each: float, wrong: int = 0) -> None:
        self.ms[name] += ms
        self.cpu_ms[name].append(cpu_ms_each)
        self.wrong[name] += wrong

    def figures(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, samples in self.ms.items():
            found |= p50_p95(name, samples)
            found[f"{name}_cpu_ms"] = quantile(self.cpu_ms[name], 0.5)
            if not name.endswith("_echo"):  # a wrong answer of ours ends the bench
                found[f"{name}_wrong"] = float(self.wrong[name])
        return found


async def _commands(world: World, plan: ToolsPlan, tell: Callable[[str], None], notes: list[str]) -> dict[str, Any]:
    """Rounds in which everybody has a turn: what disturbs one disturbs all."""
    tally = _Tally()
    silent: set[str] = set()
    async with AsyncExitStack() as stack:
        desks = [await _desk(world, wall, stack) for wall in world.runtimes]
        spawner = await stack.enter_async_context(open_spawner(world.warden.uid, world.warden.gid))
        for desk in desks:
            await _ours(desk, WARM_COMMANDS)
        for number in range(1, plan.rounds + 1):
            tell(f"commands, round {number} of {plan.rounds}")
            for desk in desks:
                tally.add(f"{desk.wall}_echo", *await _ours(desk, plan.commands))
                await _fresh(world, desk, spawner, plan, tally, silent, notes)
                await _peers(desk, plan, tally, silent, notes)
    return with_ratios(tally.figures())


def with_ratios(found: Mapping[str, float]) -> dict[str, float]:
    """The figures, and how many times faster we are: others without any wall, over ours behind each."""
    ratios: dict[str, float] = {}
    for wall in WALLS:
        for peer in PEERS:
            ratios |= ratio(found, f"{wall}_{peer}_ratio", f"bare_{peer}_p50_ms", f"{wall}_echo_p50_ms")
    return {**found, **ratios}


async def _desk(world: World, wall: str, stack: AsyncExitStack) -> _Desk:
    runtime, spec = world.runtimes[wall], world.spec(wall)
    recipe = await world.recipe(wall)
    ours = await stack.enter_async_context(open_sandbox(runtime, spec, sandbox_id=f"{wall}-ours"))
    await ours.bash("true", limit_s=LIMIT_S)  # its shell is there then, and was asked for last
    shell = world.warden.spawned[-1].pid
    theirs = await stack.enter_async_context(open_sandbox(runtime, spec, sandbox_id=f"{wall}-theirs"))
    await theirs.bash(":", limit_s=LIMIT_S)
    return _Desk(wall=wall, ours=ours, shell=shell, theirs=theirs, recipe=recipe)


async def _ours(desk: _Desk, commands: int) -> tuple[list[float], float]:
    """Milliseconds of each, and CPU of this process and the shell for one."""
    samples: list[float] = []
    cpu_before = cpu_ms([desk.shell])
    for _ in range(commands):
        began = time.perf_counter()
        result = await desk.ours.bash(COMMAND, limit_s=LIMIT_S)
        samples.append((time.perf_counter() - began) * 1e3)
        if (result.exit_code, result.output) != (0, ANSWER):
            raise BenchFailed(f"{desk.wall}: `{COMMAND}` gives {result}")
    return samples, (cpu_ms([desk.shell]) - cpu_before) / commands


async def _fresh(
    world: World, desk: _Desk, spawner: Spawner, plan: ToolsPlan, tally: _Tally, silent: set[str], notes: list[str]
) -> None:
    """A process per command: behind a wall, a sandbox per command, as an agent without a session has it."""
    name = f"{desk.wall}_fresh"
    if name in silent:
        return
    samples: list[float] = []
    used_ms, wrong = 0.0, 0
    with desk.recipe.prepared(world.runtime_dir / "fresh", COMMAND) as order:
        for at in range(plan.fresh + 1):
            outcome = await spawner.carry_out(order)
            if outcome.why:
                silent.add(name)
                notes.append(f"{name}: {outcome.why}")
                return
            if at:  # the first one is not counted
                samples.append(outcome.start_ms)
                used_ms += outcome.cpu_ms
                wrong += outcome.output != ANSWER
    tally.add(name, samples, used_ms / plan.fresh, wrong)


async def _peers(desk: _Desk, plan: ToolsPlan, tally: _Tally, silent: set[str], notes: list[str]) -> None:
    for peer in PEERS:
        name = f"{desk.wall}_{peer}"
        if peer == "fresh" or name in silent:
            continue
        found = await peer_round(desk.theirs, peer, getattr(plan, peer))
        if found.missing or not found.ms:
            silent.add(name)
            notes.append(f"{name}: {found.missing or 'nothing was measured'}")
        else:
            tally.add(name, found.ms, found.cpu_ms, found.wrong)


# --- cells ------------------------------------------------------------------------------------------------------------


async def _cells(world: World, wall: str, kernel: Kernel, plan: ToolsPlan, notes: list[str]) -> dict[str, float]:
    """A new interpreter each round: until its first answer, and the cells of a warm one."""
    first: list[float] = []
    cells: list[float] = []
    trouble: str | None = None
    try:
        for number in range(plan.rounds):
            spec = world.spec(wall, kernel=kernel)
            async with open_sandbox(world.runtimes[wall], spec, sandbox_id=f"{wall}-{kernel}-{number}") as sandbox:
                first.append(await _cell(sandbox))
                told = await sandbox.python(_IS_IPYTHON, limit_s=LIMIT_S)
                if (told.text.strip() == "True") != (kernel == "ipython"):
                    raise BenchFailed(f"what runs cells says {told.text.strip()[-200:]!r} to being IPython")
                for _ in range(WARM_COMMANDS):
                    await _cell(sandbox)
                cells += [await _cell(sandbox) for _ in range(plan.cells)]
    except* ProrldError as group:
        trouble = chain(next(leaves(group)))
    if trouble is not None:
        notes.append(f"{wall}_{kernel}: {' '.join(trouble.split())}")
        return {}
    return {**p50_p95(f"{wall}_{kernel}_first", first), **p50_p95(f"{wall}_{kernel}_cell", cells)}


async def _cell(sandbox: Sandbox) -> float:
    began = time.perf_counter()
    result = await sandbox.python(CELL, limit_s=LIMIT_S)
    ms = (time.perf_counter() - began) * 1e3
    if result.exit_code != 0 or not result.text.startswith("1\n") or "2" not in result.text:
        raise BenchFailed(f"`{CELL}` gives {result}")
    return ms


# --- many at once -----------------------------------------------------------------------------------------------------


async def _crowd(world: World, wall: str, plan: ToolsPlan, notes: list[str]) -> dict[str, float]:
    """All sandboxes at once, each given its next command as soon as it has answered."""
    crowd = Crowd(world, wall, "live")
    done = 0

    async def drive(sandbox: Sandbox) -> None:
        nonlocal done
        while True:
            result = await sandbox.bash(COMMAND, limit_s=LIMIT_S)
            if (result.exit_code, result.output) != (0, ANSWER):
                raise BenchFailed(f"{wall}: `{COMMAND}` gives {result}")
            done += 1

    async with trio.open_nursery() as living:
        await crowd.begin(plan.live, living)
        cpu_before, began = cpu_ms(), time.perf_counter()
        with trio.move_on_after(plan.seconds):
            async with trio.open_nursery() as drivers:
                for sandbox in crowd.sandboxes:
                    drivers.start_soon(drive, sandbox)
        seconds, used_ms = time.perf_counter() - began, cpu_ms() - cpu_before
        living.cancel_scope.cancel("everything is measured")
    notes += crowd.notes()
    return {
        f"{wall}_live": float(len(crowd.sandboxes)),
        f"{wall}_live_per_s": done / seconds,
        f"{wall}_live_cpu_ms": used_ms / max(1, done),
    }
