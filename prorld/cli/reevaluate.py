"""``prorld reevaluate``: scores stored rollouts again with the grader of now, and shows what that changes."""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from prorld.cli.common import add_client_options, add_json_option, client_of, epilog, positive
from prorld.cli.exits import Exit, UsageError
from prorld.cli.jobs import each
from prorld.cli.output import Style, clean, count, number, say, say_json, style_for, table

if TYPE_CHECKING:
    from prorld.client import Client, ClientError
    from prorld.wire.jobs import JobRecord
    from prorld.wire.looks import Reevaluation

SUMMARY = "score ended jobs again with the grader of now"

# The values of ``prorld.domain.outcome.OutcomeKind`` that come as far as a grader.
OUTCOMES = ("ok", "policy_limit", "grader_error", "timeout")

INFLIGHT = 16
INFLIGHT_MAX = 256
WITHIN_S = 3600.0
_POLL_S = 30.0
_HEADERS = ("JOB", "BEFORE", "NOW", "CHANGED", "WHY")
_RIGHT = frozenset({"BEFORE", "NOW"})
# What the daemon says of one job and not of all of them.
_OF_ONE_JOB = frozenset({404, 409, 410, 422})


@dataclass(frozen=True, kw_only=True)
class Row:
    """What became of one job. ``n`` is the number of the reevaluation, ``code`` why there is no new reward."""

    job_id: str
    before: float | None
    now: float | None = None
    changed: bool = False
    n: int | None = None
    code: str | None = None
    message: str | None = None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All of them. The means are over the jobs that have both rewards."""

    jobs: list[Row]
    scored: int
    changed: int
    failed: int
    mean_before: float | None
    mean_now: float | None
    in_time: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Scores stored rollouts again, after their grader was changed and the daemon started anew. The jobs keep the\n"
        "record that was delivered; what is found is shown here. Exits 1 when one could not be scored."
    )
    parser.epilog = epilog(
        ("prorld reevaluate job-1 job-2 --reason 'units are read'", "two jobs"),
        ("prorld reevaluate --handler math --limit 1000", "the newest thousand of a handler"),
        ("prorld reevaluate --batch step-12 --json", "the accepted groups of a batch, for a script"),
        ("prorld reevaluate --handler swe --outcome grader_error", "those whose grader had failed"),
    )
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="ids of jobs")
    parser.add_argument("--handler", metavar="H", help="every ended job of this handler")
    parser.add_argument("--group", metavar="ID", help="every ended job of this group")
    parser.add_argument("--batch", metavar="ID", help="every job of the accepted groups of this batch")
    parser.add_argument("--outcome", choices=OUTCOMES, help="only jobs that ended so")
    parser.add_argument("--limit", type=positive, metavar="N", help="at most so many")
    parser.add_argument("--reason", default="", metavar="TEXT", help="kept with each reevaluation")
    parser.add_argument(
        "--max-inflight", type=positive, default=INFLIGHT, metavar="N", help=f"at once (default {INFLIGHT})"
    )
    parser.add_argument(
        "--within", type=positive, default=WITHIN_S, metavar="S", help=f"give up after S seconds ({WITHIN_S:g})"
    )
    add_client_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Score again and print."""
    if not (args.jobs or args.handler or args.group or args.batch):
        raise UsageError("name jobs, or give --handler, --group or --batch")
    if args.jobs and (args.handler or args.group or args.batch):
        raise UsageError("name jobs, or choose them by --handler, --group or --batch")
    if args.batch and (args.handler or args.group):
        raise UsageError("--batch chooses by itself; leave --handler and --group")
    if args.max_inflight > INFLIGHT_MAX:
        raise UsageError(f"--max-inflight is at most {INFLIGHT_MAX}")
    with client_of(args, patience_s=5.0) as client:
        chosen = (found for found in _chosen(client, args) if args.outcome in (None, _outcome(found)))
        scoring = Scoring(client, reason=args.reason, inflight_max=args.max_inflight, within_s=args.within)
        rows = [*scoring.rows(islice(chosen, args.limit))]
    summary = summed(rows, in_time=scoring.in_time)
    if args.json:
        say_json(summary)
    else:
        say(*lines(summary, style_for(sys.stdout)))
    if not summary.in_time:
        return Exit.TEMPORARY
    return Exit.FAILED if summary.failed else Exit.OK


def _outcome(found: JobRecord | Row) -> str | None:
    return None if isinstance(found, Row) or found.outcome is None else found.outcome.kind.value


def _chosen(client: Client, args: argparse.Namespace) -> Iterator[JobRecord | Row]:
    """Each job once; of one that is gone meanwhile, why."""
    if args.jobs:
        # All of them are known before the first is scored.
        yield from [client.get(job_id) for job_id in dict.fromkeys(args.jobs)]
    elif args.batch:
        for job_id in _of_batch(client, args.batch):
            yield _found(client, job_id)
    else:
        # The list moves while jobs end; an id that comes twice is one job.
        seen: set[str] = set()
        for record in each(client, state="done", handler=args.handler, group_id=args.group):
            if record.job_id not in seen:
                seen.add(record.job_id)
                yield record


