"""Random rollouts keep the laws of tokens: prefixes, masks and versions, whatever is said and heard."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prorld.tokens.contract import Renderer
from prorld.tokens.jinja_renderer import JinjaRenderer
from tests.tokens.families import family
from tests.tokens.laws import Story
from tests.tokens.real_tokenizers import real_renderer
from tests.tokens.support import CHATML, THINKING, tiny

TINY = {"chatml": JinjaRenderer(tiny(CHATML)), "thinking": JinjaRenderer(tiny(THINKING))}
FAMILIES = ["glm-4.5", "kimi-k2", "llama-3", "qwen3", "qwen3.5"]
REAL = [
    ("qwen3", "auto"), ("qwen3", "jinja"), ("qwen2_5", "auto"), ("llama3_2", "auto"), ("llama3_2", "jinja"),
    ("deepseek_v3", "auto"), ("gemma3", "auto"), ("mistral_nemo", "auto"),
]  # fmt: skip

quick = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def hold(renderer: Renderer, data: st.DataObject) -> None:
    """Tell a story and check it."""
    story = Story(renderer, data.draw)
    story.check(story.tell())


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
@settings(quick, max_examples=60)
@given(data=st.data())
def test_the_laws_hold_for_any_template(name: str, data: st.DataObject) -> None:
    """The calibrated delta."""
    hold(TINY[name], data)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@quick
@given(data=st.data())
def test_the_laws_hold_for_families(name: str, data: st.DataObject) -> None:
    """The package, on bytes."""
    hold(family(name), data)


@pytest.mark.slow
@quick
@given(data=st.data())
def test_the_laws_hold_for_the_small_model(data: st.DataObject) -> None:
    """The tokenizer that the demo brings along."""
    hold(real_renderer("smollm2"), data)


@pytest.mark.real
@pytest.mark.parametrize("policy", REAL)
@settings(quick, max_examples=60)
@given(data=st.data())
def test_the_laws_hold_for_real_tokenizers(policy: tuple[str, str], data: st.DataObject) -> None:
    """Both renderers, where there are both."""
    hold(real_renderer(*policy), data)
