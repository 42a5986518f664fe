"""The asynchronous client: the same calls for whoever has an event loop, trio's or asyncio's."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Self

import anyio

from prorld.client.aio_http import CONNECTIONS_MAX, Connections
from prorld.client.batches import BatchCalls
from prorld.client.caller import AWAY_S, Caller
from prorld.client.errors import ClientError, UpdateFailed
from prorld.client.find import find
from prorld.client.flows import Ask, AsyncFace, Step
from prorld.client.holding import UNDO_S, PolicyHold
from prorld.client.http import Reply
from prorld.client.jobs import JobCalls
from prorld.client.ops import OpsCalls
from prorld.client.policies import PolicyCalls
from prorld.domain.policy import Mode

__all__ = ["AsyncClient"]


class AsyncClient(JobCalls, BatchCalls, PolicyCalls, OpsCalls, AsyncFace):
    """``Client`` for trio and asyncio: each method is awaited, ``groups`` and its like are for ``async for``.

    Tasks may share one; they get ``connections_max`` connections between them. A call that is cancelled closes its
    connection. Everything else is as in ``Client``.
    """

    def __init__(
        self,
        address: str | None = None,
        token: str | None = None,
        state_dir: str | os.PathLike[str] | None = None,
        *,
        patience_s: float = 10.0,
        progress: bool | None = None,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        super().__init__(Caller(partial(find, address, token, state_dir), patience_s), progress=progress)
        self._connections = Connections(connections_max)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections that no call uses; those in use close after their call."""
        await self._connections.aclose()

    async def _perform(self, step: Step) -> Reply | None:
        if isinstance(step, Ask):
            return await self._connections.request(step)
        await anyio.sleep(step.seconds)
        return None

    @asynccontextmanager
    async def policy_update(
        self,
        version: int,
        *,
        policy: str = "default",
        mode: Mode = "abort",
        timeout_s: float = 60.0,
        rollback: bool = False,
        pause_id: str | None = None,
        away_s: float = AWAY_S,
    ) -> AsyncIterator[PolicyHold]:
        """As ``Client.policy_update``; to be cancelled in the body is an exception like any other."""
        hold = PolicyHold(
            self._caller, policy, version, mode=mode, timeout_s=timeout_s, rollback=rollback, pause_id=pause_id,
            away_s=away_s,
        )  # fmt: skip
        try:
            await self._drive(hold.begin())
        except BaseException as exc:
            if hold.may_be_paused(exc):
                with anyio.move_on_after(UNDO_S, shield=True):
                    await self._give_back(hold, exc, may=hold.may_give_back)
            raise
        try:
            yield hold
        except BaseException as exc:
            with anyio.move_on_after(UNDO_S, shield=True):
                await self._give_back(hold, exc, may=hold.is_unchanged)
            raise
        try:
            await self._drive(hold.end())
        except UpdateFailed:
            raise
        except BaseException as exc:
            exc.add_note(hold.end_words)
            raise

    async def _give_back(self, hold: PolicyHold, exc: BaseException, *, may: bool) -> None:
        is_back = False
        try:
            if may:
                await self._drive(hold.give_back())
                is_back = True
        except ClientError as refusal:
            exc.add_note(f"it could not be given back: {refusal.message}")
        finally:
            if not is_back:
                exc.add_note(hold.words)
