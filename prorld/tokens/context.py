"""The branches of one rollout: conversations whose tokens only grow.

It owns which tokens come next and never talks to an engine. Planning is pure and may run in a thread; applying a plan
is quick and happens in the rollout's task. What has been handed out as a prompt is checked to begin the next one.

A conversation grows one branch at a time. A fork leaves the old branch as it is, for good; the branches of a sub-agent
belong to a conversation of its own, so the one that asked it goes on growing afterwards. The book holds them all.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from prorld.domain.branch import Branch, ForkReason, Rewrite, Source, VersionSpan
from prorld.domain.job import TokenCounts
from prorld.domain.messages import CallStatus, Message, ToolSchema
from prorld.errors import HandlerError, RendererError
from prorld.tokens.contract import ParsedTurn, RenderedMessage, Renderer

__all__ = ["OBSERVATION_CHARS_MAX", "BranchBook", "Plan", "TokenContext", "clip"]

# Per message. A tool cuts its own output to less; this holds for any handler.
OBSERVATION_CHARS_MAX = 64 * 1024

_THINK_MARKUP = re.compile(r"</?think>")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that are ready to be appended, and the messages they stand for. ``reason`` is that of a fork."""

    kind: Literal["start", "bridge", "fork", "rewrite"]
    rendered: list[RenderedMessage]
    messages: list[Message]
    reason: ForkReason | None = None


class BranchBook:
    """Every branch of one rollout, in the order they came up."""

    def __init__(self) -> None:
        self._branches: list[Branch] = []

    @property
    def branches(self) -> tuple[Branch, ...]:
        """Every branch in the order they came up."""
        return tuple(self._branches)

    def open(self, ids: Sequence[int], *, parent: Branch | None = None, reason: ForkReason | None = None) -> Branch:
        """A new branch, still empty, that will begin with ``ids``; it forks where its parent says something else."""
        index = len(self._branches)
        if parent is None:
            branch = Branch(index)
        else:
            branch = Branch(index, parent=parent.index, fork_at=_common(parent.ids, ids), reason=reason)
        self._branches.append(branch)
        return branch

    def counts(self) -> TokenCounts:
        """Tokens by origin. What a fork renders again counts once, in the branch it came from."""
        prompt = sampled = observed = 0
        for branch in self._branches:
            sampled += branch.sampled
            opens = branch.parent is None or branch.reason == "sub_agent"
            for segment in branch.segments:
                size = segment.end - segment.start
                if segment.source in ("observation", "glue"):
                    observed += size
                elif segment.source == "prompt" and opens:
                    prompt += size
        return TokenCounts(prompt=prompt, sampled=sampled, observed=observed)


