"""Text to ids and back, and the wall between text and control tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from prorld.errors import ConfigError
from prorld.tokens.tokenizer import HfTokenizer
from tests.tokens.support import CHATML, CONTROL, MARKUP, tiny, tiny_core

TINY = tiny()
hostile = st.lists(st.one_of(st.sampled_from([*CONTROL, *MARKUP, "<|im_", "end|>"]), st.text(max_size=8))).map("".join)


def write(directory: Path, config: object | None = None) -> Path:
    """A tokenizer's directory."""
    tiny_core().save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@given(hostile)
def test_untrusted_text_never_becomes_a_control_token(text: str) -> None:
    """Whatever a text spells, its ids hold no control token, and they decode to the text."""
    ids = TINY.encode_untrusted(text)
    assert not set(ids) & set(TINY.control_tokens.values())
    assert TINY.decode(ids) == text


@given(st.text().filter(lambda text: "<" not in text))
def test_text_without_control_tokens_has_one_encoding(text: str) -> None:
    """Both doors agree where there is nothing to guard against."""
    assert TINY.encode_untrusted(text) == TINY.encode(text)


@pytest.mark.parametrize("token", [*CONTROL, *MARKUP])
def test_trusted_text_spells_control_tokens(token: str) -> None:
    """Template text may write every control token, marked special or not, and each is one id."""
    assert TINY.encode(token) == [TINY.token_id(token)] == [TINY.control_tokens[token]]
    assert len(TINY.encode_untrusted(token)) > 1


def test_a_model_that_holds_control_tokens_as_pieces_is_cut() -> None:
    """A unigram model knows its control token as an ordinary piece; it still can't be spelled."""
    pieces = [("<s>", -1.0), *((character, -5.0) for character in "<s>ab")]
    core = Tokenizer(models.Unigram([("<unk>", -9.0), *dict(pieces).items()], unk_id=0))
    core.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    tokenizer = HfTokenizer(core, name="unigram", digest="")
    ids = tokenizer.encode_untrusted("a<s>b<s>")
    assert tokenizer.token_id("<s>") not in ids
    assert [core.id_to_token(token) for token in ids] == ["a", "<", "s", ">", "b", "<", "s", ">"]


def test_added_blanks_are_spelling() -> None:
    """Added tokens that are runs of blanks stay usable by text: they are how such a tokenizer writes indentation."""
    core = Tokenizer(models.BPE(vocab={"a": 0, "Ġ": 1}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken("    ", special=False, normalized=False)])
    tokenizer = HfTokenizer(core, name="blanks", digest="")
    assert tokenizer.encode_untrusted("a    a") == tokenizer.encode("a    a") == [0, 2, 0]
    assert not tokenizer.control_tokens


def test_a_lone_surrogate_is_replaced() -> None:
    """Text that can't be encoded at all does not break a rollout."""
    assert TINY.decode(TINY.encode_untrusted("a\ud800b")) == "a?b"


def test_a_directory_brings_template_and_end_token(tmp_path: Path) -> None:
    """The config's template and end-of-sequence token come along, in any of the forms configs use."""
    plain = HfTokenizer.from_directory(
        write(tmp_path, {"chat_template": CHATML, "eos_token": {"content": "<|im_end|>"}, "bos_token": "<|endoftext|>"})
    )
    assert (plain.chat_template, plain.eos_token, plain.bos_token) == (CHATML, "<|im_end|>", "<|endoftext|>")
    assert plain.eos_id == plain.token_id("<|im_end|>")
    named = [{"name": "rag", "template": "x"}, {"name": "default", "template": CHATML}]
    assert HfTokenizer.from_directory(write(tmp_path, {"chat_template": named})).chat_template == CHATML
    (tmp_path / "chat_template.jinja").write_text("from a file")
    assert HfTokenizer.from_directory(tmp_path).chat_template == "from a file"
    assert plain.encode("hello world") == TINY.encode("hello world")


def test_the_digest_tells_tokenizers_apart(tmp_path: Path) -> None:
    """Same content, same digest; another template or end token, another digest."""
    digests = [
        HfTokenizer.from_directory(write(tmp_path, config)).digest
        for config in ({}, {}, {"chat_template": "a"}, {"chat_template": "b"}, {"eos_token": "a"}, {"bos_token": "a"})
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 5


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff\xfe", b'{"model": 3}'])
def test_a_broken_tokenizer_is_a_readable_error(tmp_path: Path, content: bytes) -> None:
    """A file that is no tokenizer is named in the error."""
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        HfTokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("config", [[1], {"chat_template": 3}, {"eos_token": {"id": 3}}])
def test_a_broken_config_is_a_readable_error(tmp_path: Path, config: object) -> None:
    """So is a config of other types."""
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        HfTokenizer.from_directory(write(tmp_path, config))


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    """What is missing is said."""
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        HfTokenizer.from_directory(tmp_path)
