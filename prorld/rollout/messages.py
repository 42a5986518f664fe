"""What is said to the supervisor, what it answers, and the bounds it keeps."""

from __future__ import annotations

import msgspec

from prorld.kit.mailbox import Reply
from prorld.wire.jobs import JobRecord, SubmitJob

__all__ = ["Accepted", "Ping", "Submit", "SupervisorLimits"]


class SupervisorLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the book; ``results_*`` are those of the ended jobs that are in memory beside the disk."""

    jobs_max: int = 10_000
    accepted_bytes_max: int = 1 << 30
    mailbox_size: int = 1024
    results_max_count: int = 10_000
    results_max_bytes: int = 256 << 20


class Accepted(msgspec.Struct, frozen=True):
    """The answer to a submit."""

    record: JobRecord
    is_new: bool


class Submit(msgspec.Struct, frozen=True):
    """A submit on its way to the supervisor. ``size_bytes`` are those of the body."""

    request: SubmitJob
    tenant: str
    digest: str
    size_bytes: int
    requeued_from: str | None
    reply: Reply[Accepted]


class Ping(msgspec.Struct, frozen=True):
    """A question that only an actor that reads its mailbox answers."""

    reply: Reply[None]
