"""The synchronous client: the calls of the HTTP contract, made so that each may be repeated without harm."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Self

from prorld.client.batches import BatchCalls
from prorld.client.caller import AWAY_S, Caller
from prorld.client.errors import ClientError, UpdateFailed
from prorld.client.find import find
from prorld.client.flows import Ask, Step, SyncFace
from prorld.client.holding import PolicyHold
from prorld.client.http import Reply, Transport
from prorld.client.jobs import JobCalls
from prorld.client.ops import OpsCalls
from prorld.client.policies import PolicyCalls
from prorld.domain.policy import Mode

__all__ = ["Client"]


class Client(JobCalls, BatchCalls, PolicyCalls, OpsCalls, SyncFace):
    """A daemon's jobs, batches and state. Finds the daemon of this host by itself; not for several threads at once.

    ``patience_s`` is how long one call may go on trying after a refusal that is worth a repeat (an overloaded daemon, a
    lost connection); 0 tells at once. ``progress`` writes how far a batch is to stderr; ``None``: to a terminal.
    """

    def __init__(
        self,
        address: str | None = None,
        token: str | None = None,
        state_dir: str | os.PathLike[str] | None = None,
        *,
        patience_s: float = 10.0,
        progress: bool | None = None,
    ) -> None:
        super().__init__(Caller(partial(find, address, token, state_dir), patience_s), progress=progress)
        self._transport = Transport()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    def _perform(self, step: Step) -> Reply | None:
        if isinstance(step, Ask):
            return self._transport.request(step)
        time.sleep(step.seconds)  # noqa: TID251 - there is no event loop on this side
        return None

    @contextmanager
    def policy_update(
        self,
        version: int,
        *,
        policy: str = "default",
        mode: Mode = "abort",
        timeout_s: float = 60.0,
        rollback: bool = False,
        pause_id: str | None = None,
        away_s: float = AWAY_S,
    ) -> Iterator[PolicyHold]:
        """Pause a policy, let the body move the weights, resume with their version.

        After an exception in the body the policy stays paused, and a note on it says how to go on; unless the body
        called ``unchanged`` of what it got. With a ``pause_id`` of its own a trainer that was killed in the body finds
        its pause again. ``away_s`` is how long the daemon may be gone.
        """
        hold = PolicyHold(
            self._caller, policy, version, mode=mode, timeout_s=timeout_s, rollback=rollback, pause_id=pause_id,
            away_s=away_s,
        )  # fmt: skip
        try:
            self._drive(hold.begin())
        except BaseException as exc:
            if hold.may_be_paused(exc):
                self._give_back(hold, exc, may=hold.may_give_back)
            raise
        try:
            yield hold
        except BaseException as exc:
            self._give_back(hold, exc, may=hold.is_unchanged)
            raise
        try:
            self._drive(hold.end())
        except UpdateFailed:
            raise
        except BaseException as exc:
            exc.add_note(hold.end_words)
            raise

    def _give_back(self, hold: PolicyHold, exc: BaseException, *, may: bool) -> None:
        is_back = False
        try:
            if may:
                self._drive(hold.give_back())
                is_back = True
        except ClientError as refusal:
            exc.add_note(f"it could not be given back: {refusal.message}")
        finally:
            # Also where somebody has no patience for it.
            if not is_back:
                exc.add_note(hold.words)
