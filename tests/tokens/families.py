"""A byte-level tokenizer for each model family: single bytes, and the control tokens that the family is made of."""

from __future__ import annotations

import importlib.util
from functools import cache

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from prorld.tokens.family_renderer import FAMILIES, FamilyRenderer
from prorld.tokens.tokenizer import HfTokenizer

CHATML = (
    "<|endoftext|> <|im_start|> <|im_end|> <think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"
)
VISION = f"{CHATML} <|image_pad|> <|video_pad|> <|vision_start|> <|vision_end|>"
GLM = (
    "[gMASK] <sop> <|endoftext|> <|system|> <|user|> <|assistant|> <|observation|> <think> </think> <tool_call> "
    "</tool_call> <arg_key> </arg_key> <arg_value> </arg_value>"
)
KIMI = (
    "<|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> <|im_end|> <|tool_calls_section_begin|> "
    "<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>"
)
DEEPSEEK = (
    "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> "
    "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> "
    "<｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜tool▁sep｜>"
)
DEEPSEEK_4 = (
    "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜latest_reminder｜> "
    "<think> </think> ｜DSML｜ <｜action｜> <｜query｜> <｜authority｜> <｜domain｜> <｜title｜> <｜read_url｜>"
)
HY = " ".join(
    f"<{slash}{name}:opensource>"
    for name in ["arg_key", "arg_value", "think", "tool_call", "tool_calls", "tool_response", "tool_responses"]
    for slash in ("", "/")
)
HY += " <tool_sep:opensource>"
for word in ("hy_Assistant", "hy_User", "hy_begin_of_sentence", "hy_eos", "reasoning_mode"):
    HY += f" <｜{word}:opensource｜>"
LAGUNA = (
    "〈|EOS|〉 <assistant> </assistant> <user> </user> <system> </system> <think> </think> <tool_call> </tool_call>"
)
LLAMA = "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|python_tag|>"
MINIMAX = "]~!b[ ]~b] [e~[ <think> </think> <minimax:tool_call> </minimax:tool_call>"

TOKENS = {
    "deepseek-r1": f"{DEEPSEEK} <think> </think>",
    "deepseek-v3": DEEPSEEK,
    "deepseek-v4": DEEPSEEK_4,
    "glm-4.5": GLM,
    "hy3": HY,
    "kimi-k2": KIMI,
    "kimi-k2.5": f"{KIMI} <|endoftext|> <think> </think> <|media_begin|> <|media_content|> <|media_end|> <|media_pad|>",
    "llama-3": LLAMA,
    "minimax-m2": MINIMAX,
    "prime-qwen3": CHATML,
    "qwen3": CHATML,
}
TOKENS |= dict.fromkeys(("glm-5", "glm-5.1", "glm-5.3"), f"{GLM} <tool_response> </tool_response>")
TOKENS |= dict.fromkeys(("laguna-m.1", "laguna-s-2.1", "laguna-xs-2.1", "laguna-xs.2"), LAGUNA)
TOKENS |= dict.fromkeys(("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"), CHATML)
TOKENS |= dict.fromkeys(("qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8"), VISION)
assert set(TOKENS) == set(FAMILIES)


def byte_level(control: list[str], *, template: str | None = None) -> HfTokenizer:
    """Bytes and control tokens; every second one is not marked special, as markup is in real tokenizers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    for place, token in enumerate(control):
        added = AddedToken(token, special=place % 2 == 0, normalized=False)
        (core.add_tokens if place % 2 else core.add_special_tokens)([added])
    return HfTokenizer(core, name="bytes", digest="0" * 64, chat_template=template, eos_token=control[0])


@cache
def family(name: str) -> FamilyRenderer:
    """The renderer of a family on bytes; the test is skipped where the package is not installed."""
    if importlib.util.find_spec("renderers") is None:
        pytest.skip("the extra prorld[renderers] is not installed")
    return FamilyRenderer(byte_level(TOKENS[name].split()), name)
