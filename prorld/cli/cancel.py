"""``prorld cancel``: end jobs."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from prorld.cli.batch_groups import cancel_batch
from prorld.cli.common import add_client_options, add_json_option, client_of, epilog
from prorld.cli.exits import Exit, UsageError
from prorld.cli.jobs import each
from prorld.cli.output import count, say, say_json
from prorld.errors import ProrldError

if TYPE_CHECKING:
    from prorld.client import Client

SUMMARY = "end jobs, a group or a batch"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Ends jobs. Answers at once; the engine request is aborted and the sandbox gone before a job says cancelled."
    )
    parser.epilog = epilog(
        ("prorld cancel job-1 job-2", "two jobs"),
        ("prorld cancel --group g-1 --reason 'wrong prompt' --wait", "a whole group, and wait until it is gone"),
        ("prorld cancel --batch step-12", "a batch and whatever runs for it; accepted groups stay"),
    )
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="ids of jobs")
    parser.add_argument("--group", metavar="ID", help="every job of this group")
    parser.add_argument("--batch", metavar="ID", help="this batch")
    parser.add_argument("--reason", metavar="TEXT", help="kept in the jobs' outcome")
    parser.add_argument("--wait", action="store_true", help="return when the named jobs have ended")
    add_client_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Cancel."""
    if sum(map(bool, (args.jobs, args.group, args.batch))) != 1:
        raise UsageError("name jobs, a group with --group, or a batch with --batch")
    if args.batch and args.wait:
        raise UsageError("--wait is for jobs and groups; `prorld batch watch` follows a batch to its end")
    with client_of(args) as client:
        if args.batch:
            cancel_batch(client, args.batch, args.reason, as_json=args.json)
            return Exit.OK
        if args.group:
            cancelling, words = _cancel_group(client, args.group, args.reason)
        elif len(args.jobs) == 1:
            cancelling, words = _cancel_one(client, args.jobs[0], args.reason)
        else:
            cancelling = client.cancel_many(job_ids=args.jobs, reason=args.reason)
            others = len(args.jobs) - cancelling
            words = f"cancelling {count(cancelling, 'job')}" + (
                f"; {others} ended before or not known" if others else ""
            )
        if args.wait:
            _wait(client, args)
    if args.json:
        say_json({"cancelling": cancelling})
    else:
        say(words)
    return Exit.OK


class UnknownGroupError(ProrldError):
    """The daemon knows no job of the group."""

    code = "unknown_group"


def _cancel_group(client: Client, group: str, reason: str | None) -> tuple[int, str]:
    cancelling = client.cancel_many(group_id=group, reason=reason)
    if cancelling:
        return cancelling, f"cancelling {count(cancelling, 'job')}"
    ended = Counter(record.outcome.kind.value for record in each(client, group_id=group) if record.outcome is not None)
    if not ended:
        raise UnknownGroupError(f"no job of group {group}")
    return 0, f"already ended: {', '.join(f'{n} {kind}' for kind, n in ended.items())}"


def _cancel_one(client: Client, job_id: str, reason: str | None) -> tuple[int, str]:
    # Before, since a job that only waited has ended in the answer already. An unknown id is told apart by this call.
    before = client.get(job_id)
    if before.outcome is not None:
        return 0, f"already ended: {before.outcome.kind.value}"
    client.cancel(job_id, reason=reason)
    return 1, f"cancelling {count(1, 'job')}"


def _wait(client: Client, args: argparse.Namespace) -> None:
    from prorld.client import ClientError

    group = (
        [record.job_id for record in each(client, group_id=args.group) if record.state != "done"] if args.group else []
    )
    for job_id in [*args.jobs, *group]:
        try:
            client.wait(job_id)
        except ClientError as exc:
            # One of many that ended long enough ago has ended.
            if exc.stable_code != "forgotten":
                raise
