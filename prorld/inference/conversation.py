"""A conversation with the policy: what a handler says and hears, in order.

It brings texts to the context, in a thread where they are long, and lets the session speak. Several conversations of
one rollout share the session's budgets and its engine; one turn is sampled at a time, so the call log has one order.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar, TypeVarTuple

import trio

from prorld.domain.branch import Rewrite
from prorld.domain.messages import Message, ToolSchema
from prorld.errors import HandlerError
from prorld.inference.contract import Model, Turn
from prorld.kit.lanes import Lane
from prorld.tokens.context import TokenContext

__all__ = ["INLINE_CHARS_MAX", "INLINE_TOKENS_MAX", "Conversation", "Speak"]

# Longer texts are tokenized in a thread: 10 KiB take about 4 ms.
INLINE_CHARS_MAX = 8 * 1024
# Longer branches are handed to a renderer in a thread: some copy them, 30,000 tokens in about 2 ms.
INLINE_TOKENS_MAX = 32 * 1024

# Lets the policy speak in a context, at most so many tokens.
Speak = Callable[[TokenContext, int | None], Awaitable[Turn]]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Conversation:
    """One growing conversation. Implements ``prorld.inference.contract.Model``."""

    def __init__(self, context: TokenContext, *, lane: Lane, floor: trio.Lock, speak: Speak) -> None:
        """``floor`` is shared by the conversations of a session: whose turn it is has it."""
        self._context = context
        self._lane = lane
        self._floor = floor
        self._speak = speak
        self._order = trio.Lock()
        self._over = False

    async def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> None:
        """Open the conversation."""
        async with self._order:
            self._check_open()
            if self._context.started:
                raise HandlerError("the conversation has been started already")
            offered = tuple(tools)
            plan = await self._plan(_is_long(messages), self._context.plan_start, messages, offered)
            self._context.apply(plan, offered)

    async def observe(self, messages: Sequence[Message]) -> None:
        """Add what the environment answered to the last turn: user and tool messages, all at once."""
        async with self._order:
            self._check_open()
            long = _is_long(messages) or (self._context.started and len(self._context.current) > INLINE_TOKENS_MAX)
            self._context.end_cut_turn()
            plan = await self._plan(long, self._context.plan_bridge, messages)
            if plan is None:
                plan = await self._plan(True, self._context.plan_fork, messages)
            self._context.apply(plan)

    async def rewrite(self, messages: Sequence[Message], *, reason: Rewrite = "compaction") -> None:
        """Go on from another history, in a branch of its own; what was sampled so far stays in the old one."""
        async with self._order:
            self._check_open()
            self._context.apply(await self._plan(True, self._context.plan_rewrite, messages, reason))

    async def turn(self, *, max_tokens: int | None = None) -> Turn:
        """Let the policy speak. When no budget is left nothing is sampled and the turn is empty with ``stop`` set."""
        async with self._order:
            self._check_open()
            async with self._floor:
                return await self._speak(self._context, max_tokens)

    def sub_agent(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> AbstractAsyncContextManager[Model]:
        """A conversation that starts with ``messages`` and shares the budgets; over when the block is left."""
        return self._sub_agent(messages, tools)

    @asynccontextmanager
    async def _sub_agent(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> AsyncIterator[Model]:
        self._check_open()
        child = Conversation(self._context.sub_context(), lane=self._lane, floor=self._floor, speak=self._speak)
        await child.start(messages, tools)
        try:
            yield child
        finally:
            child.end()

    def end(self) -> None:
        """Nothing more is said here."""
        self._over = True

    async def _plan(self, long: bool, make: Callable[[*Ts], T], *args: *Ts) -> T:  # noqa: FBT001  # one caller's flag.
        if long:
            return await self._lane.run(make, *args)
        await trio.lowlevel.checkpoint()
        return make(*args)

    def _check_open(self) -> None:
        if self._over:
            raise HandlerError("the sub-agent's conversation is over")


def _is_long(messages: Iterable[Message]) -> bool:
    return sum(len(message.content) for message in messages) > INLINE_CHARS_MAX
