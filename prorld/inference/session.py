"""The session: the policy as one rollout talks to it.

It counts the budgets before every call, sends the branch's own tokens to the leased engine, and appends what comes back
in one place. A turn that an engine interrupted goes on from its own tokens; an engine that fails is left for another
one. It never renders, never parses text by itself and never chooses an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from typing import Protocol

import msgspec
import trio

from prorld.domain.branch import Branch, Rewrite
from prorld.domain.calls import CallRecord
from prorld.domain.job import JobSpec, TokenCounts
from prorld.domain.messages import Message, ToolSchema
from prorld.domain.outcome import StopReason
from prorld.errors import BackendError, ContextOverflow, EngineBusy, HandlerError, NoBackend
from prorld.inference.call_log import CallLog
from prorld.inference.checks import check_generation
from prorld.inference.contract import Capabilities, Generation, GenerationRequest, Model, Turn
from prorld.inference.conversation import Conversation
from prorld.inference.lease import Door
from prorld.inference.passage import Passage
from prorld.inference.policy_gate import PolicyGate
from prorld.inference.text_view import ConversationView
from prorld.kit.allowance import Allowance
from prorld.kit.lanes import Lane
from prorld.tokens.context import TokenContext
from prorld.tokens.contract import ParsedTurn, Renderer

__all__ = ["ROOM_MIN", "EngineLease", "ModelSession"]

# With less room than this no sentence fits, and a call would only be paid for.
ROOM_MIN = 8
MIGRATIONS_MAX = 4
BUSY_WAIT_MIN_S = 0.05
BUSY_WAIT_MAX_S = 2.0


class EngineLease(Protocol):
    """An engine that is ours for as long as the rollout lasts; ``prorld.inference.lease.Lease`` is one."""

    @property
    def backend_id(self) -> str:
        """The engine that is leased now."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What that engine can."""
        ...

    @property
    def lacking(self) -> str | None:
        """The code of what a call waits for at the moment."""
        ...

    async def generate(self, request: GenerationRequest, door: Door | None = None) -> Generation:
        """Sample on the engine that is leased now; waits where it has no place, then passes the door.

        Raises ``BackendError``.
        """
        ...

    async def migrate(self) -> None:
        """Leave the engine for another one; waits for one."""
        ...


