"""``prorld batch groups``, ``ack`` and ``cancel``: what was accepted, written down and said to be safe."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import TYPE_CHECKING

from prorld.cli.common import client_of
from prorld.cli.exits import Exit, UsageError
from prorld.cli.output import count, note, say, say_json

if TYPE_CHECKING:
    from prorld.client import Client

__all__ = ["ack", "cancel", "cancel_batch", "groups"]


def groups(args: argparse.Namespace) -> int:
    """Write each group as it is accepted; acknowledge it when it is written."""
    from prorld.cli.batch_out import StandardOut, open_groups
    from prorld.client import ClientError
    from prorld.client.errors import NOTHING_NEW

    if args.no_wait and args.within is not None:
        raise UsageError("--no-wait waits for nothing, so it takes no --within")
    written = 0
    place = nullcontext(StandardOut()) if args.out is None else open_groups(args.out, args.batch)
    with place as out, client_of(args, patience_s=args.patience) as client:
        is_all_new = out.last is None
        try:
            for group in client.groups(
                args.batch,
                after=args.after if out.last is None else max(out.last, args.after or 0),
                trajectories=args.trajectories,
                instances=args.instances,
                within_s=0.0 if args.no_wait else args.within,
                away_s=args.patience,
            ):
                out.append(args.batch, group)
                written += 1
                if args.ack:
                    client.ack(args.batch, group.seq, away_s=args.patience)
        except ClientError as exc:
            if not (args.no_wait and exc.stable_code == NOTHING_NEW):
                raise
    if args.out is not None:
        missed = is_all_new and not written and args.after is None
        more = "; what is acknowledged comes with --after 0" if missed else ""
        note(f"{count(written, 'group')} written to {args.out}{more}")
    return Exit.OK


def ack(args: argparse.Namespace) -> int:
    """Say that groups are safe."""
    with client_of(args) as client:
        answer = client.ack(args.batch, args.through, discard=args.discard, away_s=0.0)
    if args.json:
        say_json(answer)
    else:
        left = f"; {count(answer.ready, 'accepted group')} left" if answer.ready else ""
        say(f"acknowledged through {answer.through}{left}")
    return Exit.OK


def cancel(args: argparse.Namespace) -> int:
    """End a batch."""
    with client_of(args) as client:
        cancel_batch(client, args.batch, args.reason, as_json=args.json)
    return Exit.OK


def cancel_batch(client: Client, batch_id: str, reason: str | None, *, as_json: bool) -> None:
    """End one, or what an ended one left, or say that it has ended."""
    from prorld.domain.batch import BatchState

    record = client.batch(batch_id)
    words = f"already ended: {record.state.value}"
    if record.state is BatchState.RUNNING:
        record = client.cancel_batch(batch_id, reason=reason)
        words = f"cancelling; it keeps {count(record.groups.informative, 'accepted group')}"
    elif record.leftovers:
        words += f"; cancelling {count(record.leftovers, 'group')} that it left for another batch"
        record = client.cancel_batch(batch_id, reason=reason)
    if as_json:
        say_json(record)
    else:
        say(words)
