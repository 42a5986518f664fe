"""The model: opened from a Hugging Face directory or a GGUF file, and asked for log-probabilities of a pack."""

# The extra `torch` is not part of what this project is developed with.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from prorld.errors import ConfigError
from prorld.train.packing import Pack
from prorld.train.shapes import LearnSettings

__all__ = ["can_share", "device_of", "logprobs_of", "open_model", "quiet"]

# How many rows of logits are in float32 at once.
_CHUNK = 512


def device_of(wanted: str) -> Any:
    """``auto`` is a GPU where torch sees one."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(wanted)
    except RuntimeError as exc:
        raise ConfigError(f"torch knows no device {wanted!r}") from exc


def open_model(model: Path, settings: LearnSettings, device: Any) -> Any:
    """The model with frozen weights, without dropout: what it says is to be comparable with what an engine says."""
    is_gguf = model.suffix == ".gguf"
    if not model.exists():
        raise ConfigError(f"there is no {model}; a model is a directory of Hugging Face's form here, or a GGUF file")
    try:
        with quiet():
            opened = AutoModelForCausalLM.from_pretrained(
                model.parent if is_gguf else model,
                dtype=getattr(torch, settings.dtype),
                attn_implementation="sdpa",
                local_files_only=True,
                **(_unpacked(model) if is_gguf else {}),
            )
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{model} is no model that transformers can open: {exc}") from exc
    if is_gguf:
        # The weights came out whole, and what is written of them will be, too.
        opened.hf_quantizer = None
        if hasattr(opened.config, "quantization_config"):
            del opened.config.quantization_config
    if not all(part.is_floating_point() for part in opened.parameters()):
        raise ConfigError(f"{model} is quantised; what is trained has to have whole weights")
    return opened.to(device).eval().requires_grad_(requires_grad=False)


def _unpacked(model: Path) -> dict[str, Any]:
    """How transformers is told to open a GGUF file with weights that can be trained."""
    # Since versions that can compute with quantised weights, not doing so has to be asked for.
    config = getattr(transformers, "GgufConfig", None)
    whole = {} if config is None else {"quantization_config": config(dequantize=True)}
    return {"gguf_file": model.name, **whole}


def can_share(model: Any) -> bool:
    """Whether every layer can be told by a mask what a token may see. Sliding windows and recurrent states can't."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and getattr(config, "sliding_window", None) is None


def logprobs_of(model: Any, pack: Pack) -> tuple[Any, Any]:
    """The log-probability of each of ``pack.tokens`` at the temperature they were sampled at, and the entropy there."""
    device = next(model.parameters()).device
    sources = torch.tensor(pack.sources, device=device)
    logits = model(
        input_ids=torch.tensor([pack.ids], device=device),
        position_ids=torch.tensor([pack.depths], device=device),
        attention_mask=None if pack.is_one_strand else _mask(pack, device),
        use_cache=False,
        logits_to_keep=sources,
    ).logits[0]
    tokens = torch.tensor(pack.tokens, device=device)
    logprobs: list[Any] = []
    entropies: list[Any] = []
    for start in range(0, len(tokens), _CHUNK):
        piece = slice(start, start + _CHUNK)
        # A vocabulary in float32 is large: it is computed again for the gradient rather than kept.
        part = checkpoint(_chosen, logits[piece], tokens[piece], pack.temperature, use_reentrant=False)
        logprobs.append(part)
        with torch.no_grad():
            whole = torch.log_softmax(logits[piece].float() / pack.temperature, -1)
            entropies.append(-(whole.exp() * whole).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def _chosen(logits: Any, tokens: Any, temperature: float) -> Any:
    scaled = logits.float() / temperature
    return scaled.gather(1, tokens[:, None])[:, 0] - scaled.logsumexp(-1)


def _mask(pack: Pack, device: Any) -> Any:
    """True where the row's token may see the column's; see ``prorld.train.packing``."""
    place = torch.arange(len(pack.ids), device=device)
    ends = torch.tensor(pack.ends, device=device)
    seen = (place[None, :] <= place[:, None]) & (place[:, None] < ends[None, :])
    return seen[None, None]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars of transformers, which are for people who open models by hand."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