class ModelSession:
    """The conversations of one rollout with a leased engine; as a ``Model`` it is the main one."""

    def __init__(
        self,
        spec: JobSpec,
        attempt: int,
        *,
        renderer: Renderer,
        lease: EngineLease,
        lane: Lane,
        on_turn: Callable[[int, Turn], None] | None = None,
        gate: PolicyGate | None = None,
    ) -> None:
        """``on_turn`` is told the number and the content of every turn in which the policy spoke; it must not block.

        Every call goes through the policy's ``gate``; without one the policy never changes.
        """
        self._spec = spec
        # Job ids are unique per tenant only, and engines serve all tenants.
        self._name = f"{spec.tenant}/{spec.job_id}-{attempt}"
        self._renderer = renderer
        self._lease = lease
        self._on_turn = on_turn
        # The context of the conversation that has the floor.
        self._context = TokenContext(renderer)
        self._main = Conversation(self._context, lane=lane, floor=trio.Lock(), speak=self._turn_in)
        self._main_context = self._context
        self._log = CallLog(spec, attempt)
        self._passage = Passage(spec, gate, self._log)
        self._requests = 0
        self._turns = 0
        self._sampled = 0
        self._llm_s = 0.0
        self._lacking: str | None = None

    @property
    def tokenizer(self) -> str:
        """The tokenizer's name and digest."""
        return f"{self._renderer.tokenizer.name} sha256:{self._renderer.tokenizer.digest}"

    @property
    def renderer(self) -> str:
        """The renderer's name and version."""
        return self._renderer.name

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        """The tools the policy was offered in its main conversation."""
        return self._main_context.tools

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The branches of all conversations; several may still grow."""
        return self._context.branches

    @property
    def calls(self) -> tuple[CallRecord, ...]:
        """Every engine call whose tokens were taken; ``n`` is its place here."""
        return self._log.calls

    @property
    def transcript(self) -> tuple[Message, ...]:
        """The main conversation as people read it, as it stands now."""
        return self._main_context.transcript

    @property
    def turns(self) -> int:
        """Turns in which the policy spoke."""
        return self._turns

    @property
    def lacking(self) -> str | None:
        """The code of what the session waits for at the moment: an engine, or a place in a busy one."""
        return self._lacking or self._lease.lacking

    @property
    def llm_s(self) -> float:
        """Seconds spent in engine calls, failed ones and waits included."""
        return self._llm_s

    def token_counts(self) -> TokenCounts:
        """Tokens by origin, over all branches."""
        return self._context.counts()

    def backends_used(self) -> list[str]:
        """The engines that made tokens, in order of their first."""
        return self._log.backends()

    def versions_used(self) -> list[int]:
        """The policy versions that made tokens, rising."""
        return self._log.versions()

    async def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> None:
        """Open the conversation."""
        await self._main.start(messages, tools)

    async def observe(self, messages: Sequence[Message]) -> None:
        """Add what the environment answered to the last turn: user and tool messages, all at once."""
        await self._main.observe(messages)

    async def rewrite(self, messages: Sequence[Message], *, reason: Rewrite = "compaction") -> None:
        """Go on from another history, in a branch of its own; what was sampled so far stays in the old one."""
        await self._main.rewrite(messages, reason=reason)

    def sub_agent(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> AbstractAsyncContextManager[Model]:
        """A conversation that starts with ``messages`` and shares the budgets; over when the block is left."""
        return self._main.sub_agent(messages, tools)

    async def turn(self, *, max_tokens: int | None = None) -> Turn:
        """Let the policy speak. When no budget is left nothing is sampled and the turn is empty with ``stop`` set."""
        return await self._main.turn(max_tokens=max_tokens)

    async def _turn_in(self, context: TokenContext, max_tokens: int | None) -> Turn:
        """A turn of the conversation that has the floor."""
        self._context = context
        await trio.lowlevel.checkpoint()
        stop = self._used_up()
        if stop is not None:
            return Turn(content="", stop=stop)
        if context.has_spoken:
            raise HandlerError("the policy has spoken; observe or rewrite before its next turn")
        if max_tokens is not None and max_tokens < 1:
            raise HandlerError(f"a turn of {max_tokens} tokens is no turn")
        asked = self._spec.sampling.max_tokens if max_tokens is None else max_tokens
        speaking = _Speaking(min(asked, self._spec.sampling.max_tokens, self._tokens_left()))
        began, held = trio.current_time(), self._passage.held_s
        try:
            overflow = await self._speak(speaking)
        finally:
            self._llm_s += trio.current_time() - began - (self._passage.held_s - held)
            self._turns += bool(speaking.sampled)
        said = speaking.said or self._cut_off(speaking)
        turn = Turn(
            content=said.content,
            reasoning=said.reasoning,
            tool_calls=said.tool_calls,
            truncated=not speaking.stopped,
            sampled=speaking.sampled,
            stop=StopReason.CONTEXT_FULL if overflow else self._used_up(),
        )
        if speaking.sampled and self._on_turn is not None:
            self._on_turn(self._turns - 1, turn)
        return turn

    def under(self, allowance: Allowance) -> AbstractContextManager[None]:
        """In the block, what the session waits for because its policy is paused does not count against this."""
        return self._passage.under(allowance)

    def must_be_fresh(self) -> None:
        """``Stale`` when the policy has left behind what was sampled, by more than the job allows."""
        self._passage.must_be_fresh()

    def _cut_off(self, speaking: _Speaking) -> ParsedTurn:
        """What there is of a turn that was interrupted and finds no room to go on."""
        if not speaking.sampled:
            return ParsedTurn(content="", complete=False)
        said = _numbered(self._context.turn_with(()), self._turns - 1)
        self._context.end_turn(said.as_message())
        return said

    # --- budgets ---

    def _room(self) -> int:
        """Tokens that still fit into the context."""
        context = min(self._lease.capabilities.max_context_tokens, self._spec.agent.max_context_tokens)
        return context - len(self._context.current)

    def _tokens_left(self) -> int:
        return self._spec.agent.max_sampled_tokens - self._sampled

    def _used_up(self) -> StopReason | None:
        """The budget that allows no further turn."""
        if self._turns >= self._spec.agent.max_turns:
            return StopReason.MAX_TURNS
        if self._tokens_left() <= 0:
            return StopReason.MAX_TOKENS
        return StopReason.CONTEXT_FULL if self._room() < ROOM_MIN else None

    # --- calls ---

    async def _speak(self, speaking: _Speaking) -> bool:
        """Call until the turn has ended. Whether the engine found the context too long."""
        migrations = idle = 0
        while speaking.said is None:
            limit = min(speaking.left, self._room())
            if limit < 1:
                return True
            await self._passage.wait_open()
            self._passage.must_be_fresh()
            try:
                generation = await self._call(limit)
            except ContextOverflow:
                return True
            except EngineBusy:
                idle += 1
                await self._wait_for_engine(idle)
                continue
            except BackendError as exc:
                if not exc.may_retry or migrations >= MIGRATIONS_MAX:
                    raise
                migrations += 1
                with self._lacks(NoBackend.code):
                    await self._lease.migrate()
                continue
            if generation.token_ids:
                idle = 0
                self._take(generation, limit, speaking)
            else:
                idle += 1
                await self._wait_for_engine(idle)
        return False

    async def _wait_for_engine(self, times: int) -> None:
        """Longer each time, up to a bound, under the deadline of the stage; a paused policy is waited for elsewhere."""
        if not self._passage.is_open:
            return
        with self._lacks(EngineBusy.code):
            await trio.sleep(min(BUSY_WAIT_MAX_S, BUSY_WAIT_MIN_S * 2 ** min(times - 1, 10)))

    @contextmanager
    def _lacks(self, what: str) -> Iterator[None]:
        """Whoever ends the session meanwhile can see why; what ends by itself lacks nothing any more."""
        self._lacking = what
        yield
        self._lacking = None

    async def _call(self, limit: int) -> Generation:
        """One request. Its reply is checked against what was asked before it is believed."""
        spec = self._spec
        self._requests += 1
        request = GenerationRequest(
            token_ids=self._context.prompt(),
            max_tokens=limit,
            sampling=spec.sampling,
            stop_token_ids=self._renderer.stop_token_ids,
            request_id=f"{self._name}-{self._requests}",
            session=self._name,
            seed=self._log.next_seed,
            priority=spec.priority,
            view=ConversationView(self._renderer, self._context),
        )
        generation = await self._lease.generate(request, self._passage.door)
        check_generation(generation, limit)
        return generation

    def _take(self, generation: Generation, limit: int, speaking: _Speaking) -> None:
        """The one place where sampled tokens, their record and the budgets change, all or none."""
        context, n = self._context, len(self._log)
        sampled = len(generation.token_ids)
        ended = generation.finish != "abort" or sampled in {speaking.left, limit}
        said = _numbered(context.turn_with(generation.token_ids), self._turns) if ended else None
        backend = self._lease.backend_id
        record = self._log.record(generation, turn=self._turns, branch=context.current, backend=backend)
        context.append_generation(
            generation.token_ids,
            generation.logprobs,
            generation.versions,
            call=n,
            finish=generation.finish,
            said=None if said is None else said.as_message(),
        )
        self._log.add(record)
        self._sampled += sampled
        speaking.left -= sampled
        speaking.sampled += sampled
        speaking.said = said
        speaking.stopped = generation.finish == "stop"


class _Speaking:
    """A turn while it is being sampled."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.sampled = 0
        self.said: ParsedTurn | None = None
        self.stopped = False


def _numbered(said: ParsedTurn, turn: int) -> ParsedTurn:
    """Call ids that are unique in the rollout."""
    calls = tuple(
        msgspec.structs.replace(call, id=f"call_{turn}_{index}") for index, call in enumerate(said.tool_calls)
    )
    return msgspec.structs.replace(said, tool_calls=calls)
