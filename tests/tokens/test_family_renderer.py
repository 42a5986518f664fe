"""Family renderers: nothing that was sent or sampled changes, and no message becomes a control token."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from collections.abc import Sequence

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prorld.domain.messages import CallStatus, Message, ToolCall, ToolSchema, system, tool_result, user
from prorld.errors import RendererError
from prorld.tokens.family_renderer import FAMILIES, FamilyRenderer
from prorld.tokens.guard import MARK
from tests.tokens.families import TOKENS, byte_level, family
from tests.tokens.support import ASK, BASH, FOLLOW_UPS, control, ids

# Those whose templates have no words for tools.
TOOLLESS = {"deepseek-r1", "deepseek-v3"}
# Results that the package can't order without the calls, and a template for one call a turn.
REFUSED = {("deepseek-v4", "two tools"), ("llama-3", "two tools")}

hostile = st.lists(
    st.one_of(
        st.sampled_from(sorted({token for names in TOKENS.values() for token in names.split()})),
        st.sampled_from(["<|im_", "_end|>", "<", "｜>", "\ud800", MARK, "\ue0010", "\n", " ", '"', "\\ue000"]),
        st.text(max_size=4),
    ),
    max_size=8,
).map("".join)


def tools_of(name: str) -> list[ToolSchema]:
    """What a policy of the family is offered."""
    return [] if name in TOOLLESS else [BASH]


def spoken(renderer: FamilyRenderer, text: str, *, stop: bool = True) -> list[int]:
    """A turn as the policy samples it."""
    sampled = renderer.tokenizer.encode(text)
    return [*sampled, renderer.stop_token_ids[0]] if stop else sampled


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", FOLLOW_UPS)
def test_a_delta_follows_what_was_sampled(name: str, kind: str) -> None:
    """The messages stand in the delta, in order."""
    renderer, new = family(name), FOLLOW_UPS[kind]
    start = ids(renderer.render(ASK, tools_of(name)))
    for stop in (True, False):
        sampled = spoken(renderer, "</think>well", stop=stop)
        if (name, kind) in REFUSED:
            with pytest.raises(RendererError, match="can't go on"):
                renderer.bridge(start, sampled, new, tools_of(name))
            continue
        delta = renderer.bridge(array("i", start), array("i", sampled), new, tools_of(name))
        assert [part.message for part in delta if part.message] == new
        shown = renderer.tokenizer.decode(ids(delta))
        places = [shown.find(message.content) for message in new]
        assert places == sorted(places)
        assert places[0] >= 0


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(texts=st.lists(hostile, min_size=1, max_size=3), as_tools=st.booleans())
def test_observations_never_add_control_tokens(name: str, texts: list[str], as_tools: bool) -> None:
    """The control tokens of a delta are those of harmless texts, and its text is that of the messages."""
    renderer, tools = family(name), tools_of(name)
    start = ids(renderer.render(ASK, tools))
    sampled = spoken(renderer, "</think>well")

    def delta(said: Sequence[str]) -> list[int]:
        new = [tool_result(text, f"call_0_{at}") if as_tools else user(text) for at, text in enumerate(said)]
        return ids(renderer.bridge(start, sampled, new, tools))

    if as_tools and (name, "two tools") in REFUSED:
        texts = texts[:1]
    wild = delta(texts)
    assert control(renderer.tokenizer, wild) == control(
        renderer.tokenizer, delta(["x" * bool(text.strip()) for text in texts])
    )
    shown = renderer.tokenizer.decode(wild)
    for text in (text.encode("utf-8", "replace").decode().strip() for text in texts):
        assert text in shown or json.dumps(text, ensure_ascii=False)[1:-1] in shown


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(texts=st.lists(hostile.filter(str.strip), min_size=5, max_size=5))
def test_histories_never_add_control_tokens(name: str, texts: list[str]) -> None:
    """What is rendered whole is guarded, too: prompts, thoughts, names and arguments of calls."""
    renderer, tools = family(name), tools_of(name)

    def history(said: Sequence[str]) -> list[int]:
        rules, asked, thought, argument, result = said
        call = ToolCall(id="call_0_0", name="bash", arguments={"command": argument})
        called = Message(role="assistant", content="", reasoning=thought, tool_calls=[call])
        try:
            return ids(renderer.render([system(rules), user(asked), called, tool_result(result, "call_0_0")], tools))
        except RendererError:
            return []

    assert history("abcde")
    wild = history(texts)
    assert not wild or control(renderer.tokenizer, wild) == control(renderer.tokenizer, history("abcde"))


def test_it_is_logged_that_a_text_spelled_a_control_token() -> None:
    """Once for a call, at debug, and without the text."""
    renderer = family("qwen3")
    with structlog.testing.capture_logs() as logs:
        renderer.render([user("<|im_end|>"), user("<tool_call>"), user("calm")], ())
        renderer.render([user("calm <tool_ call>")], ())
    assert [(line["event"], line["log_level"], line["texts"]) for line in logs] == [("message.defused", "debug", 2)]


@pytest.mark.parametrize("name", ["glm-4.5", "glm-5"])
def test_a_stop_token_that_opens_the_next_turn_stays_sampled(name: str) -> None:
    """What the policy sampled is in the branch already; the delta does not say it again."""
    renderer = family(name)
    start = ids(renderer.render(ASK, [BASH]))
    opener = renderer.tokenizer.control_tokens["<|observation|>"]
    sampled = [*renderer.tokenizer.encode("</think>well"), opener]
    delta = ids(renderer.bridge(start, sampled, [tool_result("first", "c")], [BASH]))
    assert opener in renderer.stop_token_ids
    assert opener not in delta
    assert "first" in renderer.tokenizer.decode(delta)
    other = [*sampled[:-1], renderer.tokenizer.control_tokens["<|endoftext|>"]]
    assert ids(renderer.bridge(start, other, [tool_result("first", "c")], [BASH])).count(opener) == 1


def test_a_stop_in_the_midst_of_thoughts_is_refused() -> None:
    """A turn that was cut there goes on behind a closing; one that ended there can't be gone on from."""
    renderer = family("qwen3")
    start = ids(renderer.render(ASK, [BASH]))
    cut = renderer.bridge(start, spoken(renderer, "<think>\nhm", stop=False), [user("next")], [BASH])
    assert cut[0].message is None
    assert renderer.tokenizer.decode(cut[0].ids).startswith("</think><|im_end|>\n")
    with pytest.raises(RendererError, match="can't go on"):
        renderer.bridge(start, spoken(renderer, "<think>\nhm"), [user("next")], [BASH])


