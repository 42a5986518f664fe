"""A Llama of a few thousand weights as a GGUF file, written here from the format's description alone."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

HIDDEN, INNER, LAYERS, HEADS, SHARED, CONTEXT = 64, 96, 2, 4, 2, 256
VOCABULARY = 256 + 4
PER_HEAD = HIDDEN // HEADS

# The printable character that stands for each byte in byte-level vocabularies.
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PLAIN]
_LETTERS = [chr(byte) if byte in _PLAIN else chr(256 + _OTHERS.index(byte)) for byte in range(256)]


def text(value: str) -> bytes:
    """A string."""
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def texts(values: list[str]) -> bytes:
    """An array of strings."""
    return struct.pack("<IQ", 8, len(values)) + b"".join(map(text, values))


def state(seed: int = 0, *, spread: float = 0.3) -> dict[str, np.ndarray]:
    """Its weights under Hugging Face's names, with a tied head."""
    dice = np.random.default_rng(seed)

    def rows(*shape: int) -> np.ndarray:
        return (spread * dice.standard_normal(shape)).astype(np.float32)

    made = {"model.embed_tokens.weight": rows(VOCABULARY, HIDDEN), "model.norm.weight": 1 + rows(HIDDEN)}
    for layer in range(LAYERS):
        for part, shape in (
            ("input_layernorm", (HIDDEN,)),
            ("self_attn.q_proj", (HIDDEN, HIDDEN)),
            ("self_attn.k_proj", (SHARED * PER_HEAD, HIDDEN)),
            ("self_attn.v_proj", (SHARED * PER_HEAD, HIDDEN)),
            ("self_attn.o_proj", (HIDDEN, HIDDEN)),
            ("post_attention_layernorm", (HIDDEN,)),
            ("mlp.gate_proj", (INNER, HIDDEN)),
            ("mlp.up_proj", (INNER, HIDDEN)),
            ("mlp.down_proj", (HIDDEN, INNER)),
        ):
            values = rows(*shape)
            made[f"model.layers.{layer}.{part}.weight"] = 1 + values if len(shape) == 1 else values
    return made


def metadata(architecture: str = "llama", *, file_type: int = 0) -> list[bytes]:
    """The entries, each as its bytes."""
    numbers = {
        "context_length": CONTEXT, "embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": INNER,
        "attention.head_count": HEADS, "attention.head_count_kv": SHARED, "rope.dimension_count": PER_HEAD,
        "vocab_size": VOCABULARY,
    }  # fmt: skip
    tokens = [*_LETTERS, "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    kinds = [1] * 256 + [3] * 4
    return [
        text("general.architecture") + struct.pack("<I", 8) + text(architecture),
        text("general.file_type") + struct.pack("<II", 4, file_type),
        *(text(f"llama.{name}") + struct.pack("<II", 4, value) for name, value in numbers.items()),
        text("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5),
        text("llama.rope.freq_base") + struct.pack("<If", 6, 10000.0),
        text("tokenizer.ggml.model") + struct.pack("<I", 8) + text("gpt2"),
        text("tokenizer.ggml.pre") + struct.pack("<I", 8) + text("smollm"),
        text("tokenizer.ggml.tokens") + struct.pack("<I", 9) + texts(tokens),
        text("tokenizer.ggml.token_type") + struct.pack("<I", 9) + struct.pack(f"<IQ{len(kinds)}i", 5, 260, *kinds),
        text("tokenizer.ggml.merges") + struct.pack("<I", 9) + texts(["Ġ t"]),
        text("tokenizer.ggml.eos_token_id") + struct.pack("<II", 4, 258),
    ]


def tiny_base(path: Path, *, architecture: str = "llama", head: bool = False, rope: bool = False) -> Path:
    """A base whose weights are all 0; only its shapes and its metadata count."""
    names: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (HIDDEN, VOCABULARY),
        "output_norm.weight": (HIDDEN,),
        **({"output.weight": (HIDDEN, VOCABULARY)} if head else {}),
        **({"rope_freqs.weight": (PER_HEAD // 2,)} if rope else {}),
    }
    for layer in range(LAYERS):
        for part, shape in (
            ("attn_norm", (HIDDEN,)), ("attn_q", (HIDDEN, HIDDEN)), ("attn_k", (HIDDEN, SHARED * PER_HEAD)),
            ("attn_v", (HIDDEN, SHARED * PER_HEAD)), ("attn_output", (HIDDEN, HIDDEN)), ("ffn_norm", (HIDDEN,)),
            ("ffn_gate", (HIDDEN, INNER)), ("ffn_up", (HIDDEN, INNER)), ("ffn_down", (INNER, HIDDEN)),
        ):  # fmt: skip
            names[f"blk.{layer}.{part}.weight"] = shape
    entries = metadata(architecture)
    listed, data = b"", b""
    for name, sizes in names.items():
        listed += text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, 0, len(data))
        data += np.full(sizes, 2.0 if name == "rope_freqs.weight" else 0.0, "<f4").tobytes()
        data += bytes(-len(data) % 32)
    head_bytes = b"GGUF" + struct.pack("<IQQ", 3, len(names), len(entries)) + b"".join(entries) + listed
    path.write_bytes(head_bytes + bytes(-len(head_bytes) % 32) + data)
    return path
