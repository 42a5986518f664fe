"""Steps on a tiny model: what is computed is what was meant, and what can't be is refused."""

from __future__ import annotations

import msgspec
import pytest

from prorld.train.errors import LearnError, NotFinite, NothingToLearn
from prorld.train.shapes import LearnSettings
from tests.train.support import (
    EXACT,
    VOCABULARY,
    dice_groups,
    group,
    naive_logprobs,
    opened,
    row,
    same,
    sample,
    tiny_model,
    weights_of,
)

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model's directory."""
    return tiny_model(tmp_path_factory.mktemp("model"))


def gradients_of(learner, groups, settings):
    """The gradient of a step, by where the masters would go: plain descent instead of Adam."""
    taken = {}

    def caught():
        taken.update({name: master.grad.clone() for name, master in learner._weights._masters.items()})
        return 0.0

    learner._weights.move = caught
    figures = learner.step(groups)
    return figures, taken


def naive_gradients(model, groups, settings):
    """The same with autograd alone: row by row, token by token, as the formula says it."""
    transformers = pytest.importorskip("transformers")
    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    samples = [one for each in groups for one in each.samples]
    sizes = [sum(sum(given.response_mask) for given in one.rows) for one in samples]
    total = torch.zeros(())
    for one, size in zip(samples, sizes, strict=True):
        weight = 1 / sum(sizes) if settings.loss == "token" else 1 / (len(samples) * size)
        for given in one.rows:
            logprobs = naive_logprobs(plain, given.token_ids)[len(given.prompt_ids) - 1 :]
            recorded = torch.tensor(given.response_logprobs)
            importance = torch.exp(logprobs.detach() - recorded).clamp(max=settings.importance_max)
            term = importance * torch.exp(logprobs - logprobs.detach()) * one.advantage
            total = total - weight * (term * torch.tensor(given.response_mask)).sum()
    total.backward()
    return float(total.detach()), {name: part.grad for name, part in plain.named_parameters()}


@pytest.mark.parametrize("tokens_max", [512, 40], ids=["whole", "split"])
def test_packed_logprobs_are_those_of_each_row(model, tokens_max):
    """Nothing that shares a pack with a row can be seen from it; also where a group is split."""
    from prorld.train.batch import strands_of  # noqa: PLC0415
    from prorld.train.model import logprobs_of  # noqa: PLC0415
    from prorld.train.packing import pack  # noqa: PLC0415

    learner = opened(model)
    compared = 0
    for strands in strands_of(dice_groups(), EXACT):
        packs = list(pack(strands, tokens_max=tokens_max))
        assert (len(packs) > 1) == (tokens_max == 40)
        found = []
        for made in packs:
            logprobs, entropies = logprobs_of(learner.model, made)
            assert bool((entropies > 0).all())
            found += logprobs[torch.tensor(made.uses)].tolist()
        wanted = []
        for strand in sorted(strands, key=lambda strand: strand.ids):
            alone = naive_logprobs(learner.model, strand.ids).tolist()
            wanted += [alone[place - 1] for place in strand.trained]
        assert found == pytest.approx(wanted, abs=1e-5)
        compared += len(found)
    assert compared > 50


@pytest.mark.parametrize("loss", ["token", "sample"])
@pytest.mark.parametrize("tokens_max", [512, 40])
def test_the_gradient_is_that_of_the_formula(model, loss, tokens_max):
    """Packed, split, shared, weighed: the same gradient as row by row."""
    settings = msgspec.structs.replace(EXACT, loss=loss, tokens_max=tokens_max)
    groups = dice_groups()
    figures, found = gradients_of(opened(model, settings), groups, settings)
    total, wanted = naive_gradients(model, groups, settings)
    assert figures.loss == pytest.approx(total, abs=1e-5)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.allclose(found[name], gradient, atol=1e-6, rtol=1e-4), name


def test_tokens_that_were_not_sampled_have_no_gradient(model):
    """What the loss is told of a masked token changes nothing; what it is told of a sampled one does."""
    mask = [1, 0, 0, 1]

    def gradient(logprobs):
        groups = [group(sample(1.0, row([3, 4], [5, 6, 7, 8], mask, logprobs)))]
        return gradients_of(opened(model), groups, EXACT)[1]

    base = gradient([-9.0, 0.0, 0.0, -9.0])
    assert same(base, gradient([-9.0, -3.0, -4.0, -9.0]))
    assert not same(base, gradient([-9.0, 0.0, 0.0, -2.5]))


