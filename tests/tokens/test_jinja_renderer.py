"""Rendering by chat templates: canonical, append-only, and closed to control tokens in messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from prorld.domain.messages import CallStatus, Message, ToolCall, ToolSchema, system, tool_result, user
from prorld.errors import RendererError, chain
from prorld.testing.byte_tokenizer import IM_END, byte_ids, write_byte_tokenizer
from prorld.tokens.contract import RenderedMessage
from prorld.tokens.jinja_renderer import JinjaRenderer
from prorld.tokens.junction import DUMMY, DUMMY_TOOL
from prorld.tokens.template import ChatTemplate
from prorld.tokens.tokenizer import HfTokenizer
from tests.tokens.support import BASH, CHATML, CONTROL, MARKUP, THINKING, control, ids, tiny, tiny_core

PLAIN = JinjaRenderer(tiny(CHATML))
THINKER = JinjaRenderer(tiny(THINKING))

hostile = st.lists(
    st.one_of(st.sampled_from([*CONTROL, *MARKUP, "\ue0000\ue001", "assistant\n"]), st.text(max_size=6))
).map("".join)


def shown(renderer: JinjaRenderer, rendered: Sequence[RenderedMessage]) -> str:
    """The text of all ids."""
    return renderer.tokenizer.decode(ids(rendered))


def said(text: str, *calls: ToolCall, reasoning: str | None = None) -> Message:
    """An assistant message."""
    return Message(role="assistant", content=text, reasoning=reasoning, tool_calls=list(calls))


def test_a_conversation_is_what_the_template_writes() -> None:
    """Ids are those of the template's text, whole, and end with the opening of the next turn."""
    rendered = PLAIN.render([system("be good"), user("hello chr\n"), said("all well"), user("who?")], ())
    text = "".join(
        f"<|im_start|>{role}\n{words}<|im_end|>\n"
        for role, words in (("system", "be good"), ("user", "hello chr\n"), ("assistant", "all well"), ("user", "who?"))
    )
    assert ids(rendered) == PLAIN.tokenizer.encode(text + "<|im_start|>assistant\n")
    assert [part.message.role for part in rendered if part.message] == ["system", "user", "assistant", "user"]


def test_an_opening_that_comes_again_is_the_same_and_nobody_else_s() -> None:
    """The rollouts of a group open alike; what one of them does to its ids does not reach the others."""
    messages = [Message(role="system", content="Add."), Message(role="user", content="1 and 1?")]
    renderer = JinjaRenderer(tiny(CHATML))
    first = renderer.render(messages, ())
    again = renderer.render(messages, ())
    assert again == first
    again[1].ids.clear()
    assert renderer.render(messages, ()) == first
    assert renderer.render(messages[1:], ()) != first
    assert renderer.render(messages, (BASH,)) != first


