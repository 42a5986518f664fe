"""The multi-turn, tool-using loop, and the rules by which an episode ends.

The loop never looks at tokens, never retries and never grades. Budgets are counted by the model; time by the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import trio

from prorld.agents.dialect import Act, Action, Answer, Dialect, Malformed, NativeCalls, Reply
from prorld.agents.observation import Observation, ToolFacts, clip, refusal
from prorld.agents.tools import Tool, find_tool
from prorld.domain.messages import Message
from prorld.domain.outcome import StopReason
from prorld.errors import HandlerError
from prorld.inference.contract import Model, Turn
from prorld.sandbox.contract import Sandbox

__all__ = [
    "CALLS_PER_TURN",
    "MALFORMED_TURNS",
    "TOOL_LIMIT_S",
    "AgentEnd",
    "OnTool",
    "OnUse",
    "ToolUse",
    "end_of_turn",
    "run_agent",
]

MALFORMED_TURNS = 3
TOOL_LIMIT_S = 60.0
# A turn that repeats one short call until its budget is gone must not keep a sandbox busy for hours.
CALLS_PER_TURN = 16

OnTool = Callable[[str, float], None]


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a tool, for those who watch. There are no ``facts``, and nothing was ``said``, where it raised."""

    tool: str
    seconds: float
    facts: ToolFacts | None = None
    arguments: Mapping[str, Any] = {}
    said: str = ""


OnUse = Callable[[ToolUse], None]


class AgentEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How the episode ended. ``answer`` is the last thing the policy said where it did not finish by itself."""

    stop: StopReason
    answer: str | None = None
    data: dict[str, Any] = {}


async def run_agent(
    model: Model,
    prompt: Sequence[Message],
    *,
    tools: Sequence[Tool] = (),
    sandbox: Sandbox | None = None,
    max_turns: int,
    dialect: Dialect | None = None,
    malformed_turns: int = MALFORMED_TURNS,
    tool_limit_s: float = TOOL_LIMIT_S,
    on_tool: OnTool | None = None,
    on_use: OnUse | None = None,
) -> AgentEnd:
    """Let the policy act until it finishes, runs out of something, or can't be understood again and again.

    "Again and again" is ``malformed_turns`` turns in a row in which nothing could be read; each gets a hint first.
    ``on_tool`` is told the name and the seconds of every tool call, whether it ended well or not; ``on_use`` is told
    what became of it, too.
    """
    speech = dialect or NativeCalls()
    bench = _Bench(tools, sandbox, tool_limit_s, on_tool, on_use)
    await model.start(prompt, [tool.schema for tool in tools] if speech.offers_schemas else ())
    said: str | None = None
    malformed = 0
    for number in range(1, max_turns + 1):
        turn = await model.turn()
        said = turn.content or said
        actions = speech.read(turn)
        match actions:
            case [Answer(text=text)]:
                stop = end_of_turn(turn)
                answer = text if stop is StopReason.FINISHED else said
                return AgentEnd(stop=stop, answer=answer, data=bench.data)
            case _:
                replies = await bench.act(actions)
        if bench.answer is not None:
            return AgentEnd(stop=StopReason.FINISHED, answer=bench.answer, data=bench.data)
        malformed = malformed + 1 if all(isinstance(action, Malformed) for action in actions) else 0
        if malformed >= malformed_turns:
            return AgentEnd(stop=StopReason.MALFORMED, answer=said, data=bench.data)
        if turn.stop is not None:
            return AgentEnd(stop=turn.stop, answer=said, data=bench.data)
        # After the last turn nobody would read the results.
        if number < max_turns:
            await model.observe(speech.say(replies))
    return AgentEnd(stop=StopReason.MAX_TURNS, answer=said, data=bench.data)


def end_of_turn(turn: Turn) -> StopReason:
    """Why an episode is over whose last turn calls nothing.

    A turn that was cut short, or in which nothing could be sampled, is no answer; one that ended by itself is, even
    where it used up the very last of a budget.
    """
    if turn.truncated or (turn.stop is not None and turn.sampled == 0):
        return turn.stop or StopReason.MAX_TOKENS
    return StopReason.FINISHED


class _Bench:
    """The tools of one episode, and what they left behind."""

    def __init__(
        self,
        tools: Sequence[Tool],
        sandbox: Sandbox | None,
        limit_s: float,
        on_tool: OnTool | None,
        on_use: OnUse | None,
    ) -> None:
        names = [tool.schema.name for tool in tools]
        if len(set(names)) != len(names):
            raise HandlerError(f"two tools have one name: {', '.join(sorted(names))}")
        if sandbox is None and any(tool.needs_sandbox for tool in tools):
            raise HandlerError("a tool needs a sandbox and the job has none")
        self._tools = tuple(tools)
        self._sandbox = sandbox
        self._limit_s = limit_s
        self._on_tool = on_tool
        self._on_use = on_use
        self.answer: str | None = None
        self.data: dict[str, Any] = {}

    async def act(self, actions: Sequence[Action]) -> list[Reply]:
        """Do what a turn asks for, in order; nothing after a call that finishes the episode."""
        if not actions:
            raise HandlerError("a dialect has to read something in every turn")
        replies: list[Reply] = []
        for position, action in enumerate(actions):
            match action:
                case Malformed(hint=hint):
                    replies.append(Reply(action=action, text=hint))
                case Act() if position >= CALLS_PER_TURN:
                    text = f"[not called: at most {CALLS_PER_TURN} calls are made in one turn]"
                    replies.append(Reply(action=action, text=text))
                case Act():
                    observation = await self._call(action)
                    self.data.update(observation.data)
                    if observation.finished:
                        self.answer = observation.text
                        return replies
                    replies.append(Reply(action=action, text=observation.text))
                case Answer():
                    raise HandlerError("a dialect may read a turn as one answer or as actions, not as both")
        return replies

    async def _call(self, act: Act) -> Observation:
        tool = find_tool(self._tools, act.tool)
        if tool is None:
            there = ", ".join(tool.schema.name for tool in self._tools) or "none"
            return refusal(f"[there is no tool named {clip(act.tool, 100)!r}; there are: {there}]", "unknown_tool")
        began = trio.current_time()
        facts: ToolFacts | None = None
        said = ""
        try:
            observation = await tool.call(act.arguments, self._sandbox, limit_s=self._limit_s)
            facts, said = observation.facts, observation.text
        finally:
            seconds = trio.current_time() - began
            if self._on_tool is not None:
                self._on_tool(tool.schema.name, seconds)
            if self._on_use is not None:
                use = ToolUse(tool=tool.schema.name, seconds=seconds, facts=facts, arguments=act.arguments, said=said)
                self._on_use(use)
        return observation
