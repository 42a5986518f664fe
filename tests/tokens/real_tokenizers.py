"""The tokenizers of real models, as ``scripts/tokenizers`` fetches them, and the small model's own."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from prorld.tokens.choice import make_renderer
from prorld.tokens.contract import Renderer
from prorld.tokens.gguf import load_gguf_tokenizer
from prorld.tokens.tokenizer import HfTokenizer
from tests.tokens.support import embedded_model

HOME = Path(__file__).parents[2] / ".tools" / "tokenizers"
FETCHED = ("qwen3", "qwen2_5", "llama3_2", "deepseek_v3", "gemma3", "mistral_nemo")


@cache
def real_tokenizer(name: str) -> HfTokenizer:
    """The tokenizer of a model; the test is skipped where it was not fetched."""
    if name == "smollm2":
        return load_gguf_tokenizer(embedded_model())
    if not (HOME / name / "tokenizer.json").is_file():
        pytest.skip(f"the tokenizer {name} is not here; scripts/tokenizers fetches it")
    return HfTokenizer.from_directory(HOME / name, name=name)


@cache
def real_renderer(name: str, choice: str = "auto") -> Renderer:
    """The renderer that a policy with this tokenizer gets."""
    return make_renderer(real_tokenizer(name), {}, choice)