def test_what_a_template_says_of_the_time_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again; any other is asked once."""
    asked: list[str] = []
    render = ChatTemplate.render

    def counted(self: ChatTemplate, *args: Any, **kwargs: Any) -> str:
        asked.append(text := render(self, *args, **kwargs))
        return text

    messages = [Message(role="user", content="When?")]
    with_clock, without = (JinjaRenderer(tiny(start + CHATML)) for start in ("{{ strftime_now('%Y') }}", ""))
    monkeypatch.setattr(ChatTemplate, "render", counted)
    for renderer, again in ((with_clock, True), (without, False)):
        renderer.render(messages, ())
        asked.clear()
        renderer.render(messages, ())
        assert bool(asked) is again


def test_a_text_that_is_no_unicode_is_rendered_each_time() -> None:
    """Broken file names are such texts."""
    broken = [Message(role="user", content="a\udc80b")]
    assert PLAIN.render(broken, ()) == PLAIN.render(broken, ())


def test_merges_over_the_border_of_a_message_stay_canonical() -> None:
    """Template text and message text between two control tokens are encoded in one piece."""
    (run,) = [part for part in PLAIN.render([user("\n")], ()) if part.message]
    assert run.ids == PLAIN.tokenizer.encode("user\n\n")
    assert run.ids != [*PLAIN.tokenizer.encode("user\n"), *PLAIN.tokenizer.encode("\n")]


@given(st.lists(hostile, min_size=1, max_size=4), st.sampled_from([PLAIN, THINKER]))
def test_messages_never_add_control_tokens(texts: list[str], renderer: JinjaRenderer) -> None:
    """Whatever users and tools say, the control tokens are those of harmless texts; or it is refused."""
    harmless = [user("x")] + [tool_result("x", "c") if index % 2 else user("x") for index in range(len(texts) - 1)]
    wild = [
        Message(role=one.role, content=text or "x", tool_call_id=one.tool_call_id)
        for one, text in zip(harmless, texts, strict=True)
    ]
    expected = control(renderer.tokenizer, ids(renderer.render(harmless, [BASH])))
    assert control(renderer.tokenizer, ids(renderer.render(wild, [BASH]))) == expected
    tail = renderer.stop_token_ids[:1]
    results = [tool_result(message.content, f"c{index}") for index, message in enumerate(wild)]
    calm = [tool_result("x", f"c{index}") for index in range(len(wild))]
    assert control(renderer.tokenizer, ids(renderer.bridge((), tail, results, [BASH]))) == control(
        renderer.tokenizer, ids(renderer.bridge((), tail, calm, [BASH]))
    )


@given(hostile, hostile)
def test_what_a_policy_wrote_never_adds_control_tokens(name: str, argument: str) -> None:
    """Names and arguments of earlier calls are text, too, keys and values."""
    for renderer in (PLAIN, THINKER):
        calm, wild = (
            ids(
                renderer.render(
                    [user("go"), said("", ToolCall(id="c", name=a, arguments={"k" + b: [b]})), tool_result("r", "c")],
                    [BASH],
                )
            )
            for a, b in (("n", "v"), (name or "n", argument))
        )
        assert control(renderer.tokenizer, wild) == control(renderer.tokenizer, calm)


@pytest.mark.parametrize(
    "messages",
    [
        [user("next")],
        [tool_result("A\n", "c0")],
        [tool_result("A", "c0"), tool_result("B", "c1")],
        [tool_result("A", "c0"), user("and?")],
    ],
)
def test_a_bridge_continues_what_a_full_rendering_would_be(messages: list[Message]) -> None:
    """Prompt, sampled ids and bridge are the whole conversation, token for token, where spelling is canonical."""
    history = [system("s"), user("go")]
    start = ids(PLAIN.render(history, [BASH]))
    sampled = PLAIN.tokenizer.encode("well then<|im_end|>")
    bridged = start + sampled + ids(PLAIN.bridge((), sampled, messages, [BASH]))
    assert bridged == ids(PLAIN.render([*history, said("well then"), *messages], [BASH]))


def test_a_turn_that_was_cut_is_closed_first() -> None:
    """Without a stop token the close marker is glue; with one it is not written twice."""
    closed = PLAIN.bridge((), PLAIN.stop_token_ids[:1], [user("next")], ())
    cut = PLAIN.bridge((), PLAIN.tokenizer.encode("well"), [user("next")], ())
    assert ids(cut) == [PLAIN.stop_token_ids[0], *ids(closed)]
    assert cut[0].message is None
    assert shown(PLAIN, closed) == "\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n"
    other = JinjaRenderer(tiny(CHATML, eos="<|endoftext|>"))
    assert other.stop_token_ids == (other.tokenizer.token_id("<|im_end|>"), other.tokenizer.token_id("<|endoftext|>"))
    assert ids(other.bridge((), other.stop_token_ids[1:], [user("next")], ())) == ids(cut)


def test_results_that_follow_each_other_are_one_group() -> None:
    """In the template's form where it has one, in ours where it has none."""
    messages = [tool_result("A1", "c0"), tool_result("B2", "c1")]
    group = "<tool_response>\nA1\n</tool_response>\n<tool_response>\nB2\n</tool_response><|im_end|>\n"
    for renderer in (PLAIN, THINKER):
        text = shown(renderer, renderer.bridge((), renderer.stop_token_ids, messages, [BASH]))
        assert text == f"\n<|im_start|>user\n{group}<|im_start|>assistant\n"
        assert [part.message for part in renderer.bridge((), (), messages, [BASH]) if part.message] == messages


