"""``prorld jobs``: the jobs of the daemon, newest first."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING

from prorld.cli.common import add_client_options, add_json_option, client_of, epilog, positive
from prorld.cli.exits import Exit
from prorld.cli.output import say, say_json

if TYPE_CHECKING:
    from prorld.client import Client
    from prorld.wire.jobs import JobRecord

SUMMARY = "list jobs, newest first"

# The values of ``prorld.domain.job.JobState``; written out so that help needs no import of the domain.
STATES = ("queued", "initialising", "running", "evaluating", "done")

# What the daemon gives at most in one answer.
_PAGE = 500
_WATCH_S = 1.0
_CLEAR = "\x1b[H\x1b[2J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = epilog(
        ("prorld jobs", "the last twenty"),
        ("prorld jobs --state running --watch", "what runs, live"),
        ("prorld jobs --group g-1 --limit 1000 --json", "one group's records for a script"),
    )
    parser.add_argument("--state", choices=STATES, help="only jobs in this state")
    parser.add_argument("--handler", metavar="H", help="only jobs of this handler")
    parser.add_argument("--group", metavar="ID", help="only jobs of this group")
    parser.add_argument("--limit", type=positive, default=20, metavar="N", help="at most so many (default 20)")
    parser.add_argument("--watch", action="store_true", help="print the list again every second until Ctrl-C")
    add_client_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """List, once or until interrupted."""
    with client_of(args, patience_s=5.0 if args.watch else 0.0) as client:
        while True:
            filters = {"state": args.state, "handler": args.handler, "group_id": args.group}
            _show(args, [*islice(each(client, page=min(_PAGE, args.limit), **filters), args.limit)])
            if not args.watch:
                return Exit.OK
            time.sleep(_WATCH_S)  # noqa: TID251 - there is no event loop on this side


def each(
    client: Client,
    *,
    state: str | None = None,
    handler: str | None = None,
    group_id: str | None = None,
    page: int = _PAGE,
) -> Iterator[JobRecord]:
    """Every record that fits, newest first, page by page as they are taken."""
    after: str | None = None
    while True:
        found = client.list(state=state, handler=handler, group_id=group_id, limit=page, after=after)
        yield from found.items
        after = found.next
        if after is None or not found.items:
            return


def _show(args: argparse.Namespace, records: list[JobRecord]) -> None:
    if args.json:
        say_json(records, pretty=not args.watch)
    else:
        from prorld.cli.records import job_table

        lines = job_table(records, datetime.now(UTC)) if records else ["no jobs"]
        say((_CLEAR if args.watch and sys.stdout.isatty() else "") + "\n".join(lines))
    sys.stdout.flush()
