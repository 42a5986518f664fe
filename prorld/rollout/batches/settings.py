"""The bounds that batches keep, and what stands where a request leaves something out."""

from __future__ import annotations

import msgspec

__all__ = ["BatchSettings"]


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """As ``prorld.config.batches.Batches`` has it, where the reasons are."""

    running_max: int = 256
    waiting_max: int = 10_000
    waiting_bytes_max: int = 512 << 20
    running_groups: int = 48
    train_priority: int = 0
    eval_priority: int = 100
    unacknowledged_bytes_max: int = 32 << 30
    events_kept: int = 10_000
    ended_max: int = 10_000
    ended_bytes_max: int = 4 << 30
    forget_after_s: float = 14 * 86_400.0
    # What the daemon accepts at all: the jobs of a group are accepted together.
    jobs_max: int = 10_000