def test_a_template_without_tools_gets_ours() -> None:
    """Schemas go into the system message, calls and results into plain text, and calls are read back."""
    assert "tools=hermes" in PLAIN.name
    call = ToolCall(id="c", name="bash", arguments={"command": "ls"})
    text = shown(
        PLAIN, PLAIN.render([system("be good"), user("go"), said("hm", call), tool_result("a b", "c")], [BASH])
    )
    assert text.startswith("<|im_start|>system\nbe good\n\nYou can call")
    assert '"name": "bash", "description": "Run a command."' in text
    assert 'hm\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\na b\n</tool_response><|im_end|>" in text
    assert shown(PLAIN, PLAIN.render([user("go")], [BASH])).startswith("<|im_start|>system\nYou can call")
    parsed = PLAIN.parse(
        (), PLAIN.tokenizer.encode('<tool_call>{"name": "bash", "arguments": {}}</tool_call><|im_end|>'), [BASH]
    )
    assert [attempt.status for attempt in parsed.tool_calls] == [CallStatus.OK]


def test_a_template_with_tools_keeps_its_own() -> None:
    """A template that writes calls as we read them is left alone; its markup is made of its tokens."""
    assert "tools=template" in THINKER.name
    call = ToolCall(id="c", name="bash", arguments={"command": 'ls "é"\n'})
    rendered = THINKER.render([user("go"), said("hm", call, reasoning="why"), tool_result("r", "c")], [BASH])
    text = shown(THINKER, rendered)
    assert "<tools>" in text
    assert (
        '<think>\nwhy\n</think>\n\nhm\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls \\"é\\"\\n"}}' in text
    )
    assert THINKER.tokenizer.token_id("<tool_call>") in ids(rendered)


def test_a_template_that_forgets_thoughts_is_not_bridged_over_a_user_message() -> None:
    """It would have written the turn before differently, so nothing that follows it can be known."""
    assert ids(THINKER.bridge((), THINKER.stop_token_ids, [tool_result("r", "c")], [BASH]))
    for messages in ([user("next")], [tool_result("r", "c"), user("next")]):
        with pytest.raises(RendererError, match="can't go on"):
            THINKER.bridge((), THINKER.stop_token_ids, messages, [BASH])


NUMBERED = CHATML.replace("message['role'] + ", "message['role'] + loop.index | string + ")
SHOUTING = CHATML.replace("message['content']", "message['content'] | upper")
STRIPPING = CHATML.replace("message['content']", "message['content'] | trim")
CURIOUS = CHATML.replace("message['content']", "('!' if 'secret' in message['content'] else '') + message['content']")
ECHOING = CHATML.replace("message['content']", "message['content'] + messages[0]['content']")
FORGETFUL = CHATML.replace(
    "message['content']", "(message['content'] if message['role'] != 'tool' and loop.first else '')"
)


def test_a_template_that_counts_messages_is_refused() -> None:
    """Dummies of different lengths disagree on its delta."""
    with pytest.raises(RendererError, match="differently"):
        JinjaRenderer(tiny(NUMBERED)).bridge((), (), [user("next")], ())


REPEATING = CHATML.replace(
    "{{ '<|im_start|>'",
    "{% if messages[0]['role'] == 'system' and messages | length == 2 %}{{ raise_exception('no') }}{% endif %}"
    "{% if not loop.first and messages[loop.index0 - 1]['role'] == 'assistant' %}"
    "{{ messages[loop.index0 - 1]['content'] }}{% endif %}{{ '<|im_start|>'",
)


def test_a_template_that_repeats_the_policy_is_refused() -> None:
    """Dummies that agree on a delta which holds a text of theirs agree on nothing."""
    with pytest.raises(RendererError, match="repeats what was said"):
        JinjaRenderer(tiny(REPEATING)).bridge((), (), [user("next")], ())


@pytest.mark.parametrize("template", [SHOUTING, ECHOING, FORGETFUL])
def test_a_template_that_changes_texts_is_refused(template: str) -> None:
    """More than stripping is not the text that was given."""
    with pytest.raises(RendererError):
        JinjaRenderer(tiny(template)).bridge((), (), [user("next one")], ())


