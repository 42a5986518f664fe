"""``prorld bench``: what the service costs by itself, measured on this machine."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from prorld.cli.common import add_json_option, epilog, positive
from prorld.cli.exits import Exit
from prorld.cli.output import note, say, say_json, table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import msgspec

    from prorld.bench.figures import Aim

PlanT = TypeVar("PlanT")

SUMMARY = "measure what the service costs by itself"

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
        "Figures of CPU hold on a busy machine, too; of times, trust the ratios. docs/bench.md explains each."
    )
    parser.epilog = epilog(
        ("prorld bench orchestration", "every figure, about two minutes"),
        ("prorld bench orchestration --check", "exit 1 and a line for each aim that is missed"),
        ("prorld bench transport --check", "CPU per engine call at 64, 256 and 512 in flight, two minutes"),
        ("prorld bench orchestration --concurrent 200 --held 500 --abandoned 300", "a quick look"),
    )
    parser.add_argument("what", choices=("orchestration", "transport"), help="what to measure")
    for name, what in _COUNTS.items():
        parser.add_argument(f"--{name}", type=positive, metavar="N", help=what)
    parser.add_argument("--rounds", type=positive, metavar="N", help="transport: rounds of each measurement")
    parser.add_argument("--seconds", type=_seconds, metavar="S", help="transport: length of a round")
    parser.add_argument("--check", action="store_true", help="exit 1 when an aim is missed")
    add_json_option(parser)


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
    return _transport(args) if args.what == "transport" else _orchestration(args)


def _orchestration(args: argparse.Namespace) -> int:
    from prorld.bench.figures import AIMS, Plan, missed
    from prorld.bench.orchestration import run_bench
    from prorld.cli.running import run_trio

    plan = _plan(args, Plan, _COUNTS)
    figures = run_trio(partial(run_bench, plan, note))
    return _end(args, figures, AIMS, missed(figures, plan))


def _transport(args: argparse.Namespace) -> int:
    from prorld.bench.transport import AIMS, TransportPlan, missed, run_transport
    from prorld.cli.running import run_trio

    figures = run_trio(partial(run_transport, _plan(args, TransportPlan, ("rounds", "seconds")), note))
    if not args.json:
        note(*figures.notes)
    return _end(args, figures, AIMS, missed(figures))


def _plan(args: argparse.Namespace, kind: type[PlanT], names: Iterable[str]) -> PlanT:
    import msgspec

    return msgspec.convert({name: getattr(args, name) for name in names if getattr(args, name) is not None}, kind)


def _end(args: argparse.Namespace, figures: msgspec.Struct, aims: Sequence[Aim], lines: Sequence[str]) -> int:
    if args.json:
        say_json(figures)
    else:
        say(*_lines(figures, {aim.figure: f"{aim.how} {aim.bound:g}" for aim in aims}))
    if args.check and lines:
        note(*lines)
        return Exit.FAILED
    return Exit.OK


def _lines(figures: msgspec.Struct, aims: dict[str, str]) -> list[str]:
    values = {name: getattr(figures, name) for name in figures.__struct_fields__}
    rows = [
        [name, "-" if value is None else f"{value:.6g}", aims.get(name, "")]
        for name, value in values.items()
        if not isinstance(value, list)
    ]
    return table(("FIGURE", "VALUE", "AIM"), rows, right=frozenset({"VALUE"}))
