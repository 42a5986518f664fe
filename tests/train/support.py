"""Rows, groups and a tiny model with random weights, for the tests of the learner."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from prorld.domain.outcome import Verdict
from prorld.export.rows import Row
from prorld.train.shapes import LearnSettings, TrainGroup, TrainSample

VOCABULARY = 48
EXACT = LearnSettings(dtype="float32", learning_rate=1e-3, grad_norm_max=1e9)


def row(prompt: Sequence[int], response: Sequence[int], mask=None, logprobs=None, **about) -> Row:
    """A row whose tokens were all sampled, with log-probability -1 each, unless it is said otherwise."""
    mask = list(mask) if mask is not None else [1] * len(response)
    given = {
        "job_id": "job",
        "group_id": "group",
        "sample_index": 0,
        "branch": 0,
        "is_last": True,
        "versions": [1 if bit else None for bit in mask],
        "step_rewards": {},
        "finish_reason": "stop",
        "temperature": 1.0,
        "reward": 1.0,
        "verdict": Verdict.USE,
        **about,
    }
    return Row(
        prompt_ids=list(prompt),
        response_ids=list(response),
        response_mask=mask,
        response_logprobs=list(logprobs) if logprobs is not None else [-1.0 if bit else 0.0 for bit in mask],
        **given,
    )


def sample(advantage: float, *rows: Row, index: int = 0) -> TrainSample:
    """A rollout of these rows."""
    return TrainSample(sample_index=index, reward=advantage, advantage=advantage, rows=list(rows))


def group(*samples: TrainSample) -> TrainGroup:
    """A group of these rollouts."""
    return TrainGroup(group_id="group", staleness=0, samples=list(samples))


def tiny_model(directory: Path, *, tied: bool = True, seed: int = 0, **about) -> Path:
    """A Llama of two layers in a Hugging Face directory, made of dice, whose logits are far enough apart to matter."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    given = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        **about,
    }
    torch.manual_seed(seed)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**given)).save_pretrained(directory)
    (directory / "tokenizer_config.json").write_text('{"kept": "beside the weights"}')
    return directory


def naive_logprobs(model, ids: Sequence[int], *, temperature: float = 1.0):
    """The log-probability of each token after the first, computed as simply as it can be."""
    torch = pytest.importorskip("torch")
    logits = model(input_ids=torch.tensor([list(ids)])).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), torch.tensor(list(ids[1:]))]


def opened(model, settings: LearnSettings = EXACT):
    """A learner of it."""
    from prorld.train.learner import open_learner  # noqa: PLC0415 # torch may be missing

    return open_learner(model, settings)


def weights_of(learner):
    """Copies of the model's parameters."""
    return {name: tensor.detach().clone() for name, tensor in learner.model.named_parameters()}


def same(one, other):
    """Whether weights agree to the bit."""
    torch = pytest.importorskip("torch")
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def dice_groups(seed=0, *, count=2, size=4):
    """Groups with shared prompts, masks with holes, and a rollout of two rows, of which one goes on from a fork."""
    dice = random.Random(seed)

    def tokens(low, high):
        return [dice.randrange(3, VOCABULARY) for _ in range(dice.randint(low, high))]

    groups = []
    for _ in range(count):
        prompt = tokens(8, 16)
        samples = []
        for index in range(size):
            response = tokens(4, 20)
            mask = [1, *(int(dice.random() < 0.7) for _ in response[1:])]
            logprobs = [-dice.random() * 5 if bit else 0.0 for bit in mask]
            rows = [row(prompt, response, mask, logprobs, sample_index=index)]
            if index == 0:
                rows.append(row(prompt + response[:3], tokens(3, 6), sample_index=index, branch=1))
            samples.append(sample(dice.choice([-1.5, -0.5, 0.5, 1.5]), *rows, index=index))
        groups.append(group(*samples))
    return groups