class TokenContext:
    """One conversation and the branch that it grows at the moment.

    ``book`` is shared by the conversations of a rollout; ``asker`` is the conversation that asked this one.
    """

    def __init__(
        self,
        renderer: Renderer,
        *,
        observation_chars_max: int = OBSERVATION_CHARS_MAX,
        book: BranchBook | None = None,
        asker: TokenContext | None = None,
    ) -> None:
        self._renderer = renderer
        self._observation_chars_max = observation_chars_max
        self._book = book or BranchBook()
        self._asker = asker
        self._branch: Branch | None = None
        self._transcript: list[Message] = []
        self._tools: tuple[ToolSchema, ...] = ()
        self._turn_ids = array("i")
        self._awaits_observation = False
        self._has_spoken = False
        self._sent: tuple[int, bytes] | None = None

    @property
    def branches(self) -> tuple[Branch, ...]:
        """Every branch of the rollout in the order they came up, those of other conversations included."""
        return self._book.branches

    @property
    def current(self) -> Branch:
        """The branch that grows."""
        if self._branch is None:
            raise HandlerError("the conversation has not been started")
        return self._branch

    @property
    def started(self) -> bool:
        """Whether there is a conversation."""
        return self._branch is not None

    @property
    def has_spoken(self) -> bool:
        """Whether the policy's turn is over, so that somebody else has to say something."""
        return self._has_spoken

    @property
    def transcript(self) -> tuple[Message, ...]:
        """The conversation as people read it."""
        return tuple(self._transcript)

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        """The tools the policy was offered."""
        return self._tools

    def plan_start(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Plan:
        """The opening of the conversation. Pure."""
        if not messages:
            raise HandlerError("a conversation opens with at least one message")
        return Plan(kind="start", rendered=self._renderer.render(messages, tools), messages=list(messages))

    def sub_context(self) -> TokenContext:
        """A conversation that this one asks; its first branch is a child of the one that grows here by then."""
        if self._branch is None:
            raise HandlerError("the conversation has not been started")
        return TokenContext(
            self._renderer, observation_chars_max=self._observation_chars_max, book=self._book, asker=self
        )

    def plan_bridge(self, messages: Sequence[Message]) -> Plan | None:
        """What follows the policy's turn, as a delta; ``None`` where the template does not allow it. Pure."""
        said = self._observed(messages)
        try:
            rendered = self._renderer.bridge(self._prompt_of_turn(), self._turn_ids, said, self._tools)
        except RendererError:
            return None
        return Plan(kind="bridge", rendered=rendered, messages=said)

    def plan_fork(self, messages: Sequence[Message]) -> Plan:
        """A new branch from the conversation so far and what follows the turn. Pure, and slow for a long one."""
        said = self._observed(messages)
        rendered = self._rendered_anew([*self._transcript, *said])
        reason: ForkReason = "think_strip" if self._loses_reasoning(rendered) else "renderer_refused"
        return Plan(kind="fork", rendered=rendered, messages=said, reason=reason)

    def plan_rewrite(self, messages: Sequence[Message], reason: Rewrite) -> Plan:
        """A new branch from another history. Pure, and slow for a long one."""
        if not self.started:
            raise HandlerError("the conversation has not been started")
        if reason not in get_args(Rewrite):
            raise HandlerError(f"a history is rewritten for {' or '.join(get_args(Rewrite))}, not {reason!r}")
        if not messages or messages[-1].role == "assistant":
            raise HandlerError("a history ends with a message that the policy answers")
        rendered = self._renderer.render(messages, self._tools)
        return Plan(kind="rewrite", rendered=rendered, messages=list(messages), reason=reason)

    def apply(self, plan: Plan, tools: Sequence[ToolSchema] = ()) -> None:
        """Grow by a plan made from the state as it is now."""
        if plan.kind == "start":
            self._start(plan, tools)
        elif plan.kind == "bridge":
            for part in plan.rendered:
                self.current.append_given(part.ids, "glue" if part.message is None else "observation", part.message)
        else:
            self._fork(plan)
        if plan.kind == "rewrite":
            self._transcript.clear()
        self._transcript.extend(plan.messages)
        self._turn_ids = array("i")
        self._awaits_observation = self._has_spoken = False

    def prompt(self) -> array[int]:
        """The tokens to send now, a copy. Checked to begin with what was sent of this branch before."""
        branch = self.current
        ids = branch.ids[:]
        raw = ids.tobytes()
        if self._sent is not None and self._sent[0] == branch.index and not raw.startswith(self._sent[1]):
            raise AssertionError(f"tokens of branch {branch.index} changed after they were sent")
        self._sent = (branch.index, raw)
        return ids

    def turn_with(self, ids: Sequence[int]) -> ParsedTurn:
        """What the policy will have said in this turn once ``ids`` are appended to it."""
        return self._renderer.parse(self._prompt_of_turn(), [*self._turn_ids, *ids], self._tools)

    def append_generation(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        spans: Sequence[VersionSpan],
        *,
        call: int,
        finish: str,
        said: Message | None,
    ) -> None:
        """Grow by one engine call. ``said`` is the whole turn's message with its last call, else ``None``."""
        self.current.append_sampled(ids, logprobs, spans, calls=[call], message=said, finish_reason=finish)
        self._turn_ids.extend(ids)
        self._awaits_observation = True
        if said is not None:
            self.end_turn(said)

    def end_turn(self, said: Message) -> None:
        """Put a turn into the transcript. With a last call that could not know that it was the last, later."""
        self._transcript.append(said)
        self._has_spoken = True

    def end_cut_turn(self) -> None:
        """A turn that was left in the middle, and that is not gone on with, is what there is of it."""
        if self._turn_ids and not self._has_spoken:
            self.end_turn(self.turn_with(()).as_message())

    def counts(self) -> TokenCounts:
        """Tokens by origin, over all branches of the rollout."""
        return self._book.counts()

    def _prompt_of_turn(self) -> array[int]:
        """What the turn that is being sampled, or was sampled last, goes on from."""
        return self.current.ids[: len(self.current) - len(self._turn_ids)]

    def _start(self, plan: Plan, tools: Sequence[ToolSchema]) -> None:
        if self.started:
            raise HandlerError("the conversation has been started already")
        self._tools = tuple(tools)
        if self._asker is None:
            self._branch = self._book.open(())
        else:
            self._branch = self._book.open(_ids(plan), parent=self._asker.current, reason="sub_agent")
        self._append_prompt(self._branch, plan)

    def _fork(self, plan: Plan) -> None:
        known = self._transcript if plan.kind == "rewrite" else ()
        self._branch = self._book.open(_ids(plan), parent=self.current, reason=plan.reason)
        self._append_prompt(self._branch, plan, new=[message for message in plan.messages if message not in known])

    def _rendered_anew(self, messages: list[Message]) -> list[RenderedMessage]:
        """The whole conversation; a turn whose markup no template would write gives it up rather than the rollout."""
        try:
            return self._renderer.render(messages, self._tools)
        except RendererError:
            plain = [_without_markup(message) for message in messages]
            if plain == messages:
                raise
            return self._renderer.render(plain, self._tools)

    def _loses_reasoning(self, rendered: Sequence[RenderedMessage]) -> bool:
        """Whether the branch holds thoughts that a fresh rendering leaves out."""
        thoughts = [message.reasoning for message in self._transcript if message.reasoning]
        if not thoughts:
            return False
        decode = self._renderer.tokenizer.decode
        fresh = decode([token for part in rendered for token in part.ids])
        lost = [thought for thought in thoughts if thought not in fresh]
        if not lost:
            return False
        held = decode(self.current.ids)
        return any(thought in held for thought in lost)

    def _append_prompt(self, branch: Branch, plan: Plan, new: Sequence[Message] = ()) -> None:
        for part in plan.rendered:
            is_new = any(part.message is message for message in new)
            source: Source = "observation" if is_new else "prompt"
            branch.append_given(part.ids, source, part.message)

    def _observed(self, messages: Sequence[Message]) -> list[Message]:
        if not self._awaits_observation:
            raise HandlerError("messages come after a turn of the policy, all of them at once")
        if not messages or any(message.role == "assistant" for message in messages):
            raise HandlerError("an observation is one or more messages that the policy did not write")
        return [self._clipped(message) for message in messages]

    def _clipped(self, message: Message) -> Message:
        text = clip(message.content, self._observation_chars_max)
        return message if text is message.content else msgspec.structs.replace(message, content=text)


def _ids(plan: Plan) -> list[int]:
    return [token for part in plan.rendered for token in part.ids]


def _without_markup(message: Message) -> Message:
    if message.role != "assistant":
        return message
    texts = (message.content, message.reasoning or "")
    content, reasoning = ("".join(_THINK_MARKUP.split(text)).strip() for text in texts)
    # A call that was no call is written in its own words, so these count, too.
    calls = [
        call
        if call.status is CallStatus.OK
        else msgspec.structs.replace(call, raw="".join(_THINK_MARKUP.split(call.raw)).strip())
        for call in message.tool_calls
    ]
    return msgspec.structs.replace(message, content=content, reasoning=reasoning or None, tool_calls=calls)


def clip(text: str, chars_max: int) -> str:
    """The head and the tail of a text that is too long, and between them how much was left out."""
    if len(text) <= chars_max:
        return text
    note = f"\n[... {len(text) - chars_max} characters left out ...]\n"
    head = chars_max // 2
    return text[:head] + note + text[len(text) - (chars_max - head) :]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two branches begin with in common."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))