def test_a_masked_last_token_teaches_nothing(model):
    """Which one it is makes no difference to the step."""
    figures, base = gradients_of(opened(model), [group(sample(1.0, row([3], [5, 6], [1, 0])))], EXACT)
    assert figures.tokens_trained == figures.tokens_computed == 1
    assert same(base, gradients_of(opened(model), [group(sample(1.0, row([3], [5, 7], [1, 0])))], EXACT)[1])


def test_the_figures_say_how_far_engine_and_trainer_are_apart(model):
    """Recorded as the trainer has it the gap is nothing; a known error shows as what it is."""
    learner = opened(model)
    ids = [3, 4, 5, 6, 7]
    own = naive_logprobs(learner.model, ids).tolist()[1:]
    wrong = [own[0] - 0.75, *own[1:]]
    exact = learner.step([group(sample(1.0, row(ids[:2], ids[2:], None, own)))])
    assert (exact.gap, exact.gap_max) == (pytest.approx(0, abs=1e-5), pytest.approx(0, abs=1e-5))
    assert exact.tokens_trained == 3
    assert exact.tokens_computed == 4
    assert exact.loss == pytest.approx(-1, abs=1e-4)
    off = opened(model).step([group(sample(1.0, row(ids[:2], ids[2:], None, wrong)))])
    assert (off.gap, off.gap_max) == (pytest.approx(0.25, abs=1e-4), pytest.approx(0.75, abs=1e-4))


def test_a_temperature_is_that_of_the_policy(model):
    """What was sampled at a temperature is compared with what the model says at that temperature."""
    learner = opened(model)
    ids = [3, 4, 5, 6]
    own = naive_logprobs(learner.model, ids, temperature=0.5).tolist()[1:]
    given = row(ids[:2], ids[2:], None, own, temperature=0.5, logprobs_mode="processed")
    assert learner.step([group(sample(1.0, given))]).gap == pytest.approx(0, abs=1e-5)


def test_the_clip_bites_in_later_passes(model):
    """One pass starts where it ends, so nothing is clipped; further ones go no further than the clip."""
    groups = dice_groups()
    fast = msgspec.structs.replace(EXACT, learning_rate=0.02)
    assert opened(model, fast).step(groups).clipped == 0
    learner = opened(model, msgspec.structs.replace(fast, passes=4))
    figures = learner.step(groups)
    assert 0 < figures.clipped < 1
    assert learner.step_count == 1


@pytest.mark.parametrize("passes", [1, 3])
def test_a_step_that_is_not_finite_changes_nothing(model, passes):
    """Whichever pass fails: weights, moments and the count are those from before, and the next step is what it was."""
    settings = msgspec.structs.replace(EXACT, passes=passes)
    learner, other = opened(model, settings), opened(model, settings)
    groups = dice_groups()
    for each in (learner, other):
        each.step(groups)
    before, move, calls = weights_of(learner), learner._weights.move, []

    def move_badly():
        calls.append(1)
        if len(calls) == passes:
            next(iter(learner._weights._masters.values())).grad[0] = float("nan")
        return move()

    learner._weights.move = move_badly
    with pytest.raises(NotFinite, match="gradient is nan"):
        learner.step(groups)
    learner._weights.move = move
    assert same(weights_of(learner), before)
    assert learner.step_count == 1
    learner.step(groups)
    other.step(groups)
    assert same(weights_of(learner), weights_of(other))


def test_a_loss_that_is_not_finite_is_refused(model):
    """A broken weight shows at once."""
    learner = opened(model)
    with torch.no_grad():
        learner.model.get_input_embeddings().weight[5, 0] = float("inf")
    with pytest.raises(NotFinite, match="loss of a pack"):
        learner.step([group(sample(1.0, row([3, 5], [5, 6])))])
    assert learner.step_count == 0


def test_a_step_with_nothing_to_learn_changes_nothing(model):
    """Momentum of earlier steps does not move it on."""
    learner = opened(model)
    learner.step(dice_groups())
    before = weights_of(learner)
    with pytest.raises(NothingToLearn):
        learner.step([group(sample(0.0, row([3], [4])))])
    assert same(weights_of(learner), before)
    assert learner.step_count == 1


