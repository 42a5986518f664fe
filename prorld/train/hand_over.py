"""What engines load: a whole model as a Hugging Face directory, or an adapter beside it."""

# The extra `torch` is not part of what this project is developed with.
# pyright: reportMissingImports=false

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from prorld.train.files import written_directory
from prorld.train.lora import adapters_of, write_adapter
from prorld.train.model import quiet

__all__ = ["plain_state", "write_lora", "write_model"]

# Of a model's directory, what is written anew.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def plain_state(model: Any) -> dict[str, Any]:
    """The weights under the names that the model had before adapters, with these merged in, and with a head of its own.

    CPU builds of vLLM keep a copy of a tied head that new weights do not reach: such an engine would go on with the old
    head and say that all is well. So the head is written as a tensor of its own.
    """
    adapters = adapters_of(model)
    state: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        layer, _, part = name.rpartition(".")
        if part in {"lora_A", "lora_B"}:
            continue
        beside = layer.removesuffix(".base")
        if beside in adapters:
            tensor = adapters[beside].merged() if part == "weight" else tensor  # noqa: PLW2901
            layer = beside
        state[f"{layer}.{part}"] = tensor.detach().cpu()
    head = model.get_output_embeddings().weight
    if head is model.get_input_embeddings().weight:
        for name, part in model.named_modules():
            if part is model.get_output_embeddings():
                state[f"{name}.weight"] = head.detach().cpu().clone()
    return state


def write_model(model: Any, source: Path, directory: Path) -> None:
    """A directory that transformers and vLLM load, with the tokenizer that ``source`` has."""
    tied = model.config.tie_word_embeddings
    model.config.tie_word_embeddings = False
    try:
        with written_directory(directory) as half, quiet():
            model.save_pretrained(half, state_dict=plain_state(model))
            _copy_tokenizer(source, half)
    finally:
        model.config.tie_word_embeddings = tied


def write_lora(model: Any, source: Path, directory: Path) -> None:
    """A directory that PEFT and vLLM load as an adapter."""
    with written_directory(directory) as half:
        write_adapter(model, half, base=str(source))


def _copy_tokenizer(source: Path, directory: Path) -> None:
    if source.suffix == ".gguf":
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(directory)
        return
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHTS) and not (directory / file.name).exists():
            shutil.copyfile(file, directory / file.name)
