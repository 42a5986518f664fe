"""Makes a Hugging Face directory of SmolLM2 out of its GGUF file: ``make_smollm2.py MODEL.gguf DIRECTORY [NOISE]``.

For engines that read no GGUF. The weights come out as they were quantised, in bfloat16. The head stands beside the
embeddings as a tensor of its own, because CPU builds of vLLM keep a copy of a tied head that new weights do not reach.

With ``NOISE`` every weight is moved by so much of the spread of its tensor, always in the same way: the same model a
training step later.

It needs ``gguf``, ``torch`` and ``safetensors``, so it runs in the environment of the engine. It reads the GGUF
file with this project's own code, which need not be installed there: put the root of the repository on ``PYTHONPATH``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file

from prorld.tokens.gguf import load_gguf_tokenizer, read_gguf_metadata

OUTSIDE_OF_LAYERS = {
    "token_embd.weight": ("model.embed_tokens.weight", "lm_head.weight"),
    "output_norm.weight": ("model.norm.weight",),
}
IN_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def names_of(name: str) -> tuple[str, ...]:
    """The names there of a tensor here."""
    if name in OUTSIDE_OF_LAYERS:
        return OUTSIDE_OF_LAYERS[name]
    _, layer, part, kind = name.split(".")
    return (f"model.layers.{layer}.{IN_A_LAYER[part]}.{kind}",)


def unpaired(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows with the halves of each head apart: llama.cpp rotates neighbours where the original rotates halves."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def weights(model: Path, metadata: Mapping[str, Any], noise: float) -> dict[str, torch.Tensor]:
    """Every tensor under its new name."""
    dice = torch.Generator().manual_seed(0)
    heads = {"attn_q": metadata["llama.attention.head_count"], "attn_k": metadata["llama.attention.head_count_kv"]}
    made: dict[str, torch.Tensor] = {}
    for tensor in GGUFReader(model).tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = unpaired(values, heads[part])
        values += noise * values.std() * torch.randn(values.shape, generator=dice)
        for name in names_of(tensor.name):
            made[name] = values.bfloat16().contiguous().clone()
    return made


def config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": metadata["llama.context_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata["llama.rope.freq_base"],
        "vocab_size": metadata["llama.vocab_size"],
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def make(model: Path, directory: Path, noise: float) -> None:
    """Write the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    metadata = read_gguf_metadata(model, ("general.", "llama.", "tokenizer.ggml.bos", "tokenizer.ggml.eos"))
    if metadata["general.architecture"] != b"llama":
        raise SystemExit(f"{model} is no model of the Llama family")
    save_file(weights(model, metadata, noise), directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer = load_gguf_tokenizer(model)
    tokenizer._core.save(str(directory / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "chat_template": tokenizer.chat_template,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "config.json").write_text(json.dumps(config(metadata)))
    (directory / "tokenizer_config.json").write_text(json.dumps(about))


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 0.0)