def test_results_that_follow_each_other_are_one_group() -> None:
    """One user turn holds them."""
    renderer = family("qwen3")
    start = ids(renderer.render(ASK, [BASH]))
    delta = renderer.tokenizer.decode(
        ids(renderer.bridge(start, spoken(renderer, "well"), FOLLOW_UPS["two tools"], [BASH]))
    )
    results = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in ("first", "second"))
    assert delta == f"\n<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\n"


def test_what_could_not_be_rendered_anew_is_refused() -> None:
    """Qwen3.5 bridges a system message but never renders one in between; a later fork would have nowhere to go."""
    renderer = family("qwen3.5")
    start = ids(renderer.render(ASK, ()))
    sampled = spoken(renderer, "</think>well")
    with pytest.raises(RendererError, match=r"can't go on with system\+user"):
        renderer.bridge(start, sampled, [system("more"), user("next")], ())
    assert renderer.bridge(start, sampled, [user("next")], ())


class Lying:
    """A library that does not keep what there is."""

    def __init__(self, renderer: FamilyRenderer, change) -> None:
        self._library, self._change = renderer._library, change

    def render(self, *args, **kwargs):
        """What the real one says."""
        return self._library.render(*args, **kwargs)

    def bridge_to_next_turn(self, *args, **kwargs):
        """What the real one says, changed."""
        rendered = self._library.bridge_to_next_turn(*args, **kwargs)
        self._change(rendered)
        return rendered


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda rendered: rendered.token_ids.__setitem__(0, 1), "changes what"),
        (lambda rendered: rendered.token_ids.pop(3), "changes what"),
        (lambda rendered: rendered.message_indices.pop(), "whose"),
        (lambda rendered: rendered.token_ids.__setitem__(slice(3), []), "changes what"),
        (lambda rendered: 1 / 0, "failed"),
    ],
)
def test_the_package_is_not_believed(change, why: str) -> None:
    """Every result is checked against what was sent and sampled, id for id."""
    tokenizer = family("qwen3").tokenizer
    renderer = FamilyRenderer(tokenizer, "qwen3")
    start = ids(renderer.render(ASK, [BASH]))
    renderer._library = Lying(renderer, change)
    with pytest.raises(RendererError, match=why):
        renderer.bridge(start, spoken(renderer, "well"), [user("next")], [BASH])


def test_what_the_policy_said_is_never_rendered_again() -> None:
    """An assistant message is no observation; nor is a schema that spells markup."""
    renderer = family("qwen3")
    with pytest.raises(RendererError, match="never rendered again"):
        renderer.bridge((), (), [Message(role="assistant", content="me")], ())
    bad = ToolSchema(name="x", description="</tool_call>", parameters={})
    with pytest.raises(RendererError, match="spells a control token"):
        renderer.render([user("x")], [bad])


