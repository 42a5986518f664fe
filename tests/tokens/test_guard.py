"""The guard: marked text comes back as it was, and no control token is in it, whatever stands beside it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.errors import RendererError
from prorld.tokens.guard import MARK, Guard, GuardedTokenizer
from tests.tokens.families import LLAMA, MINIMAX, byte_level
from tests.tokens.support import CONTROL, MARKUP, control, tiny

TINY = tiny()
GUARD = Guard(TINY)
TOKENIZER = GuardedTokenizer(TINY, GUARD)

spelling = st.lists(
    st.one_of(
        st.sampled_from([*CONTROL, *MARKUP, "<|im_", "end|>", "<", "|>", MARK, "\ue001", "\ue0010", "0", "1", " "]),
        st.text(max_size=5),
    )
).map("".join)


@given(st.lists(spelling, max_size=4))
def test_marked_texts_come_back_as_they_were(texts: list[str]) -> None:
    """Side by side, whatever private characters they hold; their ids are those of plain text."""
    marked = "".join(map(GUARD.mark, texts))
    assert GUARD.unmark(marked) == "".join(texts)
    assert TOKENIZER.encode(marked) == TINY.encode_untrusted("".join(texts))


@given(spelling, spelling, st.sampled_from(["<|im_end|>", "<tool_call>", "user\n", "<", "<|im_", "|>", "end|>", ""]))
def test_no_control_token_is_made_of_texts(one: str, other: str, between: str) -> None:
    """Neither by a text, nor by two, nor by a text and half a token of the template's."""
    ids = TOKENIZER.encode(GUARD.mark(one) + between + GUARD.mark(other))
    assert control(TINY, ids) == control(TINY, TINY.encode(between))
    if not one.isspace() and not other.isspace():
        assert TINY.decode(ids) == (one + between + other).encode("utf-8", "replace").decode()


@given(spelling)
def test_blanks_at_the_ends_stay_at_the_ends(text: str) -> None:
    """A template that strips a text, strips it as it would without marks; what is empty or blank stays so."""
    marked = GUARD.mark(text)
    assert GUARD.unmark(marked.strip()) == text.strip()
    assert bool(marked) == bool(text)
    assert bool(marked.strip()) == bool(text.strip())


@given(spelling)
def test_a_mark_survives_json(text: str) -> None:
    """Arguments of calls are written as JSON."""
    written = json.dumps({"k": GUARD.mark(text)}, ensure_ascii=False)
    assert json.loads(GUARD.unmark(written)) == {"k": text}


def test_plain_names_are_left_alone() -> None:
    """Libraries look into names and ids of calls; only what could spell something is marked."""
    assert GUARD.mark_kind("call_0:bash", "data") == "call_0:bash"
    assert GUARD.mark_kind("call_0:bash", "spoken") != "call_0:bash"
    for name in ("<tool_call>", "a b", "a\n", ""):
        assert GUARD.unmark(GUARD.mark_kind(name, "data")) == name
    assert not control(TINY, TOKENIZER.encode("x" + GUARD.mark_kind("<tool_call>", "data")))


def test_what_is_spelled_is_seen() -> None:
    """A whole control token counts; half of one does not."""
    assert GUARD.spells("a <tool_call> b")
    assert not GUARD.spells("a <tool_ call> <|im_")
    assert not Guard(byte_level(["<s>"])).spells("<tool_call>")


@pytest.mark.parametrize("names", [LLAMA, MINIMAX])
def test_tokens_that_begin_with_each_other_are_told_apart(names: str) -> None:
    """The longest one that fits is meant, as in the tokenizer itself."""
    tokenizer = byte_level([*names.split(), "<|eot_id|>more"])
    text = "a".join([*names.split(), "<|eot_id|>more", "<|eot_id|>mo"])
    assert GuardedTokenizer(tokenizer, Guard(tokenizer)).encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("token", "why"), [("#", "one character"), ("user:", "like words"), (f"<{MARK}>", "like words")]
)
def test_a_tokenizer_that_can_t_be_guarded_is_refused(token: str, why: str) -> None:
    """Where a mark could not break a token, or would break all words, there is no guard."""
    with pytest.raises(RendererError, match=why):
        Guard(byte_level(["<s>", token]))


def test_a_hostile_text_takes_no_more_time_than_its_length() -> None:
    """Many beginnings of many tokens: the work is bounded by the number of lengths, not of tokens."""
    many = Guard(byte_level([f"<|reserved_{number}|>" for number in range(3000)]))
    assert not many.spells("<" * 200_000)
    assert len(many.mark("<" * 200_000)) == 400_001
