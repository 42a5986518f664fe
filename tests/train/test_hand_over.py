"""What is handed over is what the learner computes with, in the forms that transformers, PEFT and vLLM load."""

from __future__ import annotations

import json

import msgspec
import pytest

from prorld.train.shapes import LearnSettings
from tests.train.support import dice_groups, opened, tiny_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")
pytestmark = pytest.mark.real

SETTINGS = LearnSettings(learning_rate=1e-2, grad_norm_max=1e9)
IDS = [[3, 14, 15, 9, 26, 5]]


def logits(model):
    """What a model says to some tokens."""
    with torch.no_grad():
        return model(input_ids=torch.tensor(IDS)).logits


def plain(directory, dtype=torch.bfloat16):
    """The model in a directory, as transformers loads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa").eval()


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_says_the_same_when_it_is_loaded(tmp_path, tied):
    """To the bit, after steps that changed it; and its head is a tensor of its own, whatever it was."""
    source = tiny_model(tmp_path / "source", tied=tied)
    learner = opened(source, SETTINGS)
    first = logits(learner.model)
    learner.step(dice_groups())
    path = learner.hand_over(tmp_path / "out" / "1", "weights")
    assert path == tmp_path / "out" / "1"
    assert not torch.equal(logits(learner.model), first)
    assert torch.equal(logits(plain(path)), logits(learner.model))
    assert json.loads((path / "config.json").read_text())["tie_word_embeddings"] is False
    with safetensors.safe_open(path / "model.safetensors", "pt") as file:
        head, embeddings = file.get_tensor("lm_head.weight"), file.get_tensor("model.embed_tokens.weight")
    assert torch.equal(head, embeddings) == tied
    assert (path / "tokenizer_config.json").read_text() == '{"kept": "beside the weights"}'
    assert learner.model.config.tie_word_embeddings == tied


def test_before_the_first_step_it_is_the_model_that_was_opened(tmp_path):
    """What an engine has to be started from, so that later weights find the same tensors."""
    source = tiny_model(tmp_path / "source")
    path = opened(source, SETTINGS).hand_over(tmp_path / "0", "weights")
    assert torch.equal(logits(plain(path)), logits(plain(source)))


def test_a_handed_over_model_can_be_learnt_on(tmp_path):
    """A run may begin where another one ended."""
    learner = opened(tiny_model(tmp_path / "source"), SETTINGS)
    learner.step(dice_groups())
    other = opened(learner.hand_over(tmp_path / "1", "weights"), SETTINGS)
    assert torch.equal(logits(other.model), logits(learner.model))
    other.step(dice_groups())


@pytest.fixture
def adapted(tmp_path):
    """A learner of an adapter, after a step."""
    learner = opened(tiny_model(tmp_path / "source"), msgspec.structs.replace(SETTINGS, lora_rank=4, dtype="float32"))
    first = logits(learner.model)
    learner.step(dice_groups())
    learner.step(dice_groups(1))
    assert float((logits(learner.model) - first).abs().max()) > 0.1
    return learner


def test_an_adapter_begins_as_nothing(tmp_path):
    """The first hand-over of an adapter changes nothing."""
    source = tiny_model(tmp_path / "source")
    learner = opened(source, msgspec.structs.replace(SETTINGS, lora_rank=4))
    assert torch.equal(logits(learner.model), logits(plain(source)))


def test_an_adapter_merged_is_the_adapter_applied(adapted, tmp_path):
    """As whole weights it says the same, under the names of the model."""
    merged = plain(adapted.hand_over(tmp_path / "merged", "weights"), torch.float32)
    assert torch.allclose(logits(merged), logits(adapted.model), atol=1e-4)


def test_only_the_adapter_is_trained(adapted, tmp_path):
    """The model beneath is the one that was opened."""
    source = plain(tmp_path / "source", torch.float32)
    beneath = adapted.model.get_submodule("model.layers.1.mlp.down_proj").base.weight
    assert torch.equal(beneath, source.model.layers[1].mlp.down_proj.weight)
    names = [name for name, part in adapted.model.named_parameters() if part.requires_grad]
    # Seven linear layers in each of two, two matrices each.
    assert len(names) == 28
    assert all("lora_" in name for name in names)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_peft_loads_an_adapter(adapted, tmp_path):
    """With the model it was made for, PEFT says what the learner says, and so does PEFT's own merge."""
    peft = pytest.importorskip("peft")
    path = adapted.hand_over(tmp_path / "adapter", "lora")
    assert {file.name for file in path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    loaded = peft.PeftModel.from_pretrained(plain(tmp_path / "source", torch.float32), path)
    assert torch.allclose(logits(loaded), logits(adapted.model), atol=1e-5)
    assert torch.allclose(logits(loaded.merge_and_unload()), logits(adapted.model), atol=1e-4)
