"""A real model handed over as GGUF: what the embedded engine says of its tokens is what torch says of them."""

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
from prorld.train.llamacpp_files import Dtype, write_gguf
from tests.tokens.support import embedded_model

pytestmark = pytest.mark.real

PROMPTS = 4
TOKENS = 32
GAP_MAX = 0.05


def logprobs(model: Any, prompt: Sequence[int], sampled: Sequence[int]) -> Any:
    """What torch says of the sampled tokens."""
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(list(sampled))[:, None])[:, 0]


async def sampled(backend: EmbeddedBackend, prompts: Sequence[Sequence[int]]) -> list[Generation]:
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
