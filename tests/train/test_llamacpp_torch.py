"""A real model handed over as GGUF, whole or as an adapter: the embedded engine says of its tokens what torch says."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from prorld.domain.job import Sampling
from prorld.domain.versions import PolicyVersion
from prorld.inference.contract import Generation, GenerationRequest, WeightRef
from prorld.inference.embedded_backend import EmbeddedBackend, run_embedded_backend
from prorld.train.llamacpp_files import Dtype, write_gguf, write_gguf_lora
from tests.tokens.support import embedded_model

pytestmark = pytest.mark.real

PROMPTS = 4
TOKENS = 32
GAP_MAX = 0.05
EXACT_GAP_MAX = 0.01
FOUR_BITS_GAP_MAX = 0.15
RANK, ALPHA = 4, 8.0


def logprobs(model: Any, prompt: Sequence[int], sampled: Sequence[int]) -> Any:
    """What torch says of the sampled tokens."""
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(list(sampled))[:, None])[:, 0]


async def sampled(
    backend: EmbeddedBackend, prompts: Sequence[Sequence[int]], adapter: str | None = None
) -> list[Generation]:
    """One generation each, at a temperature of 1."""
    return [
        await backend.generate(
            GenerationRequest(
                token_ids=array("i", prompt),
                max_tokens=TOKENS,
                sampling=Sampling(temperature=1.0),
                stop_token_ids=(),
                request_id="r",
                session="s",
                seed=number,
                adapter=adapter,
            )
        )
        for number, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
async def test_the_engine_and_torch_agree_on_the_same_weights(tmp_path: Path, dtype: Dtype) -> None:
    """As they are and moved a little, the engine's log-probabilities are torch's, and those of no other weights."""
    pytest.importorskip("xllamacpp")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    base = embedded_model()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(base.parent), gguf_file=base.name, dtype=torch.float32
    )
    other = transformers.AutoModelForCausalLM.from_pretrained(
        str(base.parent), gguf_file=base.name, dtype=torch.float32
    )
    dice = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1000, 40_000, (24,), generator=dice).tolist() for _ in range(PROMPTS)]
    async with trio.open_nursery() as nursery:
        backend: EmbeddedBackend = await nursery.start(
            partial(run_embedded_backend, slots=1, context_per_slot=256, threads=1)
        )
        await backend.probe()
        for version in (1, 2):
            path = tmp_path / f"{version}.gguf"
            write_gguf(model.state_dict(), base, path, dtype=dtype)
            ref = WeightRef(how="reload", path=str(path), version=PolicyVersion(0, version))
            await backend.load_weights(ref)
            path.unlink()
            gaps, others = [], []
            for prompt, said in zip(prompts, await sampled(backend, prompts), strict=True):
                engine = torch.tensor(list(said.logprobs))
                gaps.append((logprobs(model, prompt, said.token_ids) - engine).abs())
                others.append((logprobs(other, prompt, said.token_ids) - engine).abs())
            gap, apart = torch.cat(gaps).mean().item(), torch.cat(others).mean().item()
            assert gap < GAP_MAX
            if version == 1:
                with torch.no_grad():
                    for weights in model.parameters():
                        weights.add_(0.05 * weights.std() * torch.randn(weights.shape, generator=dice))
            else:
                assert apart > 3 * gap
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("is_reloaded", [False, True])
async def test_the_engine_with_an_adapter_agrees_with_torch_on_merged_weights(
    tmp_path: Path, is_reloaded: bool
) -> None:
    """Beside the bundled weights, which the engine computes in four bits, and beside such that were loaded as f32."""
    pytest.importorskip("xllamacpp")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    base = embedded_model()
    plain, merged = (
        transformers.AutoModelForCausalLM.from_pretrained(str(base.parent), gguf_file=base.name, dtype=torch.float32)
        for _ in range(2)
    )
    dice = torch.Generator().manual_seed(0)
    adapter = _adapter(torch, merged, dice)
    prompts = [torch.randint(1000, 40_000, (24,), generator=dice).tolist() for _ in range(PROMPTS)]
    async with trio.open_nursery() as nursery:
        backend: EmbeddedBackend = await nursery.start(
            partial(run_embedded_backend, slots=1, context_per_slot=256, threads=1)
        )
        await backend.probe()
        if is_reloaded:
            write_gguf(plain.state_dict(), base, tmp_path / "base.gguf", dtype="f32")
            ref = WeightRef(how="reload", path=str(tmp_path / "base.gguf"), version=PolicyVersion(0, 1))
            await backend.load_weights(ref)
        write_gguf_lora(adapter, base, tmp_path / "adapter.gguf", alpha=ALPHA)
        ref = WeightRef(how="lora", path=str(tmp_path / "adapter.gguf"), version=PolicyVersion(0, 2), name="two")
        await backend.load_weights(ref)
        gaps, others = [], []
        for prompt, said in zip(prompts, await sampled(backend, prompts, "two"), strict=True):
            engine = torch.tensor(list(said.logprobs))
            gaps.append((logprobs(merged, prompt, said.token_ids) - engine).abs())
            others.append((logprobs(plain, prompt, said.token_ids) - engine).abs())
        gap, apart = torch.cat(gaps).mean().item(), torch.cat(others).mean().item()
        assert gap < (EXACT_GAP_MAX if is_reloaded else FOUR_BITS_GAP_MAX)
        assert apart > (20 if is_reloaded else 2) * gap
        nursery.cancel_scope.cancel()


def _adapter(torch: Any, model: Any, dice: Any) -> dict[str, Any]:
    """An adapter of every matrix in a layer, under PEFT's names; the same is added to the model's weights."""
    made = {}
    for name, weights in model.named_parameters():
        if "_proj.weight" in name:
            first, second = (
                0.03 * torch.randn(shape, generator=dice)
                for shape in ((RANK, weights.shape[1]), (weights.shape[0], RANK))
            )
            plain = f"base_model.model.{name.removesuffix('.weight')}"
            made[f"{plain}.lora_A.weight"], made[f"{plain}.lora_B.weight"] = first, second
            with torch.no_grad():
                weights.add_(ALPHA / RANK * second @ first)
    return made
