"""The adapters for verl and SkyRL with the trainers' real classes: what they return is what the trainers work on.

They need packages beside those of ``scripts/trainers``: ``scripts/trainers-more`` puts them there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from prorld.client import ClientError
from tests.client.adapters.worlds import needs_calc, sums, talkative, world
from tests.daemon.support import Started

# What these packages say of each other's old names is theirs.
pytestmark = [pytest.mark.real, pytest.mark.slow, needs_calc, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """A daemon for all of them."""
    with world(tmp_path_factory.mktemp("world"), talkative()) as (started, _):
        yield started


def verl_config(here: Started) -> Any:
    """Verl's configuration, as far as its own manager and ours read it."""
    omegaconf = pytest.importorskip("omegaconf")
    rollout = {
        "name": "vllm", "prompt_length": 400, "response_length": 100, "temperature": 1.0, "top_p": 1.0, "top_k": -1,
        "val_kwargs": {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "do_sample": False},
        "custom": {"prorld": {"state_dir": str(here.state), "handler": "calc"}},
    }  # fmt: skip
    return omegaconf.OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})


def verl_batch(samples: int) -> Any:
    """A batch as verl's trainer has it before a rollout: uids, instances, repeated in place."""
    numpy, protocol = pytest.importorskip("numpy"), pytest.importorskip("verl.protocol")
    instances = sums(2, first=1)
    rows: dict[str, Any] = {
        "uid": numpy.array(["a", "b"], dtype=object),
        "data_source": numpy.array(["sums", "sums"], dtype=object),
        "extra_info": numpy.array([{"instance": one, "index": n} for n, one in enumerate(instances)], dtype=object),
    }
    # Its data sets put a tensor into each row, so that there is one.
    tensors = {"dummy_tensor": pytest.importorskip("torch").zeros((2, 1))}
    meta = {"global_steps": 1, "pad_token_id": 0}
    batch = protocol.DataProto.from_dict(tensors=tensors, non_tensors=rows, meta_info=meta)
    return batch.repeat(repeat_times=samples, interleave=True)


def test_verl_works_on_what_it_gets(here: Started) -> None:
    """Its own class, its own union with the batch, its own reward and advantage."""
    pytest.importorskip("verl.experimental.agent_loop.agent_loop")
    torch = pytest.importorskip("torch")
    algorithms, reward = import_module("verl.trainer.ppo.core_algos"), import_module("verl.trainer.ppo.reward")
    load_class_from_fqn = import_module("verl.utils.import_utils").load_class_from_fqn

    name = "prorld.client.adapters.verl.ProrldAgentLoopManager"
    manager = load_class_from_fqn(name, "AgentLoopManager").create(config=verl_config(here), llm_client=None)
    batch = verl_batch(3)
    out = manager.generate_sequences(batch)
    assert [type(out).__name__, len(out)] == ["DataProto", 6]
    assert {"timing", "reward_extra_keys"} <= out.meta_info.keys()
    out.meta_info.pop("timing")
    whole = batch.union(out)
    scores, extra = reward.extract_reward(whole)
    assert scores.sum(-1).tolist() == [1.0] * 6
    assert list(extra["prorld_usable"]) == [1.0] * 6
    assert whole.batch["responses"].shape == whole.batch["response_mask"].shape == (6, 100)
    assert whole.batch["input_ids"].shape == whole.batch["position_ids"].shape == (6, 500)
    assert (whole.batch["rollout_log_probs"][whole.batch["response_mask"] == 0] == 0).all()
    assert any(0 in row[: row.index(1) + 40] for row in whole.batch["response_mask"].tolist())
    advantages, _ = algorithms.compute_grpo_outcome_advantage(
        scores, whole.batch["response_mask"], whole.non_tensor_batch["uid"]
    )
    assert torch.isfinite(advantages).all()

    async def within() -> Any:
        return await manager.generate_sequences(verl_batch(2))

    assert len(asyncio.run(within())) == 4
    with pytest.raises(ClientError, match="use_v1=False"):
        manager.generate_sequences({"prompts": []})
    manager._rollouts.close()


def test_skyrl_takes_what_it_gets(here: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own check of a generator's output, and its own metrics of it."""
    typing_extensions = pytest.importorskip("typing_extensions")
    # Its models are for Python 3.12, where the two are one.
    monkeypatch.setattr("typing.TypedDict", typing_extensions.TypedDict)
    base = pytest.importorskip("skyrl.train.generators.base", exc_type=ImportError)
    utils = pytest.importorskip("skyrl.train.utils.trainer_utils", exc_type=ImportError)
    inputs = import_module("skyrl.train.generators.utils")

    from prorld.client.adapters.skyrl import ProrldGenerator  # noqa: PLC0415

    rows: list[dict[str, Any]] = [
        {"prompt": [], "env_class": None, "env_extras": {"instance": one}, "uid": f"u{n}"}
        for n, one in enumerate(sums(2, first=1))
    ]
    asked, uids = inputs.prepare_generator_input(rows, 3, {"temperature": 1.0, "max_tokens": 32}, "none", "train", 1)
    assert set(asked) <= set(base.GeneratorInput.__annotations__)
    for step_wise in (False, True):
        generator = ProrldGenerator(state_dir=str(here.state), handler="calc", step_wise=step_wise)
        out = asyncio.run(generator.generate(asked))
        generator.close()
        assert set(out) <= set(base.GeneratorOutput.__annotations__)
        metrics = out.pop("rollout_metrics")
        utils.validate_generator_output(len(asked["prompts"]), out, step_wise=step_wise)
        assert inputs.get_metrics_from_generator_output(out, uids)["avg_score"] == 1.0
        assert metrics == {"prorld/usable": 6.0}


def test_verl_says_what_it_can_not_do(here: Started) -> None:
    """Settings that its fixed rows have no place for."""
    pytest.importorskip("verl.utils.ray_utils")
    from prorld.client.adapters.verl import ProrldAgentLoopManager  # noqa: PLC0415

    config = verl_config(here)
    config.actor_rollout_ref.rollout.custom.prorld.branches = "all"
    with pytest.raises(ClientError, match="branches"):
        ProrldAgentLoopManager.create(config=config)
    with pytest.raises(ClientError, match="teacher"):
        ProrldAgentLoopManager.create(config=verl_config(here), teacher_client=SimpleNamespace())
