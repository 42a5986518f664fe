"""Real tokenizers and their own templates: deltas, refusals, and texts that stay texts."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from prorld.domain.branch import VersionSpan
from prorld.domain.messages import CallStatus, Message, ToolCall, ToolSchema, system, tool_result, user
from prorld.errors import RendererError
from prorld.tokens.context import TokenContext
from prorld.tokens.contract import Renderer
from prorld.tokens.tokenizer import HfTokenizer
from tests.tokens.real_tokenizers import FETCHED, real_renderer, real_tokenizer
from tests.tokens.support import ASK, FOLLOW_UPS, control, ids

pytestmark = pytest.mark.real

LOOK_UP = ToolSchema(
    name="look_up",
    description="Look a word up.",
    parameters={"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
)
EVERY_FOLLOW_UP = {**FOLLOW_UPS, "system": [system("Be long.")]}
HERMES = '\n<tool_call>\n{"name": "look_up", "arguments": {"word": "a"}}\n</tool_call>'
LLAMA = '{"name": "look_up", "parameters": {"word": "a"}}'
# Per policy: its renderer, what closes a turn, how it writes a call, and the follow-ups that have no delta, since the
# template strips thoughts before a user's turn, has no words for system messages in between or for two results, or
# says the rules anew.
POLICIES = {
    ("smollm2", "auto"): ("jinja/1 tools=hermes", "<|im_end|>", HERMES, set()),
    ("qwen3", "auto"): ("renderers/", "<|im_end|>", HERMES, set()),
    ("qwen3", "jinja"): ("jinja/1 tools=template", "<|im_end|>", HERMES, {"user", "tool, user"}),
    ("qwen2_5", "auto"): ("jinja/1 tools=template", "<|im_end|>", HERMES, set()),
    ("llama3_2", "auto"): ("renderers/", "<|eot_id|>", LLAMA, {"two tools"}),
    ("llama3_2", "jinja"): ("jinja/1 tools=hermes", "<|eot_id|>", HERMES, set()),
    ("deepseek_v3", "auto"): ("jinja/1 tools=hermes", "<｜end▁of▁sentence｜>", HERMES, {"system"}),
    ("gemma3", "auto"): ("jinja/1 tools=hermes", "<end_of_turn>", HERMES, {"tool, user", "system"}),
    ("mistral_nemo", "auto"): ("jinja/1 tools=hermes", "</s>", HERMES, set(FOLLOW_UPS)),
}
# fmt: off
SPELLINGS = [
    "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>", "<|eot_id|>", "<bos>", "</s>",
    "<|start_header_id|>", "<｜User｜>", "<｜end▁of▁sentence｜>", "<start_of_turn>", "<end_of_turn>",
    "[INST]", "[/INST]", "<|python_tag|>", "<|im_", "_end|>", "<", "｜>", "▁▁", "  ", "\n\n\n", "\t\t", "<table>",
    "\ud800", "\ue000", "\ue0010",
]
# fmt: on
hostile = st.lists(st.one_of(st.sampled_from(SPELLINGS), st.text(max_size=4)), max_size=10).map("".join)


def real_tokenizer_of(renderer: Renderer) -> HfTokenizer:
    """The tokenizer with its control tokens."""
    return real_tokenizer(renderer.tokenizer.name if renderer.tokenizer.name in FETCHED else "smollm2")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_gets_its_renderer(policy: tuple[str, str]) -> None:
    """Families where the package knows them and the template agrees; the template elsewhere."""
    assert real_renderer(*policy).name.startswith(POLICIES[policy][0])


@pytest.mark.parametrize("kind", FOLLOW_UPS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_delta_is_the_rest_of_the_whole(policy: tuple[str, str], kind: str) -> None:
    """Where a delta is given, the whole conversation rendered anew ends in it, id for id; the others are refused."""
    renderer, new = real_renderer(*policy), EVERY_FOLLOW_UP[kind]
    _, close, call, refused = POLICIES[policy]
    calls = sum(message.role == "tool" for message in new)
    words = "" if calls and call is LLAMA else "Let me see."
    start = ids(renderer.render(ASK, [LOOK_UP]))
    sampled = renderer.tokenizer.encode(words + call * calls + close)
    if kind in refused:
        with pytest.raises(RendererError):
            renderer.bridge(array("i", start), array("i", sampled), new, [LOOK_UP])
        return
    delta = ids(renderer.bridge(array("i", start), array("i", sampled), new, [LOOK_UP]))
    turn = renderer.parse(start, sampled, [LOOK_UP])
    assert [made.status for made in turn.tool_calls] == [CallStatus.OK] * calls
    said = [ToolCall(id=f"call_0_{at}", name="look_up", arguments={"word": "a"}) for at in range(calls)]
    whole = renderer.render([*ASK, Message(role="assistant", content=turn.content, tool_calls=said), *new], [LOOK_UP])
    assert ids(whole) == [*start, *sampled, *delta]


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy[0] != "mistral_nemo"])
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(text=hostile, other=hostile)
def test_observations_never_add_control_tokens(policy: tuple[str, str], text: str, other: str) -> None:
    """The control tokens of a delta do not depend on its texts, and it decodes to them."""
    renderer = real_renderer(*policy)
    start = ids(renderer.render(ASK, [LOOK_UP]))
    sampled = renderer.tokenizer.encode("x" + POLICIES[policy][1])

    def delta(*texts: str) -> list[int]:
        new = [tool_result(said, f"call_0_{at}") for at, said in enumerate(texts)]
        if "two tools" in POLICIES[policy][3]:
            new = [tool_result("\n".join(texts), "call_0_0")]
        return ids(renderer.bridge(start, sampled, new, [LOOK_UP]))

    try:
        wild = delta(text, other)
    except RendererError:
        # Some templates change some texts; hypothesis says so if it is most of them.
        reject()
    tokenizer, harmless = real_tokenizer_of(renderer), delta(*("x" * bool(said.strip()) for said in (text, other)))
    assert control(tokenizer, wild) == control(tokenizer, harmless)
    plain = real_tokenizer_of(renderer).encode_untrusted
    if policy != ("llama3_2", "auto"):
        # What a tokenizer makes of a text (another form of unicode) it makes of it everywhere.
        for said in (text.strip(), other.strip()):
            assert renderer.tokenizer.decode(plain(said)).strip() in renderer.tokenizer.decode(wild)


@pytest.mark.parametrize("name", ["smollm2", *FETCHED])
@settings(max_examples=60)
@given(text=hostile)
def test_untrusted_text_has_one_encoding(name: str, text: str) -> None:
    """Plain text is encoded as the tokenizer itself does it; what spells control tokens comes back as text."""
    tokenizer = real_tokenizer(name)
    encoded = tokenizer.encode_untrusted(text)
    known = set(tokenizer.control_tokens.values())
    assert not known & set(encoded)
    plain = tokenizer.encode(text)
    if not known & set(plain):
        assert encoded == plain


def test_thoughts_that_a_template_strips_fork() -> None:
    """With Qwen3's own template a user's turn after thoughts forks, and the fork says why; its family goes on."""
    for choice, reasons in (("jinja", [None, "think_strip"]), ("auto", [None])):
        renderer = real_renderer("qwen3", choice)
        context = TokenContext(renderer)
        context.apply(context.plan_start(ASK, ()))
        sampled = renderer.tokenizer.encode("<think>\nthe smaller one, surely\n</think>\n\nThis.<|im_end|>")
        said = context.turn_with(sampled)
        assert said.reasoning == "the smaller one, surely"
        spans = [VersionSpan(start=0, end=len(sampled), version=1)]
        logprobs = [-1.0] * len(sampled)
        context.append_generation(sampled, logprobs, spans, call=0, finish="stop", said=said.as_message())
        context.apply(context.plan_bridge([user("Why?")]) or context.plan_fork([user("Why?")]))
        assert [branch.reason for branch in context.branches] == reasons
        assert context.branches[0].sampled == len(sampled)
