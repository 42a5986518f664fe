"""The plays of handlers, said by an engine: in memory for each job, or by a scripted engine behind a whole daemon."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import trio

from prorld.domain.branch import labelled
from prorld.domain.job import AgentLimits
from prorld.domain.messages import Message
from prorld.handlers.base import AgentHandler
from prorld.handlers.play import EMPTY, GOLD, MALFORMED, Play
from prorld.handlers.registry import accept
from prorld.inference.contract import Generation, GenerationRequest, Turn
from prorld.testing.byte_tokenizer import IM_END, IM_START, byte_ids
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.scripted_engine.answers import as_text, find_play
from prorld.testing.scripted_engine.script import Script, ScriptedPlay, scripted_logprob
from prorld.tokens.parsers import parse_hermes

__all__ = ["CONTEXT_TOKENS", "TURN_TOKENS", "PlayingBackend", "check_plays", "play_of", "script_of", "turns_of"]

# The largest that a job may ask for: one token per byte takes many, and a play is no matter of budgets.
CONTEXT_TOKENS: Final = 10_000_000
TURN_TOKENS: Final = 1_000_000


class PlayingBackend(FakeBackend):
    """A ``Backend`` in memory that says to each job the turns it was given for it; the last one is said again."""

    def __init__(self, *, url: str = "fake://plays") -> None:
        super().__init__(Script(max_model_len=CONTEXT_TOKENS), url=url)
        self._turns: dict[str, list[array[int]]] = {}
        self._said: dict[str, int] = {}

    def learn(self, name: str, turns: Sequence[str]) -> None:
        """Say these turns in sessions of this name, whatever the attempt; ``ValueError`` for what can't be said."""
        learnt = [array("i", [*byte_ids(turn), IM_END]) for turn in turns]
        longest = max(map(len, learnt), default=0)
        if longest > TURN_TOKENS:
            raise ValueError(f"a turn of {longest} bytes can't be said; {TURN_TOKENS} are the most")
        self._turns[name] = learnt

    def forget(self, name: str) -> None:
        """The job has ended."""
        self._turns.pop(name, None)
        for session in [session for session in self._said if _name_of(session) == name]:
            del self._said[session]

    async def generate(self, request: GenerationRequest) -> Generation:
        """The next turn of the session; an empty one where nothing was learnt."""
        await trio.lowlevel.checkpoint()
        number = self._said.get(request.session, 0)
        self._said[request.session] = number + 1
        turns = self._turns.get(_name_of(request.session)) or [array("i", [IM_END])]
        ids = turns[min(number, len(turns) - 1)][: request.max_tokens]
        before = len(request.token_ids)
        stopped = ids[-1] == IM_END
        return Generation(
            token_ids=ids,
            logprobs=array("f", [scripted_logprob(token, before + at) for at, token in enumerate(ids)]),
            finish="stop" if stopped else "length",
            versions=(labelled(self.engine.label, 0, len(ids)),),
            versions_exact=True,
            stop_reason=IM_END if stopped else None,
            cached_tokens=0,
            engine_request_id=request.request_id,
        )


def _name_of(session: str) -> str:
    """A session is named by its job and the attempt."""
    return session.rpartition("-")[0]


def play_of(handler: AgentHandler[Any], instance: Mapping[str, Any], name: str) -> Play:
    """One play of a handler for an instance; ``ValueError`` where there is none of that name."""
    plays = handler.plays(accept(handler, instance, AgentLimits()))
    for play in plays:
        if play.name == name:
            return play
    there = ", ".join(play.name for play in plays)
    raise ValueError(f"{handler.name} has no play {name!r} for this instance; it has {there}")


def turns_of(turns: Sequence[str], tools: Collection[str]) -> list[Turn]:
    """What a session would make of these texts, for ``run_handler``: calls of the tools of these names are read."""
    found: list[Turn] = []
    for turn in turns:
        said = parse_hermes(turn, tools)
        found.append(
            Turn(content=said.content, reasoning=said.reasoning, tool_calls=said.tool_calls, sampled=len(turn) + 1)
        )
    return found


