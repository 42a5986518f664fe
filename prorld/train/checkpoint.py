"""What an exact resume needs, in one file: weights, the optimizer's moments, dice, and how many steps there were.

No pickles: a checkpoint from elsewhere can be wrong, but it can't run anything.
"""

# The extra `torch` is not part of what this project is developed with.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from prorld.train.errors import LearnError
from prorld.whole_file import written_file

__all__ = ["Kept", "read_checkpoint", "set_dice", "write_checkpoint"]

_FILE = "learner.safetensors"
_SCHEMA = 1
_DICE, _DICE_CUDA = "dice/cpu", "dice/cuda"


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What stands beside the tensors."""

    schema: int = _SCHEMA
    step_count: int


def write_checkpoint(directory: Path, kept: Kept, tensors: Mapping[str, Any]) -> None:
    """Into ``directory``, in place of what was there."""
    everything = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    everything[_DICE] = torch.get_rng_state()
    if torch.cuda.is_available():
        everything[_DICE_CUDA] = torch.cuda.get_rng_state()
    directory.mkdir(parents=True, exist_ok=True)
    with written_file(directory / _FILE) as half:
        save_file(everything, half, metadata={"prorld": msgspec.json.encode(kept).decode()})


def read_checkpoint(directory: Path) -> tuple[Kept, dict[str, Any]]:
    """What was kept, and the tensors."""
    path = directory / _FILE
    try:
        with safe_open(path, framework="pt") as file:
            kept = msgspec.json.decode((file.metadata() or {}).get("prorld", ""), type=Kept)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 # it is no mapping
    except (OSError, SafetensorError, msgspec.MsgspecError) as exc:
        raise LearnError(f"{path} can't be read: {exc}") from exc
    if _DICE not in tensors:
        raise LearnError(f"{path} is not of a learner")
    if kept.schema != _SCHEMA:
        raise LearnError(f"{path} is of schema {kept.schema}, and this prorld reads {_SCHEMA}")
    return kept, tensors


def set_dice(tensors: dict[str, Any]) -> None:
    """Have torch's random numbers go on where they were; takes their state out of ``tensors``."""
    torch.set_rng_state(tensors.pop(_DICE))
    if (cuda := tensors.pop(_DICE_CUDA, None)) is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)
