"""Plays said by engines: which one a prompt gets, how far it has come, and prompts that can't be told apart."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from prorld.domain.job import Sampling
from prorld.domain.messages import Message, system, user
from prorld.handlers import AgentHandler, Grade, JobContext, Play, RunResult
from prorld.inference.contract import GenerationRequest
from prorld.testing.byte_tokenizer import IM_END, byte_ids
from prorld.testing.plays import CONTEXT_TOKENS, TURN_TOKENS, PlayingBackend, play_of, script_of
from prorld.testing.scripted_engine.answers import Answerer
from prorld.testing.scripted_engine.script import Script, ScriptedPlay


class Word(msgspec.Struct, frozen=True, kw_only=True):
    word: str
    says: str = "nothing"


class Echo(AgentHandler[Word]):
    """Two worked examples, then the word."""

    name = "echo"
    instance_type = Word

    def prompt(self, instance: Word) -> Sequence[Message]:
        shown = [user("Say: a"), Message(role="assistant", content="a")] * 2
        return [system("Say it again."), *shown, user(f"Say: {instance.word}")]

    def plays(self, instance: Word) -> Sequence[Play]:
        return [*super().plays(instance), Play(name="gold", turns=(instance.word, instance.says), reward=1.0)]

    async def evaluate(self, job: JobContext[Word], result: RunResult) -> Grade:
        await trio.lowlevel.checkpoint()
        return Grade(reward=float(result.answer == job.instance.word))


class Hidden(Echo):
    """The word stands in the system message, before the worked examples."""

    def prompt(self, instance: Word) -> Sequence[Message]:
        shown = [user("Say: a"), Message(role="assistant", content="a")]
        return [system(f"The word is {instance.word}."), *shown, user("Say it.")]


def rendered(messages: Sequence[Message]) -> list[int]:
    """As the scripted policies' template has it; text of messages never is a control token."""
    ids: list[int] = []
    for message in messages:
        ids += [*byte_ids(f"<|im_start|>{message.role}\n"), *message.content.encode(), IM_END, *b"\n"]
    return [*ids, *byte_ids("<|im_start|>assistant\n")]


def answer(script: Script, messages: Sequence[Message]) -> str:
    """What is said next."""
    said = Answerer(script).tokens(rendered(messages), "s", "1")
    assert said[-1] == IM_END
    return bytes(said[:-1]).decode()


@pytest.mark.parametrize("handler", [Echo(), Hidden()])
def test_a_script_says_each_instance_its_play(handler: AgentHandler[Any]) -> None:
    """From the first turn on, whatever is shown in the prompt; the last turn is said again."""
    instances = [{"word": word, "says": word.upper()} for word in ("apple", "pear", "plum")]
    script = script_of(handler, instances, "gold")
    for instance in instances:
        talk = [*handler.prompt(Word(**instance))]
        for expected in (instance["word"], instance["says"], instance["says"]):
            assert answer(script, talk) == expected
            talk += [Message(role="assistant", content=expected), user("and? Say: plum")]


def test_what_comes_later_does_not_change_the_play() -> None:
    """A tool may show the text of another instance; the first match counts, and of two there the longer one."""
    script = script_of(Echo(), [{"word": "one"}, {"word": "one two"}], "gold")
    for word in ("one", "one two"):
        talk = [*Echo().prompt(Word(word=word))]
        assert answer(script, talk) == word
        talk += [Message(role="assistant", content=word), user("Say: one two. Say: one")]
        assert answer(script, talk) == "nothing"


def test_prompts_that_are_the_same_are_refused_unless_it_does_not_matter() -> None:
    """Two plays for one prompt can't both be said; one play for two instances can."""
    with pytest.raises(ValueError, match=r"instances 2 and 1 can't be told apart"):
        script_of(Echo(), [{"word": "one", "says": "a"}, {"word": "one", "says": "b"}], "gold")
    assert script_of(Echo(), [{"word": "one"}, {"word": "one"}], "empty").pick == "play"


def test_a_play_that_is_not_there_is_named() -> None:
    """With those that are."""
    with pytest.raises(ValueError, match=r"no play 'silver' .* it has empty, malformed, gold"):
        play_of(Echo(), {"word": "one"}, "silver")


def test_a_prompt_that_nothing_matches_gets_an_empty_turn() -> None:
    """And ends it."""
    script = Script(pick="play", plays=[ScriptedPlay(match="abc", turns=["x"])])
    assert answer(script, [user("ab c")]) == ""


def test_a_turn_that_was_interrupted_goes_on() -> None:
    """What was said of it is at the prompt's end."""
    script = Script(pick="play", plays=[ScriptedPlay(match="abc", turns=["hello"])])
    prompt = rendered([user("abc")])
    assert Answerer(script).tokens([*prompt, *b"he"], "s", "1") == [*b"llo", IM_END]
    assert Answerer(script).tokens([*prompt, *b"hex"], "s", "1") == [*b"hello", IM_END]


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=12), min_size=1, max_size=6, unique=True))
def test_any_words_get_their_own_play_or_are_refused(words: list[str]) -> None:
    """Never another one's."""
    instances = [{"word": word, "says": str(number)} for number, word in enumerate(words)]
    try:
        script = script_of(Echo(), instances, "gold")
    except ValueError:
        return
    for instance in instances:
        assert answer(script, [*Echo().prompt(Word(**instance))]).encode() == instance["word"].encode()


def request(session: str, max_tokens: int = TURN_TOKENS) -> GenerationRequest:
    return GenerationRequest(
        token_ids=array("i", byte_ids("hi")), max_tokens=max_tokens, sampling=Sampling(), stop_token_ids=(IM_END,),
        request_id="r", session=session,
    )  # fmt: skip


async def test_a_backend_says_to_each_job_what_it_learnt() -> None:
    """Anew in each attempt; a session that nothing was learnt for gets an empty turn, and so does one forgotten."""
    backend = PlayingBackend()
    backend.learn("t/a", ["one", "two"])
    backend.learn("t/b", ["three"])
    assert (await backend.probe()).max_context_tokens == CONTEXT_TOKENS
    said = [await backend.generate(request(session)) for session in ("t/a-1", "t/b-1", "t/a-1", "t/a-1", "t/a-2")]
    assert [bytes([*one.token_ids][:-1]) for one in said] == [b"one", b"three", b"two", b"two", b"one"]
    assert {one.finish for one in said} == {"stop"}
    backend.forget("t/a")
    assert [*(await backend.generate(request("t/a-1"))).token_ids] == [IM_END]
    assert (await backend.generate(request("t/b-1", 2))).finish == "length"


def test_a_turn_that_is_too_long_is_refused() -> None:
    """Before any of it is cut off."""
    with pytest.raises(ValueError, match="can't be said"):
        PlayingBackend().learn("t/a", ["x" * TURN_TOKENS])
