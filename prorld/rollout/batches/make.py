"""The room of batches put together from the parts of the daemon."""

from __future__ import annotations

from collections.abc import Callable

from prorld.domain.batch import PolicyNow
from prorld.handlers.registry import Registry
from prorld.inference.policy_book import PolicyBook
from prorld.rollout.acceptance import CAPTURES
from prorld.rollout.batches.breakers import Breakers
from prorld.rollout.batches.floor import Floor
from prorld.rollout.batches.room import Room
from prorld.rollout.batches.service import Batches
from prorld.rollout.batches.settings import BatchSettings
from prorld.rollout.life import World
from prorld.rollout.supervisor import Supervisor
from prorld.store.reader import Reader

__all__ = ["PoliciesOfBook", "make_batches"]


class PoliciesOfBook:
    """The book of policies as batches see it; a ``prorld.rollout.batches.room.PolicyWatch``."""

    def __init__(self, book: PolicyBook) -> None:
        self._book = book

    def __contains__(self, policy: object) -> bool:
        return isinstance(policy, str) and policy in self._book

    def now(self, policy: str) -> PolicyNow:
        """What is in force. One that is gone since a restart counts as new: its jobs say what is wrong."""
        if policy not in self._book:
            return PolicyNow()
        gate = self._book.gate(policy)
        return PolicyNow(version=gate.version, rollbacks=gate.rollbacks)

    def listen(self, moved: Callable[[str], None]) -> None:
        """Hear of every other version."""
        self._book.listen(moved)


def make_batches(
    world: World,
    supervisor: Supervisor,
    handlers: Registry,
    book: PolicyBook,
    reader: Reader,
    *,
    settings: BatchSettings,
    breakers: Breakers,
) -> Batches:
    """Batches over these; ``floor.restore`` and ``floor.run`` let them live."""
    room = Room(
        journal=world.journal, reader=reader, jobs=supervisor, policies=PoliciesOfBook(book), breakers=breakers,
        clock=world.clock, feed=supervisor.feed, metrics=world.metrics, settings=settings,
    )  # fmt: skip
    return Batches(Floor(room), handlers, captures=CAPTURES, is_draining=lambda: supervisor.draining)
