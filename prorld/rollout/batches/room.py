"""What every batch shares: the parts of the daemon that it uses, as narrow as it needs them."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from prorld.domain.batch import PolicyNow
from prorld.metrics import Metrics
from prorld.rollout.batches.breakers import Breakers
from prorld.rollout.batches.members import Members
from prorld.rollout.batches.settings import BatchSettings
from prorld.rollout.clock import Clock
from prorld.rollout.events import Feed
from prorld.rollout.members import Jobs
from prorld.store.journal import Journal

__all__ = ["Asks", "PolicyWatch", "Room"]

T = TypeVar("T")
P = ParamSpec("P")


class Asks(Protocol):
    """Who answers questions about the journal; ``prorld.store.reader.Reader`` is one."""

    def ask(
        self, query: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[T]:
        """``query(connection, ...)``; ``Overloaded``."""
        ...


class PolicyWatch(Protocol):
    """The policies as batches see them."""

    def __contains__(self, policy: object) -> bool:
        """Whether there is one of this name."""
        ...

    def now(self, policy: str) -> PolicyNow:
        """What is in force of it."""
        ...

    def listen(self, moved: Callable[[str], None]) -> None:
        """Call it with the name of every policy that gets another version. It may neither block nor raise."""
        ...


@dataclass(frozen=True, kw_only=True)
class Room:
    """The parts."""

    journal: Journal
    reader: Asks
    jobs: Jobs
    policies: PolicyWatch
    breakers: Breakers
    clock: Clock
    feed: Feed
    metrics: Metrics
    settings: BatchSettings
    members: Members = field(default_factory=Members)
