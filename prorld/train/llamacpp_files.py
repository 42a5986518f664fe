"""What llama.cpp loads, out of a trainer's weights: a whole model, or a LoRA adapter, as one GGUF file.

The names, the order of rows and the number formats are llama.cpp's. Its ``llama`` architecture rotates neighbouring
rows of a head where Hugging Face rotates the two halves, so rows of q and k change places. Everything else about the
model, the tokenizer above all, is copied from a base file. A file appears whole or not at all.

Only numpy is needed. Weights are numpy arrays, or tensors that can be made one.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from prorld.train.gguf_layout import (
    BadModelFile,
    GgufFile,
    GgufTensor,
    packed_string,
    packed_tensors,
    padding,
    read_gguf,
)
from prorld.whole_file import written_file

__all__ = ["BadModelFile", "Dtype", "write_gguf", "write_gguf_lora"]

Dtype = Literal["f16", "bf16", "f32"]
Floats: TypeAlias = npt.NDArray[np.float32]
# The one array that a tensor becomes in the file.
Stored: TypeAlias = npt.NDArray[Any]

ARCHITECTURE = "llama"

# The numbers that the format has for them: of a tensor's type, and of a file that is mostly of that type.
_KIND: Mapping[Dtype, int] = {"f32": 0, "f16": 1, "bf16": 30}
_FILE_TYPE: Mapping[Dtype, int] = {"f32": 0, "f16": 1, "bf16": 32}
_BYTES: Mapping[int, int] = {0: 4, 1: 2, 30: 2}
_UINT32, _FLOAT32, _TEXT = 4, 6, 8

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_OUTSIDE = {
    "model.embed_tokens.weight": _EMBEDDING,
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": _HEAD,
}
_INSIDE = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# What the base has computed from its configuration, and no state dict has.
_OF_THE_BASE = ("rope_freqs.weight",)

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight", re.ASCII)
_ADAPTER = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.[^.]+)?\.weight", re.ASCII)

# Buffers that are no weights: computed from the configuration by both sides.
_COMPUTED = re.compile(r".*rotary_emb\.inv_freq", re.ASCII)


class _Item(NamedTuple):
    """A tensor of the new file; ``make`` gives its numbers when their turn has come."""

    name: str
    shape: tuple[int, ...]
    kind: int
    make: Callable[[], Stored]


def write_gguf(state: Mapping[str, Any], base_gguf: Path, path: Path, *, dtype: Dtype = "f16") -> None:
    """Write a model with the weights of ``state``, a Hugging Face state dict of the Llama family.

    All else is that of ``base_gguf``, which must be of the same shape. A head that differs from the embeddings is
    written beside them. Raises ``BadModelFile`` for weights that don't fit, aren't finite or don't fit into the format.
    """
    base = _base(base_gguf)
    plain = {tensor.name: tensor for tensor in base.tensors}
    weights = dict(_renamed(state))
    if _HEAD not in plain and _HEAD in weights and _is_same(weights[_HEAD], weights.get(_EMBEDDING)):
        del weights[_HEAD]
    wanted = [name for name in plain if name not in _OF_THE_BASE]
    missing = [name for name in wanted if name not in weights]
    strange = [name for name in weights if name not in plain and name != _HEAD]
    if missing or strange:
        raise BadModelFile(f"the weights don't fit {base_gguf}: missing {missing[:4]}, unknown {strange[:4]}")
    heads = _heads(base)
    items = [
        _item(name, plain.get(name) or plain[_EMBEDDING], weights[name], dtype, heads)
        for name in (*wanted, *(name for name in weights if name not in plain))
    ]
    items += [_copied(plain[name], base, base_gguf) for name in _OF_THE_BASE if name in plain]
    _write(path, base, _with_file_type(base, _FILE_TYPE[dtype]), base.entry_count, items)


def write_gguf_lora(
    state: Mapping[str, Any], base_gguf: Path, path: Path, *, alpha: float, dtype: Dtype = "f32"
) -> None:
    """Write a LoRA adapter for the model of ``base_gguf``, out of PEFT's names (``... .lora_A.weight``).

    ``alpha`` is PEFT's ``lora_alpha``; the engine divides it by the rank. Raises ``BadModelFile``.
    """
    base = _base(base_gguf)
    plain = {tensor.name: tensor for tensor in base.tensors}
    heads = _heads(base)
    pairs: dict[str, dict[str, Any]] = {}
    for name, value in state.items():
        match = _ADAPTER.fullmatch(name)
        if match is None or _LAYER.fullmatch(f"{match[1]}.weight") is None:
            raise BadModelFile(f"{name!r} is no adapter of a matrix in a layer")
        pairs.setdefault(_name_of(f"{match[1]}.weight"), {})[match[2]] = value
    items: list[_Item] = []
    for name, pair in sorted(pairs.items()):
        if name not in plain or set(pair) != {"A", "B"}:
            raise BadModelFile(f"{name}: not in {base_gguf}, or half of a pair")
        inner, outer = plain[name].shape
        rank = pair["A"].shape[0]
        items += (
            _item(f"{name}.lora_a", _like(name, inner, rank), pair["A"], dtype, {}),
            _item(f"{name}.lora_b", _like(name, rank, outer), pair["B"], dtype, heads),
        )
    if not items:
        raise BadModelFile("the adapter has no weights")
    entries = [
        _entry("general.type", _TEXT, packed_string("adapter")),
        _entry("general.architecture", _TEXT, packed_string(ARCHITECTURE)),
        _entry("adapter.type", _TEXT, packed_string("lora")),
        _entry("adapter.lora.alpha", _FLOAT32, struct.pack("<f", alpha)),
    ]
    about = msgspec.structs.replace(base, values={})
    _write(path, about, b"".join(entries), len(entries), items)


# --- names and rows ---------------------------------------------------------------------------------------------------


def _base(path: Path) -> GgufFile:
    base = read_gguf(path)
    if base.values.get("general.architecture") != ARCHITECTURE:
        raise BadModelFile(f"{path} is of architecture {base.values.get('general.architecture')!r}, not {ARCHITECTURE}")
    if all(tensor.name != _EMBEDDING for tensor in base.tensors):
        raise BadModelFile(f"{path} has no {_EMBEDDING}")
    return base


def _heads(base: GgufFile) -> dict[str, int]:
    """How many heads the rows of q and of k are."""
    heads = base.number("llama.attention.head_count")
    shared = base.values.get("llama.attention.head_count_kv", heads)
    if not isinstance(shared, int):
        raise BadModelFile(f"{shared!r} heads of k")
    return {"attn_q": heads, "attn_k": shared}


def _renamed(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if _COMPUTED.fullmatch(name) is None:
            yield _name_of(name), value


def _name_of(name: str) -> str:
    """Its name in the file. A name that is not known comes back as it is, and fits no file."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _INSIDE:
        return name
    return f"blk.{int(match[1])}.{_INSIDE[match[2]]}.weight"


