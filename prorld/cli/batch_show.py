"""``prorld batch list`` and ``show``: batches as tables, and what became of the groups of one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING

from prorld.cli.common import client_of
from prorld.cli.exits import Exit
from prorld.cli.output import Style, clean, count, number, say, say_json, seconds, style_for, table

if TYPE_CHECKING:
    from prorld.client import Client
    from prorld.wire.batches import BatchRecord

__all__ = ["list_batches", "record_lines", "show"]

_PAGE = 100
_BAR = 32
# A reward of its own line each; what takes more values is told by its mean.
_REWARDS_MAX = 12
_COLOURS = {
    "informative": "green", "uninformative": "dim", "failed": "red", "stale": "yellow", "cancelled": "yellow",
    "carried": "cyan", "running": "blue", "waiting": "dim",
}  # fmt: skip


def list_batches(args: argparse.Namespace) -> int:
    """The batches, newest first."""
    with client_of(args) as client:
        found = (record for record in each(client) if args.state in (None, record.state))
        records = [*islice(found, args.limit)]
    if args.json:
        say_json(records)
    else:
        say(*(batch_table(records, datetime.now(UTC)) if records else ["no batches"]))
    return Exit.OK


def show(args: argparse.Namespace) -> int:
    """One of them."""
    with client_of(args) as client:
        record = client.batch(args.batch)
    if args.json:
        say_json(record)
    else:
        say(*record_lines(record, style_for(sys.stdout), bars=sys.stdout.isatty()))
    return Exit.OK


def each(client: Client) -> Iterator[BatchRecord]:
    """Every batch, newest first, page by page as they are taken."""
    after: str | None = None
    while True:
        found = client.batches(limit=_PAGE, after=after)
        yield from found.items
        after = found.next
        if after is None or not found.items:
            return


def batch_table(records: Sequence[BatchRecord], now: datetime) -> list[str]:
    """A table of batches, one line each."""
    from prorld.cli.records import age

    rows = [
        [
            record.batch_id,
            record.handler,
            record.policy,
            record.state.value,
            accepted(record),
            str(record.groups.running),
            share(record.before_filter.kept_fraction),
            number(record.before_filter.reward_mean),
            age(record.created_at, now),
        ]
        for record in records
    ]
    headers = ("BATCH", "HANDLER", "POLICY", "STATE", "ACCEPTED", "RUNNING", "KEPT", "REWARD", "AGE")
    return table(headers, rows, right=frozenset({"ACCEPTED", "RUNNING", "KEPT", "REWARD", "AGE"}))


def accepted(record: BatchRecord) -> str:
    """Accepted groups, of how many."""
    done = record.groups.informative
    return str(done) if record.target_groups is None else f"{done}/{record.target_groups}"


def share(value: float | None) -> str:
    """A share for people; ``-`` where there is none."""
    return "-" if value is None else f"{100 * value:.0f} %"


def record_lines(record: BatchRecord, style: Style, *, bars: bool) -> list[str]:
    """All that is known of a batch."""
    why = f": {clean(record.reason)}" if record.reason else ""
    lines = [
        f"{style(clean(record.batch_id), 'bold')}  {record.state.value}{why}",
        f"  {_kind(record)}",
        "",
        *_group_lines(record, style, bars=bars),
    ]
    lines += _before_filter(record, style, bars=bars)
    lines += ["", *(f"{name:<15}{words}" for name, words in _facts(record))]
    return lines


def _kind(record: BatchRecord) -> str:
    what = "a stream" if record.target_groups is None else f"{count(record.target_groups, 'group')} wanted"
    words = [f"{record.handler}, policy {record.policy}", f"{what} of {count(record.samples_per_group, 'sample')}"]
    if record.purpose == "eval":
        words.append("evaluation")
    if record.priority:
        words.append(f"priority {record.priority}")
    return clean(", ".join(words))


def _group_lines(record: BatchRecord, style: Style, *, bars: bool) -> Iterator[str]:
    groups = record.groups
    ends = ("informative", "uninformative", "failed", "stale", "cancelled", "carried", "running", "waiting")
    counts = {name: getattr(groups, name) for name in ends}
    yield f"groups         {sum(counts.values())}"
    yield from _bars({name: n for name, n in counts.items() if n}, style, bars=bars)


def _before_filter(record: BatchRecord, style: Style, *, bars: bool) -> Iterator[str]:
    seen = record.before_filter
    if not seen.groups:
        return
    words = [
        f"{count(seen.groups, 'group')}, {count(seen.samples, 'sample')}",
        f"mean reward {number(seen.reward_mean)}",
        f"solved by none {seen.solved_none}, by all {seen.solved_all}",
        f"kept {share(seen.kept_fraction)}",
    ]
    yield ""
    yield f"before filter  {'; '.join(words)}"
    if 0 < len(seen.reward_histogram) <= _REWARDS_MAX:
        yield from _bars({f"reward {clean(name)}": n for name, n in seen.reward_histogram.items()}, style, bars=bars)


def _bars(counts: dict[str, int], style: Style, *, bars: bool) -> Iterator[str]:
    if not counts:
        return
    most = max(counts.values())
    wide = max(11, *map(len, counts))
    digits = len(str(most))
    for name, n in counts.items():
        bar = "█" * max(1 if n else 0, round(_BAR * n / max(most, 1))) if bars else ""
        colour = _COLOURS.get(name)
        yield f"  {name:<{wide}}  {n:>{digits}}  {style(bar, colour) if colour else bar}".rstrip()


def _facts(record: BatchRecord) -> Iterator[tuple[str, str]]:
    yield "durations", _durations(record)
    waste = record.waste
    yield "waste", f"{count(waste.jobs, 'job')}, {count(waste.sampled_tokens, 'token')}, {seconds(waste.seconds)}"
    stale = record.staleness
    if stale.mean is not None:
        yield "staleness", f"mean {stale.mean:.2g}, max {stale.max}"
    yield "prompts", f"{record.next_offset} taken{_more(record)}"
    yield "acknowledged", f"through {record.acknowledged} of {record.last_seq}"
    if record.carry_from is not None:
        yield "carried from", clean(record.carry_from)
    if record.carried_to is not None:
        yield "carried to", clean(record.carried_to)
    elif record.leftovers:
        yield "leftovers", f"{count(record.leftovers, 'group')} for the batch that names this one in carry_from"


def _more(record: BatchRecord) -> str:
    if record.state != "running":
        return ""
    return f", {'there are no more' if record.is_last else 'more may follow'}; it could use {record.wants}"


def _durations(record: BatchRecord) -> str:
    took = record.durations
    if took.all_mean_s is None:
        return "nothing has ended"
    words = [f"all {seconds(took.all_mean_s)}"]
    if took.informative_mean_s is not None:
        words.append(f"informative {seconds(took.informative_mean_s)}")
    if took.accepted_mean_s is not None:
        words.append(f"accepted {seconds(took.accepted_mean_s)}")
    if took.accepted_mean_s is not None and took.informative_mean_s:
        # What selection by speed does: those that are trained on against those that could have been.
        bias = took.accepted_mean_s / took.informative_mean_s - 1
        words.append(f"bias {100 * bias:+.1f} %")
    return ", ".join(words) + " a sample"
