"""``prorld verify``: whether stored rollouts are what they say, and what engines say of their tokens now."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prorld.cli.common import add_client_options, add_json_option, client_of, epilog, positive
from prorld.cli.exits import Exit, UsageError
from prorld.cli.output import Style, clean, count, say, say_json, style_for, table

if TYPE_CHECKING:
    from prorld.client import Client
    from prorld.wire.looks import Unverifiable, VerifyAnswer

SUMMARY = "check a rollout's tokens, and let an engine score them again"

_HEADERS = ("JOB", "RESULT", "SAMPLED", "SCORED", "MEAN", "MAX", "VERSIONS", "ENGINES")
_RIGHT = frozenset({"SAMPLED", "SCORED", "MEAN", "MAX"})
_COLOURS = {"ok": "green", "unverifiable": "yellow", "broken": "red"}

# One page of the daemon's list.
RECENT_MAX = 500

_WHY = {
    "not_served": "no engine serves that version now",
    "no_scores": "its engines can't score given tokens",
    "inexact": "the engine took or gave text, or its version is a guess",
    "no_logprobs": "no log-probabilities were recorded",
    "processed": "recorded after temperature or truncation, so there is nothing to compare them with",
    "too_long": "no room in the engine's context",
    "unscored": "the engine failed, or the time was over",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Derives each rollout again from its call log, then lets an engine of the same policy version score the\n"
        "sampled tokens, and shows how far the recorded log-probabilities are from that. Exits 1 when one is broken."
    )
    parser.epilog = epilog(
        ("prorld verify job-1", "mean and largest difference, by engine and version"),
        ("prorld verify --recent 20", "the newest ended jobs"),
        ("prorld verify job-1 --no-rescore", "its own laws only; asks no engine"),
        ("prorld verify --recent 100 --strict", "exit 1 also for what can't be confirmed"),
    )
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="a job's id")
    parser.add_argument("--recent", type=positive, metavar="N", help=f"the N newest ended jobs, at most {RECENT_MAX}")
    parser.add_argument("--no-rescore", action="store_true", help="ask no engine")
    parser.add_argument(
        "--tolerance", type=_difference, metavar="X", help="mean difference allowed (else the daemon's)"
    )
    parser.add_argument("--tolerance-max", type=_difference, metavar="X", help="largest difference allowed at a token")
    parser.add_argument("--strict", action="store_true", help="exit 1 also when tokens can't be confirmed")
    add_client_options(parser)
    add_json_option(parser)


def _difference(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1000")
    return value


def run(args: argparse.Namespace) -> int:
    """Verify and print."""
    if bool(args.jobs) == bool(args.recent):
        raise UsageError("name jobs, or give --recent N")
    with client_of(args) as client:
        answers = [
            client.verify(
                job_id,
                rescore=not args.no_rescore,
                tolerance=args.tolerance,
                tolerance_max=args.tolerance_max,
            )
            for job_id in args.jobs or _recent(client, args.recent)
        ]
    if args.json:
        say_json(answers)
    else:
        say(*lines(answers, style_for(sys.stdout)))
    bad = {"broken", "unverifiable"} if args.strict else {"broken"}
    return Exit.FAILED if any(answer.result in bad for answer in answers) else Exit.OK


def _recent(client: Client, n: int) -> list[str]:
    page = client.list(state="done", limit=min(n, RECENT_MAX))
    return [record.job_id for record in page.items]


def lines(answers: Sequence[VerifyAnswer], style: Style) -> Iterator[str]:
    """A table, and below it what is wrong with whom."""
    if not answers:
        yield "no job has ended yet"
        return
    yield from table(_HEADERS, [_row(answer) for answer in answers], right=_RIGHT)
    for answer in answers:
        for violation in answer.violations:
            where = "" if violation.branch is None else f" branch {violation.branch}"
            where += "" if violation.call is None else f" call {violation.call}"
            words = style(violation.code, _COLOURS["broken"])
            yield f"{clean(answer.job_id)}{where}: {words}: {clean(violation.message)}"
        for left in answer.unverifiable:
            yield f"{clean(answer.job_id)}: {style(_left(left), _COLOURS['unverifiable'])}"


def _row(answer: VerifyAnswer) -> list[str]:
    score = answer.rescore
    versions = [] if score is None else [f"{one.epoch}.{one.version}" for one in score.by_version]
    return [
        answer.job_id,
        answer.result,
        str(answer.sampled),
        "-" if score is None else str(score.tokens),
        "-" if score is None or score.mean is None else f"{score.mean:.5f}",
        "-" if score is None or score.max is None else f"{score.max:.5f}",
        ",".join(versions) or "-",
        "-" if score is None else ",".join(score.backends) or "-",
    ]


def _left(left: Unverifiable) -> str:
    name = "an unknown version" if left.version is None else f"version {left.epoch}.{left.version}"
    return f"{count(left.tokens, 'token')} of {name}: {_WHY[left.reason]}"
