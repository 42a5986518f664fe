"""The learner on the small real model that comes along as a GGUF file."""

from __future__ import annotations

import json
import random

import msgspec
import pytest

from prorld.train.shapes import LearnSettings
from tests.tokens.support import embedded_model
from tests.train.support import group, naive_logprobs, opened, row, sample

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.real, pytest.mark.slow]

EXACT = LearnSettings(dtype="float32", learning_rate=2e-5)


def talk(seed=0):
    """A group over the whole vocabulary: one prompt, four answers, one of which goes on from a fork."""
    dice = random.Random(seed)
    prompt = [dice.randrange(3, 40_000) for _ in range(40)]
    answers = [[dice.randrange(3, 40_000) for _ in range(length)] for length in (5, 17, 24, 9)]
    samples = [sample(1.0 - 2 * (index % 2), row(prompt, answer), index=index) for index, answer in enumerate(answers)]
    fork = row(prompt + answers[0], [5, 6, 7, 8], branch=1)
    return group(msgspec.structs.replace(samples[0], rows=[*samples[0].rows, fork]), *samples[1:])


def test_packed_logprobs_of_a_real_model():
    """Thirty layers deep, a row in a pack still is what it is by itself; the shared tokens are computed once."""
    from prorld.train.batch import strands_of  # noqa: PLC0415
    from prorld.train.model import logprobs_of  # noqa: PLC0415
    from prorld.train.packing import pack  # noqa: PLC0415

    learner = opened(embedded_model(), EXACT)
    strands = strands_of([talk()], EXACT)[0]
    (made,) = pack(strands, tokens_max=1000)
    assert len(made.ids) < sum(len(strand.ids) for strand in strands) / 2
    with torch.no_grad():
        found = logprobs_of(learner.model, made)[0][torch.tensor(made.uses)]
        alone = [(naive_logprobs(learner.model, strand.ids), strand) for strand in sorted(strands, key=lambda s: s.ids)]
    wanted = torch.stack([logprobs[place - 1] for logprobs, strand in alone for place in strand.trained])
    assert float((found - wanted).abs().max()) < 1e-4


@pytest.mark.parametrize("lora_rank", [None, 8])
def test_a_real_model_learns_and_is_handed_over(tmp_path, lora_rank):
    """A step in bfloat16 does what was rewarded; the directory loads and says the same, tokenizer and head included.

    An adapter that is merged is rounded to bfloat16 once more: these are tokens of one in a hundred thousand.
    """
    learner = opened(embedded_model(), LearnSettings(learning_rate=1e-4, lora_rank=lora_rank))
    with torch.no_grad():
        prompt, answer = [1, 4093, 198, 19556, 2, 198], [504, 2988, 282]
        before = naive_logprobs(learner.model, prompt + answer)[len(prompt) - 1 :]
        given = row(prompt, answer, None, before.tolist())
    other = row(prompt, [17, 3000], None, [-10.0, -10.0])
    first = learner.step([group(sample(1.0, given), sample(-1.0, other, index=1))])
    second = learner.step([group(sample(1.0, given), sample(-1.0, other, index=1))])
    assert first.gap_max < 15
    assert 0 < first.entropy < 11
    with torch.no_grad():
        after = naive_logprobs(learner.model, prompt + answer)[len(prompt) - 1 :]
    assert float((after - before).sum()) > 0.1
    assert second.gradient_norm > 0
    path = learner.hand_over(tmp_path / "2", "weights")
    config = json.loads((path / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert "quantization_config" not in config
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        again = naive_logprobs(loaded, prompt + answer)[len(prompt) - 1 :]
    assert float((again - after).abs().max()) < (1e-5 if lora_rank is None else 0.5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>") == [1, 4093, 198, 6004, 2]


@pytest.mark.parametrize(("form", "lora_rank"), [("gguf", None), ("gguf-lora", 4)])
def test_a_real_model_is_handed_over_to_llama_cpp(tmp_path, form, lora_rank):
    """One file, named inside its directory; opened again by other code, a whole model says the same."""
    learner = opened(embedded_model(), LearnSettings(learning_rate=1e-4, lora_rank=lora_rank))
    learner.step([talk()])
    path = learner.hand_over(tmp_path / "1", form)
    assert path.parent == tmp_path / "1"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    if form == "gguf":
        ids = talk(1).samples[0].rows[0].token_ids
        again = opened(path, LearnSettings())
        with torch.no_grad():
            apart = naive_logprobs(again.model, ids) - naive_logprobs(learner.model, ids)
        assert float(apart.abs().max()) < 1e-3
    else:
        assert path.read_bytes()[:4] == b"GGUF"
