"""``prorld preflight``: proves of every instance that its gold solution scores and that nothing else does."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from prorld.cli.common import add_json_option, epilog, positive
from prorld.cli.configuration import SANDBOX_KINDS, add_sandbox_options, load_for_sandboxes
from prorld.cli.exits import Exit, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorld.cli.preflight_files import ReportFile
    from prorld.cli.preflight_plan import Plan, Settings, Task
    from prorld.cli.preflight_show import Tally
    from prorld.cli.run_stats import Progress
    from prorld.config import Loaded
    from prorld.handlers.registry import Registry

SUMMARY = "prove instances before any GPU is paid for"

PLAYS = "gold,empty"
TIMES = 3
JOBS_MAX = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Plays every instance in TASKS with policies that are written down in its handler, N times each, without a\n"
        "daemon and without an engine, in the sandboxes of the daemon's configuration. An instance is good when its\n"
        "gold play scores in full and the empty one does not, every time; bad, flaky or unsure otherwise. The same\n"
        "command again goes on where it stopped. Exit 0 when all are good, 1 when some are not, 2 when some were\n"
        "refused."
    )
    parser.epilog = epilog(
        ("prorld preflight tasks.jsonl --handler math -o good.jsonl", "writes good.report.jsonl, too"),
        ("prorld preflight tasks.jsonl --handler swe -o good.jsonl --load 8", "with busy CPUs, so that flakes show"),
        ("prorld preflight tasks.jsonl --handler swe --plays all --limit 20", "cheats have to fail, too"),
        ("prorld preflight examples.jsonl --handler .", "the project here"),
    )
    parser.add_argument(
        "tasks", metavar="TASKS", help="instances, one JSON object per line, or one array of them; - for stdin"
    )
    parser.add_argument("--handler", metavar="H", required=True, help="an installed handler, or a project's directory")
    parser.add_argument("-o", "--out", metavar="OUT", help="write the good instances there, each as it was read")
    parser.add_argument(
        "--report", metavar="OUT", help="one line per instance, to go on with (default: beside OUT, as .report.jsonl)"
    )
    parser.add_argument("--quiet", action="store_true", help="tell nothing while it runs")
    what = parser.add_argument_group("what is played")
    what.add_argument(
        "--plays", default=PLAYS, metavar="NAMES", help=f"plays by name, or all of the handler (default {PLAYS})"
    )
    what.add_argument("--times", type=positive, default=TIMES, metavar="K", help=f"each so often (default {TIMES})")
    what.add_argument("--limit", type=positive, metavar="N", help="only the first N instances")
    what.add_argument("--shuffle-seed", type=int, metavar="SEED", help="in another order, before --limit")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--jobs", type=positive, default=_jobs(), metavar="N", help=f"rollouts at once (default {_jobs()})"
    )
    how.add_argument("--load", type=_number, default=0, metavar="N", help="keep N processes busy beside it (default 0)")
    how.add_argument(
        "--sandbox", choices=(*SANDBOX_KINDS, "fake"),
        help="another kind than the configured one; the fake ones understand echo and print only",
    )  # fmt: skip
    add_sandbox_options(how)
    add_json_option(parser)


def _jobs() -> int:
    return min(JOBS_MAX, len(os.sched_getaffinity(0)))


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 1024):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 1024")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Play what the report does not hold yet."""
    from prorld.cli.local import open_registry, silence_logs
    from prorld.cli.output import say, say_json, style_for
    from prorld.cli.preflight_files import check_good, open_report, report_beside, write_good
    from prorld.cli.preflight_plan import plan, read_tasks
    from prorld.cli.preflight_show import Tally, summary_lines
    from prorld.cli.run_stats import Progress

    silence_logs()
    loaded = load_for_sandboxes(args)
    registry, name = open_registry(args.handler, loaded.config.handlers.config)
    rows = read_tasks(args.tasks, limit=args.limit, shuffle_seed=args.shuffle_seed)
    settings = _settings(args, loaded, registry, name)
    planned = plan(rows, registry.get(name), settings)
    report_name = args.report or (None if args.out is None else report_beside(args.out))
    progress = Progress(sys.stderr, quiet=args.quiet)
    for line, why in planned.refused:
        progress.refused(f"line {line} is refused: {why}")
    with open_report(report_name) as report:
        if args.out is not None and report_name is not None:
            check_good(args.out, args.tasks, report_name, begun=bool(report.reports))
        tally = Tally(len(planned.tasks), len(planned.refused))
        left = _left(planned, report, tally, report_name)
        if tally.kept:
            progress.say(f"{tally.kept} of {tally.total} instances are in {report_name} already")
        code = _play(args, loaded, registry, settings, left, report, tally, progress)
        if args.out is not None:
            write_good(args.out, planned.tasks, frozenset(tally.good))
    summary = tally.summary(load=args.load, jobs=args.jobs, out=args.out, report=report_name)
    if args.json:
        say_json(summary)
    else:
        say(*summary_lines(summary, tally.worst, name, style_for(sys.stdout)))
    return code


def _settings(args: argparse.Namespace, loaded: Loaded, registry: Registry, name: str) -> Settings:
    from prorld.cli.preflight_plan import Settings

    names = tuple(dict.fromkeys(word.strip() for word in args.plays.split(",") if word.strip()))
    if not names:
        raise UsageError("--plays names no play")
    (entry,) = [entry for entry in registry.entries() if entry.name == name]
    return Settings(
        handler=name,
        version=entry.version,
        config=loaded.config.handlers.config.get(name, {}),
        plays=None if "all" in names else names,
        times=args.times,
        sandbox=args.sandbox or loaded.config.sandbox.runtime,
        load=args.load,
    )


def _left(planned: Plan, report: ReportFile, tally: Tally, name: str | None) -> list[Task]:
    """What the report does not hold."""
    known = {task.digest for task in planned.tasks}
    done = {found.digest for found in report.reports}
    if done - known:
        raise UsageError(
            f"{name} holds {len(done - known)} instances of other tasks, another version or other settings;"
            " name another file, or say the same"
        )
    for found in report.reports:
        tally.count(found, kept=True)
    return [task for task in planned.tasks if task.digest not in done]


def _play(
    args: argparse.Namespace,
    loaded: Loaded,
    registry: Registry,
    settings: Settings,
    left: Sequence[Task],
    report: ReportFile,
    tally: Tally,
    progress: Progress,
) -> int:
    from functools import partial

    from prorld.cli.preflight_judge import Report
    from prorld.cli.preflight_run import preflight
    from prorld.cli.running import run_trio

    def judged(found: Report) -> None:
        report.append(found)
        tally.count(found)

    work = partial(
        preflight, registry, left, settings, jobs=args.jobs, sandbox=args.sandbox, loaded=loaded,
        on_report=judged, on_running=tally.runs, on_tick=lambda: progress.show(tally),
    )  # fmt: skip
    to_the_end = run_trio(work) if left else True
    tally.runs(-tally.running)
    progress.end(tally)
    if not to_the_end:
        return Exit.INTERRUPTED
    if tally.refused:
        return Exit.USAGE
    return Exit.OK if len(tally.good) == tally.total else Exit.FAILED
