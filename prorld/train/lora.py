"""Low-rank adapters: small matrices beside the large ones, in the layout that PEFT writes and engines load."""

# The extra `torch` is not part of what this project is developed with.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from prorld.train.shapes import LearnSettings

__all__ = ["LoraLinear", "adapter_state", "adapters_of", "add_lora", "write_adapter"]

# An adapter adds ``B A x`` times this. PEFT names it by ``lora_alpha``, which is this times the rank.
_SCALE = 2.0


class LoraLinear(nn.Module):  # type: ignore[misc] # torch brings no types along
    """A linear layer that stays as it is, and what is learnt beside it. It begins as the layer alone."""

    def __init__(self, base: Any, rank: int, dice: Any) -> None:
        super().__init__()
        like = {"dtype": base.weight.dtype, "device": base.weight.device}
        first = torch.empty(rank, base.in_features)
        nn.init.kaiming_uniform_(first, a=math.sqrt(5), generator=dice)
        self.base = base
        self.lora_A = nn.Parameter(first.to(**like))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, **like))

    def forward(self, x: Any) -> Any:
        """As the layer, and a bit more."""
        return self.base(x) + _SCALE * nn.functional.linear(nn.functional.linear(x, self.lora_A), self.lora_B)

    def merged(self) -> Any:
        """The weight of a plain layer that does the same."""
        weight, first, second = (part.detach().float() for part in (self.base.weight, self.lora_A, self.lora_B))
        return (weight + _SCALE * second @ first).to(self.base.weight.dtype)


def add_lora(model: Any, settings: LearnSettings) -> dict[str, Any]:
    """Put an adapter beside every linear layer but the head; the parameters that are trained then."""
    rank = settings.lora_rank
    assert rank is not None
    dice = torch.Generator().manual_seed(settings.seed)
    head = model.get_output_embeddings()
    layers = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear) and part is not head]
    for name, layer in layers:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, LoraLinear(layer, rank, dice))
    return {name: part for name, part in model.named_parameters() if name.endswith((".lora_A", ".lora_B"))}


def adapters_of(model: Any) -> dict[str, LoraLinear]:
    """The adapters by the name of the layer they stand beside."""
    return {name: part for name, part in model.named_modules() if isinstance(part, LoraLinear)}


def adapter_state(model: Any) -> tuple[dict[str, Any], float]:
    """The adapters' matrices under PEFT's names, and its ``lora_alpha``."""
    adapters = adapters_of(model)
    tensors = {
        f"base_model.model.{name}.{part}.weight": getattr(layer, part).detach().cpu().contiguous()
        for name, layer in adapters.items()
        for part in ("lora_A", "lora_B")
    }
    return tensors, _SCALE * _rank(adapters)


def write_adapter(model: Any, directory: Path, *, base: str) -> None:
    """``adapter_config.json`` and ``adapter_model.safetensors``."""
    adapters = adapters_of(model)
    tensors, alpha = adapter_state(model)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": _rank(adapters),
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({name.rpartition(".")[2] for name in adapters}),
    }
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _rank(adapters: dict[str, LoraLinear]) -> int:
    return int(next(iter(adapters.values())).lora_A.shape[0])
