"""The tokenizer for tests is a real one, and its ids are what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from prorld.testing.byte_tokenizer import CONTROL_TOKENS, IM_END, IM_START, byte_ids, write_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The written file, loaded by the library."""
    directory = write_byte_tokenizer(tmp_path_factory.mktemp("bytes") / "tokenizer")
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


TEXT = st.lists(st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from(CONTROL_TOKENS)))


@given(TEXT.map("".join))
def test_ids_are_bytes_and_control_tokens(tokenizer: Tokenizer, text: str) -> None:
    """The library and the plain function agree on every text, and it reads back."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == byte_ids(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_config_names_the_template_and_the_ends(tmp_path: Path) -> None:
    """What renders a chat finds its template, and the ids of the turn markers are stable."""
    config = json.loads((write_byte_tokenizer(tmp_path) / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|im_end|>"
    assert "add_generation_prompt" in config["chat_template"]
    assert (IM_START, IM_END) == (257, 258)
