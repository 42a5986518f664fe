"""``prorld bench``: what the service costs by itself, measured on this machine."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from prorld.cli.common import add_json_option, epilog, positive
from prorld.cli.exits import Exit
from prorld.cli.output import note, say, say_json, table

if TYPE_CHECKING:
    from prorld.bench.figures import Figures

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
        "sandbox. Figures of CPU hold on a busy machine, too; of times, trust the ratios. docs/bench.md explains each."
    )
    parser.epilog = epilog(
        ("prorld bench orchestration", "every figure, about three minutes"),
        ("prorld bench orchestration --check", "exit 1 and a line for each aim that is missed"),
        ("prorld bench orchestration --concurrent 200 --held 500 --abandoned 300", "a quick look"),
    )
    parser.add_argument("what", choices=("orchestration",), help="what to measure")
    for name, what in _COUNTS.items():
        parser.add_argument(f"--{name}", type=positive, metavar="N", help=what)
    parser.add_argument("--check", action="store_true", help="exit 1 when an aim is missed")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    import msgspec

    from prorld.bench.figures import AIMS, Plan, missed
    from prorld.bench.orchestration import run_bench
    from prorld.cli.running import run_trio

    chosen = {name: getattr(args, name) for name in _COUNTS if getattr(args, name) is not None}
    plan = msgspec.convert(chosen, Plan)
    figures = run_trio(partial(run_bench, plan, note))
    lines = missed(figures, plan)
    if args.json:
        say_json(figures)
    else:
        aims = {aim.figure: f"{aim.how} {aim.bound:g}" for aim in AIMS}
        say(*_lines(figures, aims))
    if args.check and lines:
        note(*lines)
        return Exit.FAILED
    return Exit.OK


def _lines(figures: Figures, aims: dict[str, str]) -> list[str]:
    rows = [[name, f"{getattr(figures, name):.6g}", aims.get(name, "")] for name in figures.__struct_fields__]
    return table(("FIGURE", "VALUE", "AIM"), rows, right=frozenset({"VALUE"}))
