"""``prorld cancel``: end jobs."""

from __future__ import annotations

import argparse

from prorld.cli.common import add_client_options, add_json_option, client_of, epilog
from prorld.cli.exits import Exit, UsageError
from prorld.cli.output import say, say_json

SUMMARY = "end jobs, or a group"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Ends jobs. Answers at once; the engine request is aborted and the sandbox gone before a job says cancelled."
    )
    parser.epilog = epilog(
        ("prorld cancel job-1 job-2", "two jobs"),
        ("prorld cancel --group g-1 --reason 'wrong prompt' --wait", "a whole group, and wait until it is gone"),
    )
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="ids of jobs")
    parser.add_argument("--group", metavar="ID", help="every job of this group")
    parser.add_argument("--reason", metavar="TEXT", help="kept in the jobs' outcome")
    parser.add_argument("--wait", action="store_true", help="return when the named jobs have ended")
    add_client_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Cancel."""
    if bool(args.jobs) == bool(args.group):
        raise UsageError("name jobs, or a group with --group")
    with client_of(args) as client:
        if args.group:
            cancelling = client.cancel_many(group_id=args.group, reason=args.reason)
        elif len(args.jobs) == 1:
            # The call for one job tells an unknown id apart from a job that has ended.
            cancelling = int(client.cancel(args.jobs[0], reason=args.reason).state != "done")
        else:
            cancelling = client.cancel_many(job_ids=args.jobs, reason=args.reason)
        if args.wait:
            page = client.list(group_id=args.group, limit=200).items if args.group else []
            for job_id in [*args.jobs, *(record.job_id for record in page)]:
                client.wait(job_id)
    if args.json:
        say_json({"cancelling": cancelling})
    else:
        say(f"cancelling {cancelling} job{'' if cancelling == 1 else 's'}")
    return Exit.OK