def _of_batch(client: Client, batch_id: str) -> Iterator[str]:
    """The jobs of the groups that are accepted by now."""
    from prorld.client import ClientError

    try:
        for group in client.groups(batch_id, after=0, within_s=0.0):
            yield from (job_id for job_id in group.job_ids if job_id is not None)
    except ClientError as exc:
        if exc.stable_code != "nothing_new":
            raise


def _found(client: Client, job_id: str) -> JobRecord | Row:
    from prorld.client import ClientError

    try:
        return client.get(job_id)
    except ClientError as exc:
        if exc.status not in _OF_ONE_JOB:
            raise
        return Row(job_id=job_id, before=None, code=exc.stable_code, message=exc.message)


class Scoring:
    """Reevaluations, at most so many at once, their ends awaited in the order in which they began."""

    def __init__(self, client: Client, *, reason: str, inflight_max: int, within_s: float) -> None:
        self._client = client
        self._reason = reason
        self._inflight_max = inflight_max
        self._until = time.monotonic() + within_s
        self._begun: deque[tuple[JobRecord, Reevaluation]] = deque()
        self.in_time = True

    def rows(self, chosen: Iterable[JobRecord | Row]) -> Iterator[Row]:
        """What becomes of each job; those for which no time was left are not there."""
        for record in chosen:
            if isinstance(record, Row):
                yield record
                continue
            while len(self._begun) >= self._inflight_max:
                yield self._ended()
            begun: Row | Reevaluation | None = None
            while begun is None and self._is_time():
                begun = self._begin(record)
                if begun is None and self._begun:
                    yield self._ended()
            if isinstance(begun, Row):
                yield begun
            elif begun is not None:
                self._begun.append((record, begun))
            if not self._is_time():
                break
        while self._begun:
            yield self._ended()

    def _is_time(self) -> bool:
        self.in_time = self.in_time and time.monotonic() < self._until
        return self.in_time

    def _begin(self, record: JobRecord) -> Row | Reevaluation | None:
        """Its beginning, or why there is none; ``None`` where the daemon has no room now."""
        from prorld.client import ClientError

        try:
            return self._client.reevaluate(record.job_id, reason=self._reason)
        except ClientError as exc:
            if exc.status in _OF_ONE_JOB:
                return Row(job_id=record.job_id, before=record.reward, code=exc.stable_code, message=exc.message)
            if exc.status != 429:
                raise
            if not self._begun:
                self._pause(exc)
            return None

    def _pause(self, refusal: ClientError) -> None:
        """Others use the share up; none of ours would make room."""
        left = max(0.0, self._until - time.monotonic())
        time.sleep(min(left, refusal.retry_after_s or 1.0))  # noqa: TID251 - there is no event loop on this side

    def _ended(self) -> Row:
        from prorld.wire.looks import ReevaluationState

        record, look = self._begun.popleft()
        while look.state is not ReevaluationState.DONE and self._is_time():
            within_s = max(0.1, min(_POLL_S, self._until - time.monotonic()))
            look = self._client.wait_reevaluation(record.job_id, look.n, within_s=within_s)
        if look.outcome is None:
            return Row(job_id=record.job_id, before=record.reward, n=look.n, code="not_ended")
        graded = look.reward is not None
        return Row(
            job_id=record.job_id,
            before=record.reward,
            now=look.reward,
            changed=graded and look.reward != record.reward,
            n=look.n,
            code=None if graded else look.outcome.code,
            message=None if graded else look.outcome.message,
        )


def summed(found: list[Row], *, in_time: bool) -> Summary:
    """The rows and what they come to."""
    both = [(row.before, row.now) for row in found if row.before is not None and row.now is not None]
    return Summary(
        jobs=found,
        scored=sum(row.now is not None for row in found),
        changed=sum(row.changed for row in found),
        failed=sum(row.now is None for row in found),
        mean_before=sum(before for before, _ in both) / len(both) if both else None,
        mean_now=sum(now for _, now in both) / len(both) if both else None,
        in_time=in_time,
    )


def lines(summary: Summary, style: Style) -> Iterator[str]:
    """A table, and what it comes to."""
    if not summary.jobs:
        yield "no ended job is among them"
        return
    yield from table(_HEADERS, [_cells(row) for row in summary.jobs], right=_RIGHT)
    words = f"{count(summary.scored, 'job')} scored again, {summary.changed} changed"
    if summary.failed:
        words += style(f", {summary.failed} not scored", "red")
    if summary.mean_before is not None:
        words += f"; mean reward {number(summary.mean_before)} before, {number(summary.mean_now)} now"
    yield words
    if not summary.in_time:
        yield style("the time is over; what has begun goes on in the daemon, and nothing else was begun", "yellow")


def _cells(row: Row) -> Sequence[str]:
    why = "" if row.code is None else f"{row.code}: {row.message}" if row.message else row.code
    return [
        row.job_id,
        number(row.before),
        number(row.now),
        "yes" if row.changed else "no" if row.now is not None else "-",
        clean(why)[:80].replace("\n", " "),
    ]
