"""``prorld batch submit`` and ``append``: prompts from a file into a batch, more than fit at once, too."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prorld.cli.common import client_of, read_text
from prorld.cli.exits import Exit, UsageError
from prorld.cli.output import count, note, program, say, say_json

if TYPE_CHECKING:
    from prorld.client import Client
    from prorld.wire.batches import SubmitBatch

__all__ = ["append", "submit"]

# What goes along with the batch; the rest follows in parts.
FIRST_MAX = 1000
# An id makes a repeat of the submission harmless, so a connection that breaks is tried again for a moment.
PATIENCE_S = 2.0
# A window that is full empties as the batch goes on, and that takes as long as it takes.
FEED_S = 7 * 86400.0
ENDED = "batch_ended"
# An instance has none of these.
_OF_A_BATCH = frozenset({"handler", "samples_per_group", "target_groups"})


def submit(args: argparse.Namespace) -> int:
    """Ask for the batch, and feed it what did not fit."""
    import msgspec

    batch = read_batch(args)
    if args.dry_run:
        say_json(batch)
        return Exit.OK
    is_last = not args.open and batch.last is not False
    first, rest = batch.instances[:FIRST_MAX], batch.instances[FIRST_MAX:]
    with client_of(args, patience_s=PATIENCE_S) as client:
        record = client.submit_batch(msgspec.structs.replace(batch, instances=first, last=is_last and not rest))
        if not args.json:
            say(record.batch_id)
        if is_last and (words := _too_few(batch)) is not None:
            note(words)
        if rest:
            note(f"{len(first)} of {len(batch.instances)} prompts sent; the others follow as it takes them")
            try:
                _feed(client, record.batch_id, rest, len(first), is_last=is_last)
            except KeyboardInterrupt:
                end = " --last" if is_last else ""
                file = "FILE" if args.file == "-" else args.file
                again = f"{program()} batch append {record.batch_id} {file} --offset 0{end}"
                note("", f"the batch goes on with the prompts that it has; feed it the others by `{again}`")
                raise
        if args.json:
            say_json(client.batch(record.batch_id) if rest else record)
    return Exit.OK


def _too_few(batch: SubmitBatch) -> str | None:
    """A word where so few prompts can't come to so many groups; with what another batch left they may."""
    there, target = len(batch.instances), batch.target_groups
    if target is None or batch.carry_from is not None or there >= target:
        return None
    wanted = f"{count(target, 'group')} {'is' if target == 1 else 'are'} wanted of {count(there, 'prompt')}"
    return f"{wanted}: it ends `exhausted` unless more are appended while it runs"


def append(args: argparse.Namespace) -> int:
    """More prompts for a batch that runs."""
    from prorld.cli.instances import INSTANCE_BYTES_MAX
    from prorld.cli.refusals import with_words
    from prorld.client import ClientError
    from prorld.client.batches import APPEND_S
    from prorld.wire.codec import convert

    text = read_text(args.file, limit_bytes=INSTANCE_BYTES_MAX)
    # To say that there are no more, a file of none will do.
    found = _raw(text, args.file).get("instances", []) if text.strip() or not args.last else []
    instances = convert(found, list[dict[str, Any]], what=args.file)
    within_s = APPEND_S if args.within is None else args.within
    try:
        with client_of(args) as client:
            at = client.append_instances(args.batch, instances, offset=args.offset, last=args.last, within_s=within_s)
    except ClientError as exc:
        expected = (exc.details or {}).get("expected_offset")
        raise exc if expected is None else with_words(exc, f"; the next prompts go to --offset {expected}") from exc
    if args.json:
        say_json({"next_offset": at})
    else:
        say(f"{count(len(instances), 'prompt')} added; the batch has {at}{' and gets no more' if args.last else ''}")
    return Exit.OK


def _feed(client: Client, batch_id: str, instances: Sequence[dict[str, Any]], offset: int, *, is_last: bool) -> None:
    from prorld.client import ClientError

    try:
        client.append_instances(batch_id, instances, offset=offset, last=is_last, within_s=FEED_S)
    except ClientError as exc:
        if exc.stable_code != ENDED:
            raise
        note(f"the batch ended before it needed all prompts: `{program()} batch show {batch_id}`")


def read_batch(args: argparse.Namespace) -> SubmitBatch:
    """The batch that the file and the flags describe, checked before anything is sent."""
    from prorld.cli.instances import INSTANCE_BYTES_MAX
    from prorld.errors import BadRequest
    from prorld.wire.batches import SubmitBatch
    from prorld.wire.codec import convert

    text = read_text(args.file, limit_bytes=INSTANCE_BYTES_MAX)
    try:
        batch = convert(_overlaid(_raw(text, args.file), args), SubmitBatch, what=args.file)
    except BadRequest as exc:
        raise UsageError(exc.message) from exc
    if not batch.instances and not args.open and batch.carry_from is None:
        raise UsageError(f"{args.file} has no instances; --open if they follow by `prorld batch append`")
    if batch.handler is None and batch.instances and not any("data_source" in one for one in batch.instances):
        raise UsageError("which kind of task is it? name one with --handler; `prorld handlers` lists them")
    return batch


def _raw(text: str, name: str) -> dict[str, Any]:
    """A batch is one object with ``instances``; everything else is an instance per line."""
    from prorld.cli.instances import read_lines

    value, broken = None, ""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as exc:
        broken = str(exc)
    if isinstance(value, dict) and isinstance(value.get("instances"), list):
        return value
    if isinstance(value, dict) and ("\n" in text.strip() or _OF_A_BATCH & value.keys()):
        # One object over several lines, or with a batch's fields, is meant to be one; the decoder knows what it lacks.
        return value
    if broken and '"instances"' in text:
        raise UsageError(f"{name} is meant to be a batch, and is not JSON: {broken}")
    return {"instances": [instance for _, instance in read_lines(text, name)]}


# Flags that are fields of a batch, by the field's name.
_FIELDS = {
    "batch_id": "batch_id", "target": "target_groups", "samples": "samples_per_group", "selection": "selection",
    "max_running": "max_running_groups", "max_groups": "max_groups", "max_wall": "max_wall_s",
    "leftovers": "leftovers", "carry_from": "carry_from", "priority": "priority",
}  # fmt: skip


def _overlaid(raw: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    from prorld.cli.submit import overlaid

    found: dict[str, Any] = {**overlaid(raw, args)}
    for flag, name in _FIELDS.items():
        if (value := getattr(args, flag)) is not None:
            found[name] = value
    if args.eval:
        found["purpose"] = "eval"
    if args.rule is not None:
        given = found.get("informative")
        found["informative"] = {**(given if isinstance(given, dict) else {}), "rule": args.rule}
    if args.max_staleness is not None:
        found["max_staleness"] = None if args.max_staleness == "none" else _staleness(args.max_staleness)
    return found


def _staleness(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"--max-staleness is a number from 0 or none, and not {text!r}")
    return int(text)
