"""The branches of a rollout: append-only, masked by origin, forked where a template can't go on."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.domain.branch import VersionSpan
from prorld.domain.job import TokenCounts
from prorld.domain.messages import Message, system, tool_result, user
from prorld.errors import HandlerError, RendererError
from prorld.tokens.context import TokenContext, clip
from prorld.tokens.jinja_renderer import JinjaRenderer
from tests.tokens.support import BASH, CHATML, THINKING, tiny

PLAIN = JinjaRenderer(tiny(CHATML))
THINKER = JinjaRenderer(tiny(THINKING))


def started(renderer: JinjaRenderer = PLAIN, *messages: Message, chars_max: int = 1000) -> TokenContext:
    """An open conversation."""
    context = TokenContext(renderer, observation_chars_max=chars_max)
    context.apply(context.plan_start(messages or [system("s"), user("go")], [BASH]), [BASH])
    return context


def observe(context: TokenContext, *messages: Message) -> None:
    """The environment answers."""
    context.apply(context.plan_bridge(messages) or context.plan_fork(messages))


def speak(context: TokenContext, text: str, *, call: int = 0, finish: str = "stop") -> list[int]:
    """The policy says something, in one call."""
    renderer = THINKER if "think" in text else PLAIN
    ids = renderer.tokenizer.encode(text)
    context.append_generation(
        ids,
        [-0.5] * len(ids),
        [VersionSpan(start=0, end=len(ids), version=3)],
        call=call,
        finish=finish,
        said=context.turn_with(ids).as_message(),
    )
    return ids


def test_tokens_only_grow_and_the_mask_says_who_made_them() -> None:
    """Prompt, sampled, glue and observation follow each other; only what was sampled has mask 1."""
    context = started()
    first = context.prompt()
    sampled = speak(context, "well<|im_end|>")
    observe(context, user("next"))
    second = context.prompt()
    assert second[: len(first) + len(sampled)].tolist() == [*first, *sampled]
    branch = context.current
    assert branch.mask == bytes(len(first)) + b"\x01" * len(sampled) + bytes(len(second) - len(first) - len(sampled))
    assert [segment.source for segment in branch.segments if segment.end > len(first)] == [
        "sampled",
        "glue",
        "observation",
        "glue",
    ]
    assert [message.role for message in context.transcript] == ["system", "user", "assistant", "user"]
    counts = context.counts()
    assert counts == TokenCounts(
        prompt=len(first), sampled=len(sampled), observed=len(second) - len(first) - len(sampled)
    )


def test_a_fork_that_comes_again_has_the_same_sources() -> None:
    """What a renderer remembers of one rollout's conversation changes nothing in the record of another's."""
    forks = []
    for _ in range(2):
        context = started(THINKER)
        speak(context, "<think>hm</think>well<|im_end|>")
        observe(context, user("again"))
        forks.append([(part.source, part.message, part.start, part.end) for part in context.branches[1].segments])
    assert forks[1] == forks[0]
    assert [message for source, message, *_ in forks[1] if source == "observation"] == [user("again")]


def test_a_refused_bridge_forks_and_keeps_both() -> None:
    """The child is rendered anew from the conversation, all mask 0; the parent keeps what was sampled."""
    context = started(THINKER)
    before = context.prompt()
    sampled = speak(context, "<think>hm</think>well<|im_end|>")
    observe(context, user("next"))
    parent, child = context.branches
    assert (child.parent, child.reason, child.index) == (0, "think_strip", 1)
    assert child.fork_at is not None
    assert child.ids[: child.fork_at] == parent.ids[: child.fork_at]
    assert child.ids[child.fork_at] != parent.ids[child.fork_at]
    assert not any(child.mask)
    assert (parent.sampled, child.sampled) == (len(sampled), 0)
    assert "hm" not in THINKER.tokenizer.decode(child.ids)
    assert context.prompt() == child.ids
    assert [segment.message for segment in child.segments if segment.source == "observation"] == [user("next")]
    assert context.counts().prompt == len(before)


def test_a_prompt_is_a_copy_and_must_begin_with_the_last_one() -> None:
    """Changing a prompt that was handed out changes nothing; a branch that changed is a bug that is seen."""
    context = started()
    prompt = context.prompt()
    prompt[0] = 99
    assert context.prompt()[0] != 99
    context.current.ids[0] = 99
    with pytest.raises(AssertionError, match="changed after they were sent"):
        context.prompt()


def test_order_is_kept() -> None:
    """Start once, then turns and observations in turn; the rest is a handler's mistake."""
    context = TokenContext(PLAIN)
    with pytest.raises(HandlerError, match="not been started"):
        context.prompt()
    with pytest.raises(HandlerError, match="at least one"):
        context.plan_start([], ())
    context.apply(context.plan_start([user("go")], ()))
    with pytest.raises(HandlerError, match="already"):
        context.apply(context.plan_start([user("go")], ()))
    with pytest.raises(HandlerError, match="after a turn"):
        context.plan_bridge([user("more")])
    speak(context, "well<|im_end|>")
    for wrong in ([], [Message(role="assistant", content="me")]):
        with pytest.raises(HandlerError, match="observation"):
            context.plan_bridge(wrong)
    observe(context, user("more"))
    with pytest.raises(HandlerError, match="after a turn"):
        context.plan_bridge([user("even more")])


