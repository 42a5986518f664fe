"""A real tokenizer small enough for tests: one token per byte, and the control tokens of ChatML and tool calls.

Ids are stable: a byte is its own id, control tokens follow in the order of ``CONTROL_TOKENS``.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

__all__ = ["CHATML_TEMPLATE", "CONTROL_TOKENS", "IM_END", "IM_START", "byte_ids", "write_byte_tokenizer"]

CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
)
IM_START = 256 + CONTROL_TOKENS.index("<|im_start|>")
IM_END = 256 + CONTROL_TOKENS.index("<|im_end|>")

# Tool calls stand between markers that are tokens but not "special", as in the families that have them.
_NOT_SPECIAL = frozenset({"<tool_call>", "</tool_call>", "<think>", "</think>"})

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_ids(text: str) -> list[int]:
    """The ids of a text; control tokens written in it are control tokens."""
    ids: list[int] = []
    rest = text
    while rest:
        found = [(rest.find(token), number) for number, token in enumerate(CONTROL_TOKENS) if token in rest]
        if not found:
            return [*ids, *rest.encode()]
        at, number = min(found)
        ids += [*rest[:at].encode(), 256 + number]
        rest = rest[at + len(CONTROL_TOKENS[number]) :]
    return ids


def write_byte_tokenizer(directory: Path) -> Path:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` with the ChatML template; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    # The byte-level alphabet writes each byte as one printable character; this is its order by byte.
    tokenizer = Tokenizer(BPE(vocab={character: byte for byte, character in enumerate(_alphabet())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    for token in CONTROL_TOKENS:
        added = AddedToken(token, special=token not in _NOT_SPECIAL, normalized=False)
        (tokenizer.add_tokens if token in _NOT_SPECIAL else tokenizer.add_special_tokens)([added])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHATML_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    return directory


def _alphabet() -> list[str]:
    """The printable character that stands for each byte: itself where it is printable, else one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    substitutes = iter(range(256, 512))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]
