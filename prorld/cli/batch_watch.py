"""``prorld batch watch``: a batch as it goes on, to its end, over whatever happens to the daemon."""

from __future__ import annotations

import argparse
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TextIO

from prorld.cli.batch_show import accepted, record_lines
from prorld.cli.common import client_of
from prorld.cli.exits import Exit
from prorld.cli.output import clean, count, number, say, say_json, seconds, style_for, width

if TYPE_CHECKING:
    from prorld.client import Client
    from prorld.wire.batches import BatchEvent, BatchRecord

__all__ = ["event_line", "progress", "watch"]

_LOOK_S = 1.0
_BAR = 24
_CLEAR = "\r\x1b[K"
GOOD_ENDS = frozenset({"complete", "exhausted"})


def watch(args: argparse.Namespace) -> int:
    """Follow it: a line that moves, a line an event, or events as JSON."""
    with client_of(args, patience_s=args.patience) as client:
        if sys.stdout.isatty() and not args.json:
            record = _live(client, args.batch, sys.stdout)
        else:
            for event in client.batch_events(args.batch, after=args.after, away_s=args.patience):
                if args.json:
                    say_json(event, pretty=False)
                    sys.stdout.flush()
                elif (line := event_line(event)) is not None:
                    say(line)
            record = client.batch(args.batch)
    if not args.json:
        say("", *record_lines(record, style_for(sys.stdout), bars=sys.stdout.isatty()))
    return Exit.OK if record.state in GOOD_ENDS else Exit.FAILED


def _live(client: Client, batch_id: str, stream: TextIO) -> BatchRecord:
    try:
        while True:
            record = client.batch(batch_id)
            stream.write(_CLEAR + progress(record, datetime.now(UTC))[: width() - 1])
            stream.flush()
            if record.state != "running":
                return record
            time.sleep(_LOOK_S)  # noqa: TID251 - there is no event loop on this side
    finally:
        stream.write("\n")
        stream.flush()


def progress(record: BatchRecord, now: datetime) -> str:
    """Where a batch is, on one line."""
    groups = record.groups
    words = [f"{accepted(record)} accepted", f"{groups.running} running", f"{groups.uninformative} filtered"]
    words += [f"{n} {name}" for name, n in (("failed", groups.failed), ("stale", groups.stale)) if n]
    if record.waste.jobs:
        words.append(f"{count(record.waste.jobs, 'job')} wasted")
    left = _left_s(record, now)
    if left is not None:
        words.append(f"about {seconds(left)} left")
    return _bar(record) + ", ".join(words)


def _bar(record: BatchRecord) -> str:
    if record.target_groups is None:
        return ""
    filled = min(_BAR, round(_BAR * record.groups.informative / record.target_groups))
    return f"[{'█' * filled}{'·' * (_BAR - filled)}] "


def _left_s(record: BatchRecord, now: datetime) -> float | None:
    """By the mean of the batch so far; ``None`` where nothing can be said."""
    done = record.groups.informative
    if record.target_groups is None or not done or record.state != "running":
        return None
    try:
        went_s = (now - datetime.fromisoformat(record.created_at)).total_seconds()
    except (ValueError, TypeError):
        return None
    return max(0.0, went_s) / done * (record.target_groups - done)


def event_line(event: BatchEvent) -> str | None:
    """An event on one line; ``None`` for those that say nothing to a person."""
    from msgspec import UNSET

    if event.event == "batch.end":
        state = "" if event.state is UNSET else f"  {event.state.value}"
        return f"{event.seq:>6}  batch.end{state}{_reason(event)}"
    if not event.event.startswith("group."):
        return None
    words = [f"{event.seq:>6}", f"{event.event.removeprefix('group.'):<9}"]
    words.append(clean(event.group_id) if event.group_id is not UNSET else "?")
    if event.rewards is not UNSET and event.rewards:
        words.append("rewards " + " ".join(number(reward) for reward in event.rewards))
    took = [] if event.durations_s is UNSET else [took for took in event.durations_s if took is not None]
    if took:
        words.append(f"slowest {seconds(max(took))}")
    if event.staleness is not UNSET and event.staleness:
        words.append(f"staleness {event.staleness}")
    return "  ".join(words) + _reason(event)


def _reason(event: BatchEvent) -> str:
    from msgspec import UNSET

    return "" if event.reason is UNSET or not event.reason else f": {clean(event.reason)}"
