"""``prorld run``: many instances, n rollouts of each, into a file that can be resumed."""

from __future__ import annotations

import argparse
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING

from prorld.cli.common import add_client_options, add_json_option, client_of, epilog, positive, read_text
from prorld.cli.exits import Exit, UsageError
from prorld.cli.output import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorld.cli.run_drive import Driver
    from prorld.cli.run_out import OutFile
    from prorld.cli.run_plan import Sample
    from prorld.cli.run_stats import Progress, Stats
    from prorld.wire.jobs import SubmitJob

SUMMARY = "rollouts of many instances, into a file"

PATIENCE_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Hands in N rollouts of every instance in TASKS (one JSON object per line), and writes one line per rollout\n"
        "to OUT as it ends. The same command again goes on where it stopped: lines in OUT are kept, the rest is done.\n"
        "Restarts of the daemon are waited for. Exit 0 when no rollout failed, 1 when some failed for reasons of\n"
        "infrastructure, 2 when tasks were refused, 130 after Ctrl-C."
    )
    parser.epilog = epilog(
        ("prorld run tasks.jsonl --handler math -o out.jsonl", "one rollout of each"),
        ("prorld run tasks.jsonl --handler math --n 8 -o out.jsonl --trajectories", "groups, with their tokens"),
        ("prorld run - --handler math -o out.jsonl --quiet < tasks.jsonl", "in a script"),
    )
    parser.add_argument("tasks", metavar="TASKS", help="instances, one JSON object per line; - for stdin")
    parser.add_argument("--handler", metavar="H", help="the kind of task (default: by each instance's data_source)")
    parser.add_argument("-o", "--out", metavar="OUT", required=True, help="the file to write, or to go on with")
    parser.add_argument("--n", type=positive, default=1, metavar="N", help="rollouts of each, as a group (default 1)")
    parser.add_argument(
        "--max-inflight", type=positive, default=256, metavar="M", help="jobs in the daemon at once (default 256)"
    )
    parser.add_argument("--trajectories", action="store_true", help="put the trajectory document into each line")
    parser.add_argument("--leave", action="store_true", help="let running jobs go on after Ctrl-C (default: cancel)")
    parser.add_argument(
        "--patience", type=float, default=PATIENCE_S, metavar="S", help="wait so long for the daemon (default 300)"
    )
    parser.add_argument("--quiet", action="store_true", help="tell nothing but refusals and errors")
    jobs = parser.add_argument_group("of every job")
    jobs.add_argument("--policy", metavar="NAME", help="the policy to sample from (default: default)")
    jobs.add_argument("--purpose", choices=("train", "eval"), help="what it is for (default train)")
    jobs.add_argument("--max-tokens", type=positive, metavar="N", help="tokens in one turn (default 2048)")
    jobs.add_argument("--max-turns", type=positive, metavar="N", help="turns of the policy (default 30)")
    jobs.add_argument("--max-context-tokens", type=positive, metavar="N", help="tokens of a context (default 32768)")
    jobs.add_argument("--max-sampled-tokens", type=positive, metavar="N", help="tokens in all turns (default 65536)")
    jobs.add_argument("--temperature", type=float, metavar="T", help="sampling temperature (default 1)")
    jobs.add_argument("--seed", type=int, metavar="N", help="makes sampling repeatable; samples of a group differ")
    add_client_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Do what OUT does not hold yet."""
    from prorld.cli.instances import INSTANCE_BYTES_MAX, read_lines
    from prorld.cli.output import say_json
    from prorld.cli.run_out import open_out
    from prorld.cli.run_plan import plan
    from prorld.cli.run_stats import Progress, Stats

    tasks = read_lines(read_text(args.tasks, limit_bytes=INSTANCE_BYTES_MAX), args.tasks)
    with open_out(args.out) as out:
        samples = plan(tasks, template_of(args), n=args.n, run=run_name(out, args.out))
        stats = Stats(len(samples))
        left = _left(samples, out, stats, args.out)
        progress = Progress(sys.stderr, quiet=args.quiet)
        if out.repaired:
            progress.say(f"{args.out} ended in half a line; it was cut off")
        if stats.kept:
            progress.say(f"{stats.kept} of {len(samples)} rollouts are in {args.out} already")
        code = _drive(args, left, out, stats, progress)
    if args.json:
        say_json(stats.summary())
    return code


def _drive(args: argparse.Namespace, left: Sequence[Sample], out: OutFile, stats: Stats, progress: Progress) -> int:
    from prorld.cli.run_drive import Driver

    # The first contact is not waited for: a daemon that is not there at all is a matter of typing.
    with client_of(args) as client:
        client.ready()
    driver = Driver(
        partial(client_of, args),
        left,
        out,
        stats,
        progress,
        inflight_max=args.max_inflight,
        patience_s=args.patience,
        trajectories=args.trajectories,
    )
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        driver.run()
    except KeyboardInterrupt:
        return _interrupted(args, driver, progress)
    finally:
        signal.signal(signal.SIGTERM, before)
        driver.close()
    stats.running = 0
    progress.end(stats)
    if stats.refused:
        return Exit.USAGE
    return Exit.FAILED if stats.failed else Exit.OK


def _interrupted(args: argparse.Namespace, driver: Driver, progress: Progress) -> int:
    from prorld.client import ClientError

    if args.leave:
        left = len(driver.running)
        progress.say(
            f"{count(left, 'job')} {'goes' if left == 1 else 'go'} on; the same command again takes what they come to"
        )
        return Exit.INTERRUPTED
    try:
        cancelled = driver.cancel()
    except ClientError as exc:
        progress.say(f"running jobs could not be cancelled: {exc.message}")
    else:
        progress.say(f"cancelled {count(cancelled, 'running job')}; the same command again goes on with {args.out}")
    return Exit.INTERRUPTED


def run_name(out: OutFile, name: str) -> str:
    """The run that the file belongs to, or a new one."""
    from prorld.cli.run_plan import new_run, run_of

    runs = {run_of(ended.job_id) for ended in out.ended}
    if not runs:
        return new_run()
    run = next(iter(runs))
    if len(runs) != 1 or run is None:
        raise UsageError(f"{name} holds rollouts that no run of this command made; name another file")
    return run


def _left(samples: Sequence[Sample], out: OutFile, stats: Stats, name: str) -> list[Sample]:
    from prorld.cli.run_plan import key_of

    done = {key_of(ended.job_id): ended for ended in out.ended}
    unknown = len(done.keys() - {sample.key for sample in samples})
    if unknown:
        raise UsageError(
            f"{name} holds {unknown} rollouts of other tasks or other settings; name another file, or say the same"
        )
    for ended in done.values():
        stats.count(ended.outcome, ended.reward, kept=True)
    return [sample for sample in samples if sample.key not in done]


def template_of(args: argparse.Namespace) -> SubmitJob:
    """The job that every sample is a copy of."""
    from prorld.wire.codec import convert
    from prorld.wire.jobs import SubmitJob

    def given(*names: str) -> dict[str, object]:
        return {name: value for name in names if (value := getattr(args, name)) is not None}

    body = {
        "instance": {},
        **given("handler", "policy", "purpose"),
        "sampling": given("max_tokens", "temperature", "seed"),
        "agent": given("max_turns", "max_context_tokens", "max_sampled_tokens"),
    }
    return convert(body, SubmitJob, what="the job")