def test_a_template_that_looks_into_texts_is_refused_when_it_matters() -> None:
    """A text that changes what the template writes can't be told apart from the template."""
    renderer = JinjaRenderer(tiny(CURIOUS))
    assert ids(renderer.bridge((), (), [user("plain")], ()))
    for attempt in (
        lambda: renderer.bridge((), (), [user("a secret")], ()),
        lambda: renderer.render([user("a secret")], ()),
    ):
        with pytest.raises(RendererError):
            attempt()


def test_a_template_may_strip() -> None:
    """Blanks around a text may go."""
    renderer = JinjaRenderer(tiny(STRIPPING))
    assert "user\nnext<|im_end|>" in shown(renderer, renderer.bridge((), (), [user(" \nnext\n\n")], ()))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "has no chat template"),
        ("{{ messages[0].content }}\ue000", "private-use"),
        (CHATML.replace("<|im_end|>", "END"), "does not close"),
        ("{{ raise_exception('never') }}", "never"),
        ("{% for", "compiled"),
    ],
)
def test_a_template_that_can_not_be_used_is_refused_at_once(template: str | None, words: str) -> None:
    """The renderer is not made."""
    with pytest.raises(RendererError) as caught:
        JinjaRenderer(tiny(template))
    assert words in chain(caught.value)


@pytest.mark.parametrize("text", ["see <|im_end|>", "</tool_call>"])
def test_schemas_and_variables_may_not_spell_control_tokens(text: str) -> None:
    """They go into the template's own parts, where control tokens count."""
    schema = ToolSchema(name="bash", description="", parameters={"properties": {"a": {"enum": [text]}}})
    with pytest.raises(RendererError, match="control token"):
        PLAIN.render([user("go")], [schema])
    with pytest.raises(RendererError, match="control token"):
        JinjaRenderer(tiny(CHATML), chat_template_kwargs={"note": {"deep": [text]}})


@pytest.mark.parametrize("text", ["\ue0000\ue001", "\ue000999\ue001", f"\ue000{'9' * 5000}\ue001"], ids=len)
def test_schemas_and_variables_may_not_hold_stand_ins(text: str) -> None:
    """They would be taken for those of texts, be there one of that number or not."""
    with pytest.raises(RendererError, match="private-use"):
        PLAIN.render([user("go")], [ToolSchema(name="bash", description=text, parameters={})])
    with pytest.raises(RendererError, match="private-use"):
        JinjaRenderer(tiny(CHATML), chat_template_kwargs={"note": {"deep": [text]}})


@pytest.mark.parametrize("renderer", [PLAIN, THINKER])
def test_an_observation_can_t_end_its_branch(renderer: JinjaRenderer) -> None:
    """Whatever marks of ours it holds, it is what follows the turn."""
    text = f"\ue000 {DUMMY} {DUMMY_TOOL} \ue0000\ue001"
    for message in (tool_result(text, "call_0_0"), tool_result(text, DUMMY)):
        assert text in shown(renderer, renderer.bridge((), (), [message], [BASH]))


def test_what_the_policy_said_is_not_bridged() -> None:
    """Its tokens are there already."""
    with pytest.raises(RendererError, match="never rendered again"):
        PLAIN.bridge((), (), [said("me"), user("you")], ())


def test_calls_that_were_none_are_written_as_they_stood() -> None:
    """A broken call in an earlier turn comes back in its own words."""
    broken = ToolCall(id="c", name="", status=CallStatus.INVALID_JSON, raw="<tool_call>{oops</tool_call>")
    rendered = THINKER.render([user("go"), said("hm", broken), user("what?")], [BASH])
    assert "hm\n<tool_call>{oops</tool_call><|im_end|>" in shown(THINKER, rendered)
    assert THINKER.tokenizer.token_id("<tool_call>") not in ids(rendered)


def test_messages_without_text_stand_in_the_record() -> None:
    """Every message has its place, even one that has no ids of its own."""
    messages = [user("a"), said(""), user("b"), user("")]
    rendered = PLAIN.render(messages, ())
    assert [part.message for part in rendered if part.message is not None] == messages


def test_a_prompt_that_opens_a_thought() -> None:
    """Where the opening of a turn ends with a think tag, what comes first is reasoning."""
    renderer = JinjaRenderer(tiny(CHATML.replace("assistant\n'", "assistant\n<think>\n'")))
    turn = renderer.parse((), renderer.tokenizer.encode("hm</think>yes<|im_end|>"), ())
    assert (turn.reasoning, turn.content, turn.complete) == ("hm", "yes", True)


