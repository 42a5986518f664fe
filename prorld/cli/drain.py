"""``prorld drain``: no new jobs from now on."""

from __future__ import annotations

import argparse
import time

from prorld.cli.common import add_client_options, add_json_option, client_of, epilog
from prorld.cli.exits import Exit
from prorld.cli.output import say, say_json

SUMMARY = "take no new jobs, and let the accepted ones end"

LOOK_EVERY_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "From now on the daemon refuses new jobs; those that it has accepted go on for as long as they need. It stays\n"
        "there, so that results can be fetched, until it gets a signal. There is no way back but a restart."
    )
    parser.epilog = epilog(
        ("prorld drain", "refuse new jobs"),
        ("prorld drain --wait --within 600", "and return when none is left; 75 when some are after ten minutes"),
    )
    parser.add_argument("--wait", action="store_true", help="return when no accepted job is left")
    parser.add_argument("--within", type=float, metavar="SECONDS", help="wait no longer than this")
    add_client_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Drain."""
    until = None if args.within is None else time.monotonic() + args.within
    with client_of(args) as client:
        left = _left(client.drain().jobs)
        while args.wait and left and (until is None or time.monotonic() < until):
            time.sleep(LOOK_EVERY_S)  # noqa: TID251 - there is no event loop on this side
            left = _left(client.status().jobs)
    if args.json:
        say_json({"draining": True, "jobs_left": left})
    else:
        say(f"draining; {left or 'no'} job{'' if left == 1 else 's'} left")
    return Exit.TEMPORARY if args.wait and left else Exit.OK


def _left(jobs: dict[str, int]) -> int:
    return sum(number for state, number in jobs.items() if state != "done")