def check_plays(handler: AgentHandler[Any], instance: Mapping[str, Any]) -> list[Play]:
    """The plays of an instance; ``AssertionError`` says what is wrong with them."""
    decoded = accept(handler, instance, AgentLimits())
    plays = [*handler.plays(decoded)]
    for play in plays:
        assert isinstance(play, Play), f"{play!r} is no Play"
        try:
            again = msgspec.convert(msgspec.to_builtins(play), Play)
        except (msgspec.ValidationError, TypeError) as exc:
            raise AssertionError(f"the play {play.name!r} is not sound: {exc}") from exc
        assert again == play, f"the play {play.name!r} changes on its way through JSON"
        assert math.isfinite(play.reward), f"the reward of the play {play.name!r} is not finite"
        for turn in play.turns:
            assert _can_be_said(turn), f"the play {play.name!r} says what no policy can: {turn[:80]!r}"
    names = [play.name for play in plays]
    twice = sorted({name for name in names if names.count(name) > 1})
    assert not twice, f"two plays have one name: {', '.join(twice)}"
    lacking = sorted({EMPTY, MALFORMED} - set(names))
    assert not lacking, f"there is no play {', '.join(lacking)}; super().plays brings those that every task has"
    rewards = {play.name: play.reward for play in plays}
    assert rewards.get(GOLD, math.inf) > rewards[EMPTY], "the gold play is worth no more than the empty one"
    assert plays == [*handler.plays(decoded)], "the plays change"
    return plays


def _can_be_said(turn: str) -> bool:
    try:
        return len(turn.encode()) < TURN_TOKENS
    except UnicodeEncodeError:
        return False


def script_of(
    handler: AgentHandler[Any], instances: Sequence[Mapping[str, Any]], name: str, *, like: Script | None = None
) -> Script:
    """The script of an engine that says the play of that name to each of the instances, told apart by their prompts.

    ``ValueError`` where two prompts are the same to the policy and their plays differ. Everything else is ``like``.
    """
    openings = [[*handler.prompt(accept(handler, instance, AgentLimits()))] for instance in instances]
    texts = [_as_rendered(messages) for messages in openings]
    turns = [[*play_of(handler, instance, name).turns] for instance in instances]
    plays = [
        _play(messages, said, [other for other in texts if other != text])
        for messages, said, text in zip(openings, turns, texts, strict=True)
    ]
    marker = as_text(Script().marker)
    for number, (text, said) in enumerate(zip(texts, turns, strict=True)):
        found = find_play(plays, text, marker)
        if found is None or found[0].turns != said or found[1] != 0:
            other = "none" if found is None else str(plays.index(found[0]) + 1)
            raise ValueError(f"the prompts of instances {number + 1} and {other} can't be told apart by their texts")
    return msgspec.structs.replace(like or Script(), pick="play", plays=plays, max_model_len=CONTEXT_TOKENS)


def _play(messages: Sequence[Message], turns: list[str], others: Sequence[str]) -> ScriptedPlay:
    """With a message as its match that stands in no other prompt: the last such one, else the last one at all."""
    candidates = [*_candidates(messages)]
    for match, shown in candidates:
        needle = as_text(match.encode())
        if not any(needle in other for other in others):
            return ScriptedPlay(match=match, turns=turns, shown=shown)
    if not candidates:
        raise ValueError("a prompt without any text can't be told apart")
    return ScriptedPlay(match=candidates[0][0], turns=turns, shown=candidates[0][1])


def _candidates(messages: Sequence[Message]) -> Iterator[tuple[str, int]]:
    """What can be a match, from the last message to the first, and how many assistant's turns follow it."""
    shown = 0
    for message in reversed(messages):
        if message.role == "assistant":
            shown += 1
        elif message.content.strip():
            yield message.content.strip(), shown


def _as_rendered(messages: Sequence[Message]) -> str:
    """A prompt as a scripted engine gets it, but for what a template says of tools."""
    rendered = "".join(
        chr(IM_START) + message.role + "\n" + as_text(message.content.encode()) + chr(IM_END) + "\n"
        for message in messages
    )
    return rendered + chr(IM_START) + "assistant\n"
