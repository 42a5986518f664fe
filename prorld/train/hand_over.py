"""What engines load: a whole model or an adapter, as directories for vLLM or as one file for llama.cpp."""

# The extra `torch` is not part of what this project is developed with.
# pyright: reportMissingImports=false

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from prorld.train.errors import LearnError
from prorld.train.llamacpp_files import BadModelFile, write_gguf, write_gguf_lora
from prorld.train.lora import adapter_state, adapters_of, write_adapter
from prorld.train.model import quiet
from prorld.train.shapes import Form
from prorld.whole_file import written_directory

__all__ = ["hand_over", "plain_state"]

# Of a model's directory, what is written anew.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def hand_over(model: Any, source: Path, directory: Path, form: Form) -> Path:
    """Write ``model``, which was opened from ``source``, into a new ``directory``; the path to name to an engine."""
    if form in {"lora", "gguf-lora"} and not adapters_of(model):
        raise LearnError(f"{form} can't be handed over without lora_rank")
    if form in {"gguf", "gguf-lora"} and source.suffix != ".gguf":
        raise LearnError(
            f"{form} can be handed over for a model that was opened from a GGUF file, and {source} is none"
        )
    try:
        with written_directory(directory) as half, quiet():
            match form:
                case "weights":
                    _write_model(model, source, half)
                case "lora":
                    write_adapter(model, half, base=str(source))
                case "gguf":
                    write_gguf(plain_state(model), source, half / "model.gguf")
                case "gguf-lora":
                    state, alpha = adapter_state(model)
                    write_gguf_lora(state, source, half / "adapter.gguf", alpha=alpha)
    except BadModelFile as exc:
        raise LearnError(str(exc)) from exc
    return directory / {"gguf": "model.gguf", "gguf-lora": "adapter.gguf"}.get(form, "")


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


def _write_model(model: Any, source: Path, directory: Path) -> None:
    tied = model.config.tie_word_embeddings
    model.config.tie_word_embeddings = False
    try:
        model.save_pretrained(directory, state_dict=plain_state(model))
    finally:
        model.config.tie_word_embeddings = tied
    _copy_tokenizer(source, directory)


def _copy_tokenizer(source: Path, directory: Path) -> None:
    if source.suffix == ".gguf":
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(directory)
        return
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHTS) and not (directory / file.name).exists():
            shutil.copyfile(file, directory / file.name)