def _is_same(head: Any, embedding: Any) -> bool:
    if head is embedding or embedding is None:
        return head is embedding
    return bool(np.array_equal(_floats(head), _floats(embedding)))


def _like(name: str, first: int, second: int) -> GgufTensor:
    return GgufTensor(name=name, shape=(first, second), kind=0, at=0)


def _item(name: str, like: GgufTensor, value: Any, dtype: Dtype, heads: Mapping[str, int]) -> _Item:
    if tuple(value.shape) != like.shape[::-1]:
        raise BadModelFile(f"{name} has the shape {tuple(value.shape)}, not {like.shape[::-1]}")
    # What scales a channel is one row and stays exact: the engine takes it as f32 only.
    form: Dtype = "f32" if len(like.shape) == 1 else dtype
    part = name.split(".")[2] if name.startswith("blk.") else ""

    def make() -> Stored:
        rows = _floats(value)
        return _stored(name, paired(rows, heads[part]) if part in heads else rows, form)

    return _Item(name, like.shape, _KIND[form], make)


def _copied(tensor: GgufTensor, base: GgufFile, path: Path) -> _Item:
    """What the base computed for itself and no state dict has."""
    if tensor.kind != _KIND["f32"]:
        raise BadModelFile(f"{tensor.name} of {path} is not f32")

    def make() -> Stored:
        return np.fromfile(path, np.dtype("<f4"), math.prod(tensor.shape), offset=base.data_at + tensor.at)

    return _Item(tensor.name, tensor.shape, tensor.kind, make)


def paired(rows: Floats, heads: int) -> Floats:
    """The rows of each head with its two halves interleaved: what is rotated together comes to lie together."""
    if heads < 1 or rows.shape[0] % (2 * heads):
        raise BadModelFile(f"{rows.shape[0]} rows are not {heads} heads of two halves")
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


# --- numbers ----------------------------------------------------------------------------------------------------------


def _floats(value: Any) -> Floats:
    """Weights as numbers, also those of a tensor on another device or in a format that numpy does not have."""
    if hasattr(value, "detach"):
        value = value.detach().float().cpu().numpy()
    return np.asarray(value, np.float32)


def _stored(name: str, values: Floats, form: Dtype) -> Stored:
    with np.errstate(over="ignore"):
        stored: Stored = values.astype("<f2") if form == "f16" else values.astype("<f4", copy=False)
    # Also what became infinite just now.
    if not np.isfinite(stored).all():
        raise BadModelFile(f"{name} has numbers that are not finite, or too large for {form}")
    return _bfloat16(values) if form == "bf16" else stored


def _bfloat16(values: Floats) -> Stored:
    """The upper half of every number, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")


# --- the file ---------------------------------------------------------------------------------------------------------


def _entry(key: str, kind: int, value: bytes) -> bytes:
    return packed_string(key) + struct.pack("<I", kind) + value


def _with_file_type(base: GgufFile, file_type: int) -> bytes:
    """The base's metadata, which says of itself what most of its tensors are."""
    at = base.places.get("general.file_type")
    if at is None:
        return base.entries
    return base.entries[:at] + struct.pack("<I", file_type) + base.entries[at + 4 :]


def _write(path: Path, like: GgufFile, entries: bytes, entry_count: int, items: Sequence[_Item]) -> None:
    alignment = like.alignment
    listed: list[GgufTensor] = []
    at = 0
    for item in items:
        listed.append(GgufTensor(name=item.name, shape=item.shape, kind=item.kind, at=at))
        size = math.prod(item.shape) * _BYTES[item.kind]
        at += size + padding(size, alignment)
    head = b"GGUF" + struct.pack("<IQQ", like.version, len(items), entry_count) + entries + packed_tensors(listed)
    with written_file(path) as half, half.open("xb") as file:
        file.write(head + bytes(padding(len(head), alignment)))
        for item in items:
            data = np.ascontiguousarray(item.make())
            file.write(data.data)
            file.write(bytes(padding(data.nbytes, alignment)))
