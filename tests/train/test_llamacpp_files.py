"""GGUF files out of a trainer's weights: what stands in them, what is refused, and what llama.cpp makes of them."""

from __future__ import annotations

from array import array
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import trio

from prorld.domain.job import Sampling
from prorld.domain.versions import PolicyVersion
from prorld.inference.contract import GenerationRequest, WeightRef
from prorld.inference.embedded_backend import EmbeddedBackend, run_embedded_backend
from prorld.train.gguf_layout import read_gguf
from prorld.train.llamacpp_files import BadModelFile, Dtype, paired, write_gguf, write_gguf_lora
from tests.train.tiny_gguf import CONTEXT, HEADS, HIDDEN, LAYERS, PER_HEAD, SHARED, state, tiny_base

QUERY = "model.layers.0.self_attn.q_proj"


def numbers(path: Path, name: str) -> np.ndarray:
    """A tensor as it stands in the file."""
    about = read_gguf(path)
    (found,) = (tensor for tensor in about.tensors if tensor.name == name)
    form = {0: "<f4", 1: "<f2", 30: "<u2"}[found.kind]
    count = int(np.prod(found.shape))
    return np.fromfile(path, form, count, offset=about.data_at + found.at).reshape(found.shape[::-1])


def rotated_halves(rows: np.ndarray, at: int, heads: int) -> np.ndarray:
    """Hugging Face's rotation: the first half of a head with the second."""
    angles = at * 10000.0 ** (-np.arange(PER_HEAD // 2) * 2 / PER_HEAD)
    parts = rows.reshape(heads, 2, PER_HEAD // 2)
    low, high = parts[:, 0], parts[:, 1]
    turned = np.stack([low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)], 1)
    return turned.reshape(heads, PER_HEAD)


def logprobs(weights: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """The log-probabilities after each token, by the model's published formula in 64 bits."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"]

    x = w["model.embed_tokens.weight"][ids]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        h = norm(x, f"{at}.input_layernorm")
        q, k, v = (h @ w[f"{at}.self_attn.{part}_proj.weight"].T for part in "qkv")
        q = np.stack([rotated_halves(row, place, HEADS) for place, row in enumerate(q)])
        k = np.stack([rotated_halves(row, place, SHARED) for place, row in enumerate(k)])
        k, v = (np.repeat(part.reshape(len(ids), SHARED, PER_HEAD), HEADS // SHARED, 1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(PER_HEAD)
        scores = np.where(np.tril(np.ones((len(ids), len(ids)), bool)), scores, -np.inf)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", share, v).reshape(len(ids), HIDDEN) @ w[f"{at}.self_attn.o_proj.weight"].T
        h = norm(x, f"{at}.post_attention_layernorm")
        gate, up = (h @ w[f"{at}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}.mlp.down_proj.weight"].T
    logits = norm(x, "model.norm") @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


# --- what stands in the file ------------------------------------------------------------------------------------------


def test_the_file_has_the_base_metadata_to_the_bit_and_the_new_weights(tmp_path: Path) -> None:
    """Only what the file says of its own number format changes; rope factors of the base are kept."""
    base, made = tiny_base(tmp_path / "base.gguf", rope=True), tmp_path / "made.gguf"
    weights = state() | {"model.rotary_emb.inv_freq": np.ones(4, np.float32)}
    write_gguf(weights, base, made, dtype="f16")
    before, after = read_gguf(base), read_gguf(made)
    at = before.places["general.file_type"]
    assert after.values["general.file_type"] == 1
    assert after.entries[:at] + after.entries[at + 4 :] == before.entries[:at] + before.entries[at + 4 :]
    assert sorted(tensor.name for tensor in after.tensors) == sorted(tensor.name for tensor in before.tensors)
    assert np.array_equal(numbers(made, "token_embd.weight"), weights["model.embed_tokens.weight"].astype("<f2"))
    assert numbers(made, "output_norm.weight").dtype == np.float32
    assert np.array_equal(numbers(made, "rope_freqs.weight"), np.full(PER_HEAD // 2, 2.0))
    assert all((after.data_at + tensor.at) % 32 == 0 for tensor in after.tensors)
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".half"] == []


def test_interleaved_rows_rotate_as_halves_do() -> None:
    """What q and k say of each other at any distance is the same in both orders."""
    dice = np.random.default_rng(1)
    q, k = (dice.standard_normal((HIDDEN, 1)).astype(np.float32) for _ in range(2))

    def neighbours(rows: np.ndarray, at: int) -> np.ndarray:
        angles = at * 10000.0 ** (-np.arange(PER_HEAD // 2) * 2 / PER_HEAD)
        pairs = rows.reshape(HEADS, PER_HEAD // 2, 2)
        turned = pairs[..., 0] + 1j * pairs[..., 1]
        turned = turned * np.exp(1j * angles)
        return np.stack([turned.real, turned.imag], -1).reshape(HEADS, PER_HEAD)

    for distance in (0, 1, 17):
        mine = (rotated_halves(q, distance, HEADS) * rotated_halves(k, 0, HEADS)).sum(-1)
        theirs = (neighbours(paired(q, HEADS), distance) * neighbours(paired(k, HEADS), 0)).sum(-1)
        assert np.allclose(mine, theirs, atol=1e-5)


def test_a_head_is_written_where_it_differs(tmp_path: Path) -> None:
    """A copy of the embeddings is none of its own; a base that has one must be given one."""
    base, made = tiny_base(tmp_path / "base.gguf"), tmp_path / "made.gguf"
    tied = state() | {"lm_head.weight": state()["model.embed_tokens.weight"].copy()}
    write_gguf(tied, base, made)
    assert "output.weight" not in {tensor.name for tensor in read_gguf(made).tensors}
    write_gguf(tied | {"lm_head.weight": 2 * tied["lm_head.weight"]}, base, made, dtype="f32")
    assert np.array_equal(numbers(made, "output.weight"), 2 * tied["lm_head.weight"])
    untied = tiny_base(tmp_path / "untied.gguf", head=True)
    write_gguf(tied, untied, made, dtype="f32")
    assert np.array_equal(numbers(made, "output.weight"), tied["lm_head.weight"])
    with pytest.raises(BadModelFile, match=r"missing \['output\.weight'\]"):
        write_gguf(state(), untied, made)


def test_bfloat16_is_rounded_to_the_nearest(tmp_path: Path) -> None:
    """Ties go to the even number, as hardware does it."""
    base, made = tiny_base(tmp_path / "base.gguf"), tmp_path / "made.gguf"
    weights = state()
    weights["model.embed_tokens.weight"][0, :4] = [1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-7]
    write_gguf(weights, base, made, dtype="bf16")
    found = (numbers(made, "token_embd.weight").astype(np.uint32) << 16).view(np.float32)
    assert found[0, :4].tolist() == [1.0, 1.0, 1 + 2**-6, -1 - 2**-7]
    assert np.abs(found / weights["model.embed_tokens.weight"] - 1).max() <= 2**-8


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_what_is_no_number_is_refused_and_nothing_is_left(tmp_path: Path, value: float) -> None:
    """The file of before stays, and no half of a new one lies beside it."""
    base, made = tiny_base(tmp_path / "base.gguf"), tmp_path / "made.gguf"
    made.write_bytes(b"before")
    weights = state()
    weights["model.layers.1.mlp.down_proj.weight"][3, 3] = value
    with pytest.raises(BadModelFile, match=r"blk\.1\.ffn_down"):
        write_gguf(weights, base, made, dtype="f16")
    assert made.read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base.gguf", "made.gguf"]


def test_weights_that_do_not_fit_the_base_are_refused(tmp_path: Path) -> None:
    """Missing, unknown, of another shape, or of another architecture."""
    base, made = tiny_base(tmp_path / "base.gguf"), tmp_path / "made.gguf"
    less = state()
    del less[f"{QUERY}.weight"]
    for weights, words in (
        (less, "missing"),
        (state() | {"model.layers.0.self_attn.q_proj.bias": np.zeros(HIDDEN)}, "unknown"),
        (state() | {f"{QUERY}.weight": np.zeros((HIDDEN, HIDDEN + 1))}, "shape"),
    ):
        with pytest.raises(BadModelFile, match=words):
            write_gguf(weights, base, made)
    with pytest.raises(BadModelFile, match="architecture"):
        write_gguf(state(), tiny_base(tmp_path / "other.gguf", architecture="qwen2"), made)
    assert not made.exists()


def test_a_damaged_base_is_refused(tmp_path: Path) -> None:
    """Cut short anywhere before its data, or with lengths that can't be."""
    base, cut = tiny_base(tmp_path / "base.gguf"), tmp_path / "cut.gguf"
    whole = base.read_bytes()
    for size in range(0, read_gguf(base).data_at - 64, 97):
        cut.write_bytes(whole[:size])
        with pytest.raises(BadModelFile):
            read_gguf(cut)
    for at in (8, 16, 24):
        cut.write_bytes(whole[:at] + b"\xff" * 8 + whole[at + 8 :])
        with pytest.raises(BadModelFile):
            read_gguf(cut)


def test_an_adapter_has_both_halves_in_their_order(tmp_path: Path) -> None:
    """The rows of the second half of q are interleaved as those of q are."""
    base, made = tiny_base(tmp_path / "base.gguf"), tmp_path / "adapter.gguf"
    dice = np.random.default_rng(2)
    first, second = dice.standard_normal((4, HIDDEN)), dice.standard_normal((HIDDEN, 4))
    name = f"base_model.model.{QUERY}"
    adapter = {f"{name}.lora_A.weight": first, f"{name}.lora_B.default.weight": second}
    write_gguf_lora(adapter, base, made, alpha=8.0)
    about = read_gguf(made)
    assert (about.values["general.type"], about.values["adapter.lora.alpha"]) == ("adapter", 8.0)
    assert np.allclose(numbers(made, "blk.0.attn_q.weight.lora_a"), first, atol=1e-6)
    assert np.allclose(numbers(made, "blk.0.attn_q.weight.lora_b"), paired(second.astype("f4"), HEADS))
    with pytest.raises(BadModelFile, match="half of a pair"):
        write_gguf_lora({f"{name}.lora_A.weight": first}, base, made, alpha=8.0)
    with pytest.raises(BadModelFile, match="no adapter"):
        write_gguf_lora({"model.embed_tokens.lora_embedding_A": first}, base, made, alpha=8.0)


# --- what the engine makes of it --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="the extra 'demo' is not installed")
@pytest.mark.parametrize(("dtype", "within"), [("f32", 1e-2), ("f16", 1e-2), ("bf16", 5e-2)])
@pytest.mark.parametrize("tied", [True, False])
async def test_the_engine_computes_what_the_weights_say(
    tmp_path: Path, dtype: Dtype, within: float, *, tied: bool
) -> None:
    """Log-probabilities of sampled tokens are those of the published formula; other weights give others.

    The engine keeps keys and values in 16 bits whatever the weights are in, and that is what is left of a difference.
    """
    base = tiny_base(tmp_path / "base.gguf")
    async with trio.open_nursery() as nursery:
        backend: EmbeddedBackend = await nursery.start(
            partial(run_embedded_backend, model_path=base, slots=1, context_per_slot=CONTEXT, threads=1)
        )
        await backend.probe()
        for version in (1, 2):
            weights = state(version, spread=0.2)
            if not tied:
                weights["lm_head.weight"] = state(7, spread=0.2)["model.embed_tokens.weight"]
            made = tmp_path / f"{version}.gguf"
            write_gguf(weights, base, made, dtype=dtype)
            await backend.load_weights(
                WeightRef(how="reload", path=str(made), version=PolicyVersion(0, version))
            )  # fmt: skip
            prompt = list(range(30, 70))
            request = GenerationRequest(
                token_ids=array("i", prompt), max_tokens=24, sampling=Sampling(temperature=1.0), stop_token_ids=(),
                request_id="r", session="s", seed=version,
            )  # fmt: skip
            said = await backend.generate(request)
            ids = [*prompt, *said.token_ids]
            mine = logprobs(weights, ids)[len(prompt) - 1 : -1]
            expected = mine[np.arange(len(said.token_ids)), list(said.token_ids)]
            assert np.abs(expected - np.array(said.logprobs)).mean() < within
            other = logprobs(state(9, spread=0.2), ids)[len(prompt) - 1 : -1]
            assert np.abs(expected - other[np.arange(len(said.token_ids)), list(said.token_ids)]).mean() > 1
        nursery.cancel_scope.cancel()