def test_the_norm_of_a_step_is_bounded(model):
    """The figure is the norm before the bound."""
    seen = []
    for bound in (1e9, 1e-3):
        learner = opened(model, msgspec.structs.replace(EXACT, grad_norm_max=bound))
        step = learner._weights._optimizer.step

        def watched(learner=learner, step=step):
            masters = learner._weights._masters.values()
            seen.append(float(sum(master.grad.square().sum() for master in masters).sqrt()))
            step()

        learner._weights._optimizer.step = watched
        assert learner.step(dice_groups()).gradient_norm == pytest.approx(seen[0])
    assert seen[0] > 1e-2
    assert seen[1] == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("lora_rank", [None, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_rewarded_becomes_likely(model, dtype, lora_rank):
    """A bandit: one answer of 48 is good. Sampled by the model itself, it is nearly always given after some steps."""
    learning_rate = 1e-2 if lora_rank else 3e-3
    settings = LearnSettings(dtype=dtype, learning_rate=learning_rate, lora_rank=lora_rank, passes=2)
    learner = opened(model, settings)
    dice = torch.Generator().manual_seed(0)
    prompt, good = [3, 4, 5], 17

    def policy():
        with torch.no_grad():
            return torch.log_softmax(learner.model(input_ids=torch.tensor([prompt])).logits[0, -1].float(), -1)

    first = float(policy()[good].exp())
    for _ in range(60):
        logprobs = policy()
        drawn = torch.multinomial(logprobs.exp(), 64, replacement=True, generator=dice).tolist()
        rewards = torch.tensor([float(token == good) for token in drawn])
        if rewards.std() == 0:
            continue
        advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()
        rows = [row(prompt, [token], None, [float(logprobs[token])]) for token in drawn]
        learner.step([group(*(sample(a, r) for a, r in zip(advantages, rows, strict=True)))])
    assert first < 0.1
    assert float(policy()[good].exp()) > 0.7


def test_small_steps_add_up_in_bfloat16(model):
    """Steps too small for bfloat16 are not lost: their masters move, and in time so does what they round to."""
    learner = opened(model, LearnSettings(learning_rate=1e-6))
    before = weights_of(learner)
    groups = dice_groups()
    learner.step(groups)
    masters = learner._weights._masters
    assert all(not torch.equal(masters[name], tensor.float()) for name, tensor in before.items() if "norm" not in name)
    assert sum(torch.equal(tensor, before[name]) for name, tensor in weights_of(learner).items()) > 0
    for name, tensor in weights_of(learner).items():
        assert torch.equal(tensor, masters[name].to(torch.bfloat16))


def test_models_that_a_mask_can_not_tell_are_computed_row_by_row(tmp_path):
    """A window that slides over the pack would see other rows: such models share nothing."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2, use_sliding_window=True,
        sliding_window=4, max_window_layers=1,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    groups = dice_groups()
    figures, found = gradients_of(opened(tmp_path), groups, EXACT)
    _, wanted = naive_gradients(tmp_path, groups, EXACT)
    assert figures.tokens_computed > 150
    for name, gradient in wanted.items():
        assert torch.allclose(found[name], gradient, atol=1e-6, rtol=1e-4), name


def test_memory_is_bounded_by_the_longest_pack(model):
    """However many rows a group has, the model is never given more tokens at once."""
    learner = opened(model, msgspec.structs.replace(EXACT, tokens_max=64))
    lengths = []
    learner.model.register_forward_pre_hook(
        lambda _module, _args, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    figures = learner.step(dice_groups(size=16))
    assert sum(lengths) == figures.tokens_computed > 256
    assert max(lengths) <= 64


def test_threads_are_set(model):
    """For the whole process: more than asked for would wait for each other."""
    opened(model)
    assert torch.get_num_threads() == 1


def test_what_is_no_model_is_told(tmp_path):
    """With the path, not with a traceback out of a library."""
    from prorld.errors import ConfigError  # noqa: PLC0415

    with pytest.raises(ConfigError, match=str(tmp_path)):
        opened(tmp_path)
    with pytest.raises(ConfigError, match=r"there is no .*elsewhere; a model is a directory"):
        opened(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="no device 'abacus'"):
        opened(tmp_path, LearnSettings(device="abacus"))


def test_forms_that_can_not_be_are_refused(model, tmp_path):
    """An adapter of a learner without one, or a file for llama.cpp of a model that was none."""
    for form, words in (("lora", "without lora_rank"), ("gguf-lora", "without lora_rank"), ("gguf", "a GGUF file")):
        with pytest.raises(LearnError, match=words):
            opened(model).hand_over(tmp_path / "out", form)
    assert not (tmp_path / "out").exists()