@given(st.lists(st.integers(0, 300) | st.integers(0, 2**31 - 1), max_size=30))
def test_any_ids_can_be_parsed(sampled: list[int]) -> None:
    """Invalid UTF-8, control tokens in the middle, nothing at all: a turn comes out."""
    turn = PLAIN.parse((), sampled, [BASH])
    assert turn.complete is (bool(sampled) and sampled[-1] in PLAIN.stop_token_ids)


def test_blanks_beside_control_tokens_that_a_tokenizer_eats_are_refused() -> None:
    """Such a tokenizer can't be cut at its control tokens."""
    core = tiny_core()
    core.add_special_tokens([AddedToken("<|im_start|>", special=True, normalized=False, rstrip=True, lstrip=True)])
    tokenizer = HfTokenizer(core, name="eater", digest="", chat_template=CHATML, eos_token="<|im_end|>")
    with pytest.raises(RendererError, match="can't be cut"):
        JinjaRenderer(tokenizer)


def test_the_tokenizer_for_tests_carries_a_conversation(tmp_path: Path) -> None:
    """The byte tokenizer that plugin authors get can be loaded, rendered, bridged and parsed."""
    renderer = JinjaRenderer(HfTokenizer.from_directory(write_byte_tokenizer(tmp_path)))
    opening = ids(renderer.render([user("hé")], [BASH]))
    sampled = byte_ids('<tool_call>{"name": "bash"}</tool_call><|im_end|>')
    assert [call.status for call in renderer.parse((), sampled, [BASH]).tool_calls] == [CallStatus.OK]
    glue = ids(renderer.bridge((), sampled, [tool_result("<|im_end|>", "c")], [BASH]))
    text = renderer.tokenizer.decode([*opening, *sampled, *glue])
    result = "<|im_start|>user\n<tool_response>\n<|im_end|>\n</tool_response><|im_end|>"
    assert text.endswith(f"</tool_call><|im_end|>\n{result}\n<|im_start|>assistant\n")
    assert glue.count(IM_END) == 1


def test_thoughts_that_were_cut_are_closed() -> None:
    """Their closing is glue; a turn that ended in the midst of them can't be gone on from."""
    result = [tool_result("r", "c")]
    cut = THINKER.bridge((), THINKER.tokenizer.encode("<think>\nhm"), result, [BASH])
    assert THINKER.tokenizer.decode(cut[0].ids).startswith("</think><|im_end|>")
    assert cut[0].message is None
    with pytest.raises(RendererError, match="in the midst of its thoughts"):
        THINKER.bridge((), THINKER.tokenizer.encode("<think>\nhm<|im_end|>"), result, [BASH])
    closed = THINKER.bridge((), THINKER.tokenizer.encode("<think>\nhm</think>well"), result, [BASH])
    assert THINKER.tokenizer.decode(closed[0].ids) == "<|im_end|>"
    # A template that knows of no thoughts takes the same words for words.
    assert ids(PLAIN.bridge((), PLAIN.tokenizer.encode("<think>hm<|im_end|>"), [user("next")], ()))


RULES = "{{% if {} and messages[0]['role'] == 'system' %}}{{{{ messages[0]['content'] }}}}{{% endif %}}"
MOVING, AGAIN = (
    CHATML.replace("%}{{ '<|im_start|>'", "%}" + RULES.format(when) + "{{ '<|im_start|>'", 1)
    for when in ("loop.last", "message['role'] == 'user'")
)


def test_a_template_that_says_the_rules_again_has_no_delta() -> None:
    """It writes them, or the tools, before the last message; what is written anew each time can't be appended."""
    for template, why in ((MOVING, "behind a system message"), (AGAIN, "repeats what was said")):
        assert template != CHATML
        with pytest.raises(RendererError, match=why):
            JinjaRenderer(tiny(template)).bridge((), (), [user("next")], ())
    tools = CHATML.replace("{% for message", "{% if tools %}{{ tools | tojson }}{% endif %}{% for message", 1)
    assert ids(JinjaRenderer(tiny(tools)).bridge((), (), [user("next")], [BASH]))
