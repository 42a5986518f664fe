"""The section about batches: how many may run and wait, and what is kept for trainers."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from prorld.config.units import Bytes, Count

__all__ = ["Batches"]

Priority = Annotated[int, Meta(ge=-1000, le=1000)]


class Batches(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Groups for trainers."""

    running_max: Annotated[Count, Meta(description="Batches that run at once; over it a submit is answered 503.")] = 256
    running_groups: Annotated[
        Count, Meta(description="Groups that a batch without a target runs at once, where it does not say how many.")
    ] = 48
    waiting_max: Annotated[
        Count, Meta(description="Prompts of one batch that may wait for their turn; over it they are answered 429.")
    ] = 10_000
    waiting_bytes_max: Annotated[Bytes, Meta(description="Bytes of prompts of all batches that are not settled.")] = (
        512 << 20
    )
    train_priority: Annotated[Priority, Meta(description="Priority of training batches that name none.")] = 0
    eval_priority: Annotated[
        Priority, Meta(description="Priority of evaluations that name none; higher than the other, they overtake.")
    ] = 100
    unacknowledged_bytes_max: Annotated[
        Bytes,
        Meta(description="Bytes of rollouts kept for one tenant to acknowledge; over it submits are answered 429."),
    ] = 32 << 30
    events_kept: Annotated[
        Count, Meta(description="Acknowledged events that are kept of a batch that runs, besides all the others.")
    ] = 10_000
    ended_max: Annotated[
        Count,
        Meta(description="Ended batches kept of those that nobody has to acknowledge; of older ones only the id."),
    ] = 10_000
    ended_bytes_max: Annotated[
        Bytes, Meta(description="Bytes of their events and prompts, as they lie on the disk.")
    ] = 4 << 30
