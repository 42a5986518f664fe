"""Which renderer a policy gets."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import structlog

from prorld.domain.messages import user
from prorld.errors import RendererError
from prorld.testing.byte_tokenizer import write_byte_tokenizer
from prorld.tokens import choice
from prorld.tokens.choice import CHOICES, make_renderer
from prorld.tokens.tokenizer import HfTokenizer
from tests.tokens.families import TOKENS, byte_level, family
from tests.tokens.support import CHATML, THINKING, tiny

# The opening words of Llama's template are a page long; a family of a few words shows as much.
QWEN = """\
{%- if tools %}
{{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments ' }}
{{- 'within <tool_call></tool_call> XML tags:\n<tool_call>\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}
{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{%- endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}{%- if not loop.first or m.content %}{{- '\n' }}{%- endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""


def qwen(template: str = QWEN) -> HfTokenizer:
    """Bytes with Qwen3's control tokens."""
    return byte_level(TOKENS["qwen3"].split(), template=template)


@pytest.fixture(autouse=True)
def fresh_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever configured logging before may have bound the logger for good."""
    monkeypatch.setattr(choice, "log", structlog.get_logger())


def test_a_family_is_known_by_what_its_template_writes() -> None:
    """Id for id on conversations with tools, calls and thoughts; whatever the model is called."""
    family("qwen3")
    with structlog.testing.capture_logs() as logs:
        assert "family=qwen3 " in make_renderer(qwen()).name
    assert [line["event"] for line in logs if line["log_level"] == "info"] == ["renderer.chosen"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("one or more functions", "one or two functions"),
        ("<|im_start|>user\n' + m.content", "<|im_start|>user\n' + m.content | trim"),
        ("\n</think>\n\n", "\n</think>\n"),
        ("{%- if not loop.first or m.content %}{{- '\n' }}{%- endif %}", "{{- '\n' }}"),
        ("'\n<tool_response>\n'", "'\n<tool_response>'"),
        ("loop.index0 > ns.last and", "true and"),
    ],
)
def test_a_template_that_differs_is_asked_itself(old: str, new: str) -> None:
    """One word, one blank or one rule about thoughts makes another model of it."""
    family("qwen3")
    assert old in QWEN
    assert make_renderer(qwen(QWEN.replace(old, new))).name.startswith("jinja/")


def test_variables_reach_the_family() -> None:
    """They are compared with the template under the same variables; one that the family lacks rules it out."""
    family("qwen3")
    off = (
        QWEN
        + "{%- if add_generation_prompt and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    )
    assert "family=qwen3 " in make_renderer(qwen(off)).name
    assert make_renderer(qwen(off), {"colour": "red"}).name.startswith("jinja/")


def test_a_choice_is_kept() -> None:
    """Whoever names a renderer gets it or an error."""
    family("qwen3")
    assert make_renderer(qwen(), choice="jinja").name.startswith("jinja/")
    assert "family=qwen3-vl" in make_renderer(byte_level(TOKENS["qwen3-vl"].split()), choice="qwen3-vl").name
    with pytest.raises(RendererError, match="making the renderer"):
        make_renderer(tiny(), choice="qwen3")
    with pytest.raises(RendererError, match="there are auto, jinja, deepseek-r1"):
        make_renderer(tiny(), choice="qwen")
    assert len(set(CHOICES)) == len(CHOICES)


@pytest.mark.parametrize("template", [CHATML, THINKING])
def test_others_are_asked_without_the_package(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that has no token of any family never costs the import."""
    monkeypatch.setattr(choice, "is_installed", lambda: pytest.fail("imported"))
    assert make_renderer(tiny(template)).render([user("go")], ())


def test_the_byte_tokenizer_of_the_tests_is_no_family(tmp_path: Path) -> None:
    """It has markup for thoughts, but a template of its own."""
    tokenizer = HfTokenizer.from_directory(write_byte_tokenizer(tmp_path))
    assert make_renderer(tokenizer).name.startswith("jinja/")


def test_without_the_package_the_template_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record's name of the renderer says so; a family that was asked for by name is an error with its cure."""
    real = importlib.import_module

    def absent(name: str, package: str | None = None):
        if name == "renderers":
            raise ModuleNotFoundError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", absent)
    monkeypatch.delitem(sys.modules, "renderers", raising=False)
    with structlog.testing.capture_logs() as logs:
        assert make_renderer(qwen()).name.startswith("jinja/")
    assert [line["event"] for line in logs] == ["renderer.absent", "renderer.chosen"]
    with pytest.raises(RendererError, match=r"prorld\[renderers\]") as caught:
        make_renderer(qwen(), choice="qwen3")
    assert caught.value.stable_code == "no_renderers"
