"""``prorld export``: what a journal keeps of ended jobs, as documents or a trainer's rows; with or without a daemon."""

from __future__ import annotations

import argparse
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from prorld.cli.common import epilog
from prorld.cli.exits import Exit, UsageError
from prorld.cli.output import clean, count, note
from prorld.export.names import FORMATS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorld.cli.export_out import Kind, Sink
    from prorld.store.archive import Archive, Wanted

SUMMARY = "trajectories of ended jobs, as JSON or as trainers read them"

_AGE = re.compile(r"(?P<n>\d{1,6})(?P<unit>[smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
NAMED_MAX = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Writes the trajectories that a state directory keeps, oldest first: a document a line, Parquet with a row\n"
        "for each branch, or the rows that a trainer reads, one a line. It reads the journal itself, so no daemon is\n"
        "needed, and one that runs is not disturbed. FILE appears when it is whole. Exit 1 when a job that was named\n"
        "is not there, something kept is damaged, or the format has no place for a job; where that leaves nothing,\n"
        "FILE is not written."
    )
    parser.epilog = epilog(
        ("prorld export > all.jsonl", "everything that is kept"),
        ("prorld export --verdict use --since 24h -o day.jsonl", "what may be trained on, of the last day"),
        ("prorld export --batch step-12 --format parquet -o step-12.parquet", "a batch, in columns"),
        ("prorld export --job job-1 --no-trajectories", "the record alone"),
        ("prorld export --format chat --verdict use -o sft.jsonl", "conversations, to fine-tune on"),
    )
    which = parser.add_argument_group("which jobs (what is given has to hold together; by default all)")
    which.add_argument("--job", action="append", default=[], metavar="ID", help="this one; may be repeated")
    which.add_argument("--group", metavar="ID", help="members of this group")
    which.add_argument("--batch", metavar="ID", help="members of this batch's groups")
    which.add_argument("--handler", metavar="NAME", help="of this kind of task")
    which.add_argument("--tenant", metavar="NAME", help="of this tenant")
    which.add_argument("--verdict", choices=("use", "mask", "drop"), help="with this verdict")
    which.add_argument("--since", type=instant, metavar="T", help="that ended since: an instant, or 90m, 24h, 7d ago")
    parser.add_argument(
        "--format",
        choices=("jsonl", "parquet", *FORMATS),
        metavar="FORM",
        help=f"jsonl or parquet (default: by FILE's ending, else jsonl), or rows: {', '.join(FORMATS)}",
    )
    parser.add_argument("-o", "--output", default="-", metavar="FILE", help="where to, - for stdout (default)")
    parser.add_argument("--no-trajectories", action="store_true", help="records only")
    parser.add_argument("--state-dir", metavar="DIR", help="whose journal [$PRORLD_STATE]")


def run(args: argparse.Namespace) -> int:
    """Export."""
    from prorld.cli.export_out import Withheld, open_sink
    from prorld.client.find import state_dir
    from prorld.store.archive import Archive
    from prorld.store.journal import JOURNAL_FILE

    path = state_dir(args.state_dir) / JOURNAL_FILE
    if not path.is_file():
        demo = path.parent / "demo"
        other = f"the demo's is in --state-dir {demo}" if (demo / JOURNAL_FILE).is_file() else None
        raise UsageError(f"there is no journal in {path.parent}; {other or '--state-dir names another place'}")
    kind: Kind = args.format or ("parquet" if args.output.endswith(".parquet") else "jsonl")
    if kind in FORMATS and args.no_trajectories:
        raise UsageError(f"--format {kind} is made of trajectories; leave --no-trajectories out")
    archive = Archive(path)
    done = Done()
    try:
        with suppress(Withheld), open_sink(kind, args.output, trajectories=not args.no_trajectories) as sink:
            _copy(archive, _wanted(args), sink, args, done)
            done.missing = archive.missing(args.job)
            if done.is_nothing_by_error:
                raise Withheld
    finally:
        archive.close()
    _tell(done, args.output)
    return Exit.FAILED if done.falls_short else Exit.OK