@pytest.mark.parametrize("name", sorted(TOOLLESS))
def test_a_family_that_hides_tools_says_so(name: str) -> None:
    """Offering tools that the policy is never told of is an error, not a silence."""
    with pytest.raises(RendererError, match="choose the renderer jinja"):
        family(name).render(ASK, [BASH])


def test_a_family_that_does_not_fit_is_refused() -> None:
    """Unknown names, tokenizers without the tokens, variables that the family does not have."""
    with pytest.raises(RendererError, match="there is no family"):
        FamilyRenderer(byte_level(["<s>"]), "gpt-oss")
    family("qwen3")
    with pytest.raises(RendererError, match="making the renderer"):
        FamilyRenderer(byte_level(["<s>"]), "qwen3")
    tokenizer = byte_level(TOKENS["qwen3"].split())
    with pytest.raises(RendererError, match="no variable colour"):
        FamilyRenderer(tokenizer, "qwen3", chat_template_kwargs={"colour": 1})
    quiet = FamilyRenderer(tokenizer, "qwen3", chat_template_kwargs={"enable_thinking": False})
    assert quiet.name != family("qwen3").name
    assert ids(quiet.render(ASK, ())) != ids(family("qwen3").render(ASK, ()))


def call(body: str) -> str:
    """A call in the form of Qwen3."""
    return f"<tool_call>\n{body}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "statuses"),
    [
        (call('{"name": "bash", "arguments": {"command": "ls"}}'), ["ok"]),
        (call('{"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}'), ["ok"]),
        (call('{"name": "zsh", "arguments": {}}'), ["unknown_tool"]),
        (call('{"name": "bash", "arguments": [1]}'), ["malformed"]),
        (call('{"name": "bash", "arguments": {"command": NaN}}'), ["invalid_json"]),
        (call('{"arguments": {}}'), ["missing_name"]),
        (call('{"name": 7, "arguments": {}}'), ["missing_name"]),
        (call("{"), ["invalid_json"]),
        (call("[" * 100_000), ["invalid_json"]),
        (call("1" * 5000), ["invalid_json"]),
        ('<tool_call>{"name": "bash"', ["unclosed"]),
        (call("{}") + call('{"name": "bash", "arguments": {}}'), ["missing_name", "ok"]),
        ("no call", []),
    ],
)
def test_a_malformed_call_is_an_action_with_a_status(text: str, statuses: list[str]) -> None:
    """Each attempt is told as it stands; nothing raises, whatever the package makes of it."""
    renderer = family("qwen3")
    turn = renderer.parse((), spoken(renderer, f"<think>\nhm\n</think>\n\n{text}"), [BASH])
    assert [call.status.value for call in turn.tool_calls] == statuses
    assert (turn.reasoning, turn.complete) == ("hm", True)
    for made in turn.tool_calls:
        assert made.raw
        assert made.raw in text
    assert not turn.as_message().content.startswith("<think>")


def test_a_turn_is_read_with_its_prompt() -> None:
    """Thoughts that the prompt opened are thoughts; a turn that was cut is not complete."""
    renderer = family("qwen3.5")
    prompt = ids(renderer.render(ASK, ()))
    assert renderer.tokenizer.decode(prompt).endswith("<think>\n")
    turn = renderer.parse(prompt, spoken(renderer, "hm</think>well", stop=False), ())
    assert (turn.reasoning, turn.content, turn.complete) == ("hm", "well", False)


def test_bare_calls_of_llama_are_read() -> None:
    """JSON with ``parameters``, and nothing around it."""
    renderer = family("llama-3")
    turn = renderer.parse((), spoken(renderer, '{"name": "bash", "parameters": {"command": "ls"}}'), [BASH])
    assert [(made.name, made.arguments, made.status) for made in turn.tool_calls] == [
        ("bash", {"command": "ls"}, CallStatus.OK)
    ]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_parsing_never_raises(name: str, data: st.DataObject) -> None:
    """Any ids at all, stop tokens in the midst included."""
    renderer = family(name)
    text = st.lists(st.integers(0, 255 + len(TOKENS[name].split())), max_size=40)
    prompt, sampled = data.draw(text), data.draw(text)
    turn = renderer.parse(prompt, sampled, tools_of(name))
    assert turn.complete == (bool(sampled) and sampled[-1] in renderer.stop_token_ids)


@pytest.mark.slow
def test_the_package_is_imported_for_no_other() -> None:
    """Whoever imports prorld does not pay for it."""
    code = "import prorld.daemon, prorld.tokens.choice, sys; sys.exit('renderers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
