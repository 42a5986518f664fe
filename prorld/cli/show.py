"""``prorld show``: one rollout, readable; from the daemon or from a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from prorld.cli.common import add_client_options, add_json_option, client_of, epilog, positive, read_text
from prorld.cli.exits import Exit, UsageError
from prorld.cli.output import say, say_json, style_for, typed, width

if TYPE_CHECKING:
    from prorld.wire.jobs import JobRecord
    from prorld.wire.trajectory import Trajectory

SUMMARY = "show a rollout: conversation, tokens, reward"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Shows one rollout: what was said, which tools were called, what each turn cost, how it was graded.\n"
        "TARGET is a job of the daemon, or a trajectory document in a file."
    )
    parser.epilog = epilog(
        ("prorld show job-1", "a job of the daemon"),
        ("prorld show trajectories/job-1.json", "a document that `prorld demo` or --json wrote"),
        ("prorld show job-1 --tokens | less", "every token: id, mask, log-probability, policy version"),
        ("prorld show job-1 --json > job-1.json", "the document itself"),
    )
    parser.add_argument("target", metavar="TARGET", help="a job's id, a FILE, or - for stdin")
    parser.add_argument("--tokens", action="store_true", help="list the tokens instead of the conversation")
    parser.add_argument("--lines", type=positive, metavar="N", help="at most N lines of each message")
    add_client_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Show."""
    from prorld.cli.conversation import View, summary_lines, token_lines, trajectory_lines
    from prorld.wire.jobs import JobRecord

    view = View(style_for(sys.stdout), width(), lines_per_message=args.lines)
    found = load(args)
    if args.json:
        say_json(found)
    elif isinstance(found, JobRecord):
        say(*summary_lines(found, view))
        say("", typed("the conversation can be read when the job is done; `prorld jobs --watch` shows where it is"))
    elif args.tokens:
        say(*token_lines(found))
    else:
        say(*trajectory_lines(found, view))
    return Exit.OK


def load(args: argparse.Namespace) -> Trajectory | JobRecord:
    """What was named: a file where there is one of that name, else a job; of one that is not done, its record."""
    if is_file(args.target):
        return read_trajectory(read_text(args.target, limit_bytes=512 << 20), args.target)
    with client_of(args) as client:
        record = client.get(args.target)
        return client.trajectory(args.target) if record.state == "done" else record


def is_file(target: str) -> bool:
    """Ids of jobs have no slash, so a path is told apart even where the file is missing."""
    return target == "-" or "/" in target or Path(target).is_file()


def read_trajectory(text: str, name: str) -> Trajectory:
    """A trajectory document, checked."""
    from prorld.wire.codec import decode
    from prorld.wire.trajectory import FORMAT, Trajectory

    doc = decode(text.encode(), Trajectory, what=name)
    if doc.format != FORMAT:
        raise UsageError(f"{name} has the format {doc.format!r}; this prorld reads {FORMAT!r}")
    for branch in doc.branches:
        sizes = {len(branch.token_ids), len(branch.mask), len(branch.logprobs)}
        inside = all(0 <= s.start <= s.end <= len(branch.token_ids) for s in branch.segments)
        if len(sizes) != 1 or not inside:
            raise UsageError(f"{name} is damaged: branch {branch.branch} has lists that don't fit each other")
    return doc
