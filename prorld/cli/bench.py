"""``prorld bench``: what the service and its sandboxes cost by themselves, measured on this machine."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from prorld.cli.common import add_json_option, epilog, positive
from prorld.cli.exits import Exit, UsageError
from prorld.cli.output import note, say, say_json, table

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    import msgspec

    from prorld.bench.figures import Aim
    from prorld.bench.learn_figures import LearnPlan

PlanT = TypeVar("PlanT")
FiguresT = TypeVar("FiguresT")
WalledT = TypeVar("WalledT", bound="msgspec.Struct")

SUMMARY = "measure what the service and sandboxes cost"

_WHAT = ("orchestration", "transport", "tools", "sandboxes", "dapo", "queue", "crash", "learn", "learn-async")

# The flags of ``orchestration`` that set a number of its plan, and what each counts.
_COUNTS = {
    "rollouts": "one-turn rollouts to count CPU over",
    "clients": "clients that hand them in at the same time",
    "turns": "turns of each rollout whose engine calls are timed",
    "concurrent": "rollouts at once, and cancelled at once",
    "held": "held requests",
    "abandoned": "of them left by their clients",
    "malformed": "requests that are wrong",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "orchestration: a daemon and a scripted engine without latency, each a process of its own, real HTTP and no\n"
        "sandbox. transport: what an engine call costs the daemon, beside httpx2 and httpx where they are installed.\n"
        "tools: a command and a cell in our sessions, beside tmux, SWE-ReX and a process for each. sandboxes: start\n"
        "and end beside the bare runtime, memory, many at once, and what is left. dapo: five ways to collect groups\n"
        "that training can learn from. queue: thousands of jobs that wait. crash: a daemon that is killed at random.\n"
        "learn: a small model that learns on the processor, once a seed (needs prorld[torch] and a vLLM).\n"
        "learn-async: the same, synchronously and asynchronously.\n"
        "Figures of CPU hold on a busy machine, too; of times, trust the ratios. docs/bench.md explains each."
    )
    parser.epilog = epilog(
        ("prorld bench orchestration", "every figure, about two minutes"),
        ("prorld bench orchestration --check", "exit 1 and a line for each aim that is missed"),
        ("prorld bench transport --check", "CPU per engine call at 64, 256 and 512 in flight, two minutes"),
        ("prorld bench orchestration --concurrent 200 --held 500 --abandoned 300", "a quick look"),
        ("prorld bench tools --quick", "a quick look"),
        ("prorld bench tools --image DIR --check", "every wall, on an image that is a directory"),
        ("prorld bench sandboxes --image DIR --check", "likewise"),
        ("prorld bench dapo --check", "batches beside what trainers do without them, ten minutes"),
        ("prorld bench queue --check", "ten thousand jobs that wait, half of them cancelled in one call"),
        ("prorld bench crash --kills 200 --check", "kill the daemon again and again: is all that it told still true?"),
        ("prorld bench learn --seeds 0,1 --check", "does reward rise? half an hour a seed on two cores"),
    )
    parser.add_argument("what", choices=_WHAT, help="what to measure")
    for name, what in _COUNTS.items():
        parser.add_argument(f"--{name}", type=positive, metavar="N", help=what)
    parser.add_argument("--rounds", type=positive, metavar="N", help="all others: rounds of each measurement")
    parser.add_argument("--seconds", type=_seconds, metavar="S", help="transport, tools: length of a round")
    walled = parser.add_argument_group("tools and sandboxes")
    walled.add_argument("--image", metavar="DIR", help="a root file system for sandboxes; Apptainer needs one")
    walled.add_argument(
        "--wall", action="append", choices=("bare", "bubblewrap", "apptainer"), help="measure this alone, or these"
    )
    walled.add_argument("--live", type=positive, metavar="N", help="sandboxes at once")
    dapo = parser.add_argument_group("dapo")
    dapo.add_argument("--speed", type=positive, metavar="N", help="seconds of the setting in one of the clock")
    dapo.add_argument("--strategy", action="append", help="run this alone, or these")
    crash = parser.add_argument_group("crash")
    crash.add_argument("--kills", type=positive, metavar="N", help="how often the daemon is killed")
    crash.add_argument("--seed", type=int, metavar="N", help="other instants")
    learning = parser.add_argument_group("learn and learn-async")
    learning.add_argument("--seeds", type=_seeds, metavar="N,N", help="a run for each (default 0,1)")
    learning.add_argument("--engine", choices=("vllm", "embedded"), help="(default vllm)")
    learning.add_argument("--python", metavar="PATH", help="a Python that has vLLM")
    learning.add_argument("--model", metavar="PATH", help="as in learn-demo")
    learning.add_argument("--steps", type=positive, metavar="N", help="optimizer steps (default 20)")
    learning.add_argument("--keep", metavar="DIR", help="leave the runs and their curves there")
    parser.add_argument("--quick", action="store_true", help="all from tools on: a look, and no proof")
    parser.add_argument("--check", action="store_true", help="exit 1 when an aim is missed")
    add_json_option(parser)


def _seeds(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers, as in 0,1") from None


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 60:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds up to 60")
    return value


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    benches = {
        "orchestration": _orchestration,
        "transport": _transport,
        "tools": _tools,
        "sandboxes": _sandboxes,
        "dapo": _dapo,
        "queue": _queue,
        "crash": _crash,
        "learn": _learn,
        "learn-async": _learn_async,
    }
    return benches[args.what](args)


def _measured(bench: Callable[[PlanT, Callable[[str], None]], Awaitable[FiguresT]], plan: PlanT) -> FiguresT:
    """Its figures. A signal ends what it started, and then this."""
    from prorld.cli.running import interruptible, run_trio

    return run_trio(partial(interruptible, partial(bench, plan, note)))


def _orchestration(args: argparse.Namespace) -> int:
    from prorld.bench.figures import AIMS, Plan, missed
    from prorld.bench.orchestration import run_bench

    plan = _plan(args, Plan, _COUNTS)
    figures = _measured(run_bench, plan)
    return _end(args, figures, AIMS, missed(figures, plan))


def _transport(args: argparse.Namespace) -> int:
    from prorld.bench.transport import AIMS, TransportPlan, missed, run_transport

    figures = _measured(run_transport, _plan(args, TransportPlan, ("rounds", "seconds")))
    return _end(args, figures, AIMS, missed(figures))


def _tools(args: argparse.Namespace) -> int:
    from prorld.bench.sandbox_world import WALLS
    from prorld.bench.tools import ToolsPlan, aims_of, missed, run_tools

    plan = _walled_plan(args, ToolsPlan.quick() if args.quick else ToolsPlan(), ("rounds", "seconds", "live"))
    figures = _measured(run_tools, plan)
    return _end(args, figures, aims_of(plan), missed(figures, plan), walls=WALLS)


def _sandboxes(args: argparse.Namespace) -> int:
    from prorld.bench.sandboxes import WALLS, SandboxesPlan, aims_of, missed, run_sandboxes

    if "bare" in (args.wall or ()):
        raise UsageError("--wall bare: `prorld bench sandboxes` measures walls; what is bare is measured beside each")
    plan = _walled_plan(args, SandboxesPlan.quick() if args.quick else SandboxesPlan(), ("rounds", "live"))
    figures = _measured(run_sandboxes, plan)
    return _end(args, figures, aims_of(plan), missed(figures, plan), walls=WALLS)


def _dapo(args: argparse.Namespace) -> int:
    import msgspec

    from prorld.bench.dapo import run_dapo
    from prorld.bench.dapo_figures import AIMS, STRATEGIES, DapoPlan, missed

    plan = DapoPlan.quick() if args.quick else DapoPlan()
    if args.strategy:
        strange = sorted(set(args.strategy) - set(STRATEGIES))
        if strange:
            raise UsageError(f"--strategy {strange[0]}: there are {', '.join(STRATEGIES)}")
        plan = msgspec.structs.replace(plan, steps={name: plan.steps[name] for name in args.strategy})
    if args.speed is not None:
        plan = msgspec.structs.replace(plan, speed=float(args.speed))
    figures = _measured(run_dapo, plan)
    return _end(args, figures, AIMS, missed(figures), walls=STRATEGIES)


def _queue(args: argparse.Namespace) -> int:
    from prorld.bench.queue import QueuePlan, aims_of, missed, run_queue

    plan = QueuePlan.quick() if args.quick else QueuePlan()
    figures = _measured(run_queue, plan)
    return _end(args, figures, aims_of(plan), missed(figures, plan))


def _crash(args: argparse.Namespace) -> int:
    import msgspec

    from prorld.bench.crash import AIMS, CrashPlan, missed, run_crash

    plan = CrashPlan.quick() if args.quick else CrashPlan()
    changes = {name: getattr(args, name) for name in ("kills", "seed") if getattr(args, name) is not None}
    plan = msgspec.structs.replace(plan, **changes)
    figures = _measured(run_crash, plan)
    return _end(args, figures, AIMS, missed(figures, plan))


def _learn(args: argparse.Namespace) -> int:
    from prorld.bench.learn import run_learn
    from prorld.bench.learn_figures import AIMS, missed

    figures = _measured(run_learn, _learn_plan(args))
    return _end(args, figures, AIMS, missed(figures))


def _learn_async(args: argparse.Namespace) -> int:
    from prorld.bench.learn import run_learn_async
    from prorld.bench.learn_figures import MODES

    return _end(args, _measured(run_learn_async, _learn_plan(args)), (), (), walls=MODES)


def _learn_plan(args: argparse.Namespace) -> LearnPlan:
    import msgspec

    from prorld.bench.learn_figures import LearnPlan
    from prorld.cli.train import must_have_torch

    must_have_torch()
    plan = LearnPlan.quick() if args.quick else LearnPlan()
    names = ("seeds", "engine", "python", "model", "steps", "keep")
    return msgspec.structs.replace(
        plan, **{name: getattr(args, name) for name in names if getattr(args, name) is not None}
    )


def _walled_plan(args: argparse.Namespace, plan: WalledT, names: Iterable[str]) -> WalledT:
    """The plan with what the flags say."""
    import msgspec

    changes = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.wall:
        changes["walls"] = tuple(dict.fromkeys(args.wall))
    if args.image is not None:
        changes["image"] = _directory(args.image)
    return msgspec.structs.replace(plan, **changes)


def _directory(path: str) -> str:
    from pathlib import Path

    if not Path(path).is_dir():
        raise UsageError(
            f"--image {path}: there is no such directory; `prorld image inspect NAME` shows that of an image"
        )
    return str(Path(path).absolute())


def _plan(args: argparse.Namespace, kind: type[PlanT], names: Iterable[str]) -> PlanT:
    import msgspec

    return msgspec.convert({name: getattr(args, name) for name in names if getattr(args, name) is not None}, kind)


def _end(
    args: argparse.Namespace,
    figures: msgspec.Struct,
    aims: Sequence[Aim],
    lines: Sequence[str],
    *,
    walls: Sequence[str] = (),
) -> int:
    if args.json:
        say_json(figures)
    else:
        note(*getattr(figures, "notes", ()))
        wanted = {aim.figure: f"{aim.how} {aim.bound:g}" for aim in aims}
        values = {name: getattr(figures, name) for name in figures.__struct_fields__ if name != "notes"}
        if walls:
            say(*_lines_by_wall(values, wanted, walls), "")
        say(*_lines({name: values[name] for name in values if not name.startswith(_beginnings(walls))}, wanted))
    if args.check and lines:
        note(*lines)
        return Exit.FAILED
    return Exit.OK


def _lines(values: Mapping[str, float | None], aims: Mapping[str, str]) -> list[str]:
    rows = [[name, _shown(value), aims.get(name, "")] for name, value in values.items()]
    return table(("FIGURE", "VALUE", "AIM"), rows, right=frozenset({"VALUE"}))


def _lines_by_wall(values: Mapping[str, float | None], aims: Mapping[str, str], walls: Sequence[str]) -> list[str]:
    """What every wall has, side by side; an aim is the same for all that have it."""
    names = [name.removeprefix(f"{walls[0]}_") for name in values if name.startswith(f"{walls[0]}_")]
    rows: list[list[str]] = []
    for name in names:
        full = [f"{wall}_{name}" for wall in walls]
        aim = next((aims[one] for one in full if one in aims), "")
        rows.append([name, *(_shown(values[one]) for one in full), aim])
    return table(("FIGURE", *(wall.upper() for wall in walls), "AIM"), rows, right=frozenset(map(str.upper, walls)))


def _beginnings(walls: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{wall}_" for wall in walls)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