_WHY = {"unknown": "unknown here", "live": "it has not ended", "forgotten": "it is forgotten"}


def _tell(done: Done, output: str) -> None:
    """How much there is, and what is not there."""
    where = clean(output)
    missing = done.missing
    if done.is_nothing_by_error:
        if output != "-":
            note(f"nothing was exported, and {where} was not written")
    elif not done.written:
        note("no ended job is like that" + ("" if output == "-" else f"; {where} is empty"))
    elif output != "-" or done.empty:
        note(_what(done) + ("" if output == "-" else f" in {where}"))
    for job_id, why in list(missing.items())[:NAMED_MAX]:
        note(f"job {clean(job_id)} is not among the ended ones: {_WHY[why]}")
    if len(missing) > NAMED_MAX:
        note(f"and {len(missing) - NAMED_MAX} more")
    if done.damaged:
        note(f"{count(done.damaged, 'job')} could not be read whole and {_are(done.damaged)} left out")
    if done.refused:
        note(f"{count(done.refused, 'job')} can't be said in this format and {_are(done.refused)} left out")


def _wanted(args: argparse.Namespace) -> Wanted:
    from prorld.domain.outcome import Verdict
    from prorld.store.archive import Wanted

    return Wanted(
        job_ids=list(dict.fromkeys(args.job)),
        tenant=args.tenant,
        group_id=args.group,
        batch_id=args.batch,
        handler=args.handler,
        since=args.since,
        verdict=None if args.verdict is None else Verdict(args.verdict),
    )


@dataclass
class Done:
    """How many jobs were written, could not be read, and had no place in the format; of rows, how many there are.

    ``missing`` are those that were named and are not there, each with a reason.
    """

    written: int = 0
    damaged: int = 0
    refused: int = 0
    rows: int | None = None
    empty: int = 0
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def falls_short(self) -> bool:
        """Whether something was wished for and is not in the export."""
        return bool(self.missing or self.damaged or self.refused)

    @property
    def is_nothing_by_error(self) -> bool:
        """Whether that left nothing at all: a filter that no job meets is no error."""
        return not self.written and self.falls_short


def _what(done: Done) -> str:
    if done.rows is None:
        return count(done.written, "job")
    without = f", {done.empty} of which gave none" if done.empty else ""
    return f"{count(done.rows, 'row')} of {count(done.written, 'job')}{without}"


def _are(n: int) -> str:
    return "is" if n == 1 else "are"


def _copy(archive: Archive, wanted: Wanted, sink: Sink, args: argparse.Namespace, done: Done) -> None:
    from prorld.cli.export_out import Progress, Rows
    from prorld.export.reading import NotExportable

    progress = Progress(sys.stderr, on=sys.stderr.isatty() and not (args.output == "-" and sys.stdout.isatty()))
    try:
        for found in archive.found(wanted, trajectories=not args.no_trajectories):
            if found.damage:
                progress.clear()
                note(f"job {clean(found.record.job_id)} is damaged: {clean(found.damage)}")
                done.damaged += 1
                continue
            try:
                sink.write(found)
            except NotExportable as exc:
                done.refused += 1
                if done.refused <= NAMED_MAX:
                    progress.clear()
                    note(clean(exc.message))
                continue
            done.written += 1
            progress.show(done.written, sink.bytes_written)
    finally:
        progress.clear()
    if isinstance(sink, Rows):
        done.rows, done.empty = sink.rows, sink.empty


def instant(text: str) -> str:
    """An argparse type: an RFC 3339 instant, or how long ago, as records have it."""
    age = _AGE.fullmatch(text)
    try:
        if age is not None:
            then = datetime.now(UTC) - timedelta(seconds=int(age["n"]) * _SECONDS[age["unit"]])
        else:
            then = datetime.fromisoformat(text)
            then = then.astimezone(UTC) if then.tzinfo is not None else then.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is neither like 2026-01-31T12:00:00Z nor like 24h") from None
    return f"{then:%Y-%m-%dT%H:%M:%S}.{then.microsecond // 1000:03}Z"