def test_a_plan_that_fails_changes_nothing() -> None:
    """Where neither bridge nor full rendering is possible, the context is as it was and can be told something else."""
    renderer = JinjaRenderer(
        tiny(
            CHATML.replace(
                "message['content'] +",
                "(raise_exception('no') if 'bad' in message['content'] else message['content']) +",
            )
        )
    )
    context = started(renderer)
    speak(context, "well<|im_end|>")
    size = len(context.current)
    with pytest.raises(RendererError):
        observe(context, user("bad"))
    assert (len(context.branches), len(context.current), len(context.transcript)) == (1, size, 3)
    observe(context, user("good"))
    assert len(context.current) > size


def test_long_observations_are_cut_before_they_are_tokenized() -> None:
    """Head and tail stay, the record says what the policy saw; opening messages are left alone."""
    context = started(PLAIN, user("p" * 500), chars_max=20)
    assert context.transcript[0].content == "p" * 500
    speak(context, "well<|im_end|>")
    observe(context, tool_result("a" * 300 + "b" * 300, "c"))
    assert context.transcript[-1].content == "a" * 10 + "\n[... 580 characters left out ...]\n" + "b" * 10


@given(st.text(max_size=60), st.integers(1, 30))
def test_clipping_keeps_both_ends(text: str, chars_max: int) -> None:
    """A text that fits is the same object; another one keeps exactly the allowed number of its characters."""
    short = clip(text, chars_max)
    if len(text) <= chars_max:
        assert short is text
    else:
        head = chars_max // 2
        note = f"\n[... {len(text) - chars_max} characters left out ...]\n"
        assert short == text[:head] + note + text[len(text) - (chars_max - head) :]


def test_an_interrupted_turn_is_one_message() -> None:
    """Calls of a turn append to each other; the message comes with the last."""
    context = started()
    size = len(context.prompt())
    ids = PLAIN.tokenizer.encode("half")
    context.append_generation(ids, [-1.0] * 4, [VersionSpan(start=0, end=len(ids))], call=0, finish="abort", said=None)
    assert len(context.transcript) == 2
    assert context.prompt()[size:] == array("i", ids)
    speak(context, " done<|im_end|>", call=1)
    assert context.transcript[-1].content == "half done"
    assert [segment.calls for segment in context.current.segments if segment.source == "sampled"] == [[0], [1]]


STRICT = THINKING.replace(
    "{{- message.content }}",
    "{{- message.content.split('</think>')[-1].lstrip('\n') if '</think>' in message.content else message.content }}",
)


def test_markup_of_a_policy_does_not_end_its_rollout() -> None:
    """Where a template can't write a turn as it was said, the fork has it without markup, the old branch with it."""
    renderer = JinjaRenderer(tiny(STRICT))
    context = started(renderer)
    sampled = speak(context, "a</think>b</think>c<|im_end|>")
    observe(context, user("next"))
    parent, child = context.branches
    assert parent.sampled == len(sampled)
    assert "assistant\nabc<|im_end|>" in renderer.tokenizer.decode(child.ids)
    assert child.reason == "renderer_refused"


def test_markup_in_a_broken_call_does_not_end_its_rollout() -> None:
    """A call that was never closed is written in its own words, and those lose their markup as well."""
    renderer = JinjaRenderer(tiny(STRICT))
    context = started(renderer)
    speak(context, "a<tool_call>b</think>c<|im_end|>")
    observe(context, user("next"))
    assert "<tool_call>bc<|im_end|>" in renderer.tokenizer.decode(context.current.ids)


def test_sub_conversations_share_the_book() -> None:
    """Each grows its own branch, and tokens are counted over all of them."""
    context = started()
    speak(context, "well<|im_end|>")
    child = context.sub_context()
    assert not child.started
    child.apply(child.plan_start([system("s"), user("aside")], ()))
    speak(child, "hm<|im_end|>", call=1)
    size = len(child.current)
    observe(context, user("next"))
    assert (context.current.index, child.current.index, len(child.current)) == (0, 1, size)
    assert context.branches == child.branches
    assert child.transcript[-1].content == "hm"
    counts = context.counts()
    assert counts.prompt + counts.sampled + counts.observed == sum(map(len, context.branches))
    with pytest.raises(HandlerError, match="not been started"):
        TokenContext(PLAIN).sub_context()
    with pytest.raises(HandlerError, match="not been started"):
        TokenContext(PLAIN).plan_rewrite([user("x")], "compaction")
