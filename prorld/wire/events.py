"""Numbered events on the wire: those of one job, and those of everything that a caller may see."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["GAP", "Event", "EventPage", "JobEvent", "JobEventPage"]

# Stands where events are that are no longer kept; ``data`` says which and why, ``seq`` is the last of them.
GAP = "events.gap"


class JobEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One numbered event of a job: ``job.queued``, ``job.stage``, ``job.turn``, ``job.attempt``, ``job.done``."""

    seq: int
    event: str
    at: str
    data: dict[str, Any] = {}


class JobEventPage(msgspec.Struct, frozen=True, kw_only=True):
    """Events of a job in order; ``next`` is the ``after`` of the following page where a bound cut this one."""

    items: list[JobEvent]
    next: str | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event of the daemon. ``seq`` counts all, ``job_seq`` those of the job; null where it is of no job."""

    seq: int
    event: str
    at: str
    job_id: str | None = None
    job_seq: int | None = None
    tenant: str | None = None
    data: dict[str, Any] = {}


class EventPage(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/events``. Up to ``last`` it is everything; ``next`` says the same where a bound cut the page."""

    items: list[Event]
    last: int
    next: str | None = None
