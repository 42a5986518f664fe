"""What verl, slime, SkyRL and TRL get of real rollouts, with stand-ins for the trainers' own classes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from prorld.client import ClientError
from prorld.client.adapters import skyrl, slime, verl
from prorld.client.adapters.rollouts import Group, Rollout, prompts_of
from prorld.client.adapters.settings import sampling_of
from prorld.client.adapters.trl import ProrldRollouts, prompts, reward
from prorld.domain.outcome import Verdict
from prorld.testing.scripted_engine.script import Fault
from tests.client.adapters.worlds import needs_calc, sums, talkative, world
from tests.daemon.support import Started

pytestmark = [needs_calc, pytest.mark.slow]

MASKED = 1


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """A daemon for all of them: one instance is solved in two turns with a tool, the other at once."""
    with world(tmp_path_factory.mktemp("world"), talkative()) as (started, _):
        yield started


class Sample:
    """That of slime, as far as an adapter sees it: fields, ``to_dict``, ``from_dict``."""

    class Status(Enum):
        """Where a sample is."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        FAILED = "failed"
        ABORTED = "aborted"

    def __init__(self, **fields: Any) -> None:
        self.status = self.Status.PENDING
        self.metadata: dict[str, Any] = {}
        self.index: int | None = None
        self.remove_sample = False
        vars(self).update(fields)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "status": self.status.value}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Sample:
        return cls(**{**fields, "status": cls.Status(fields["status"])})


class Source:
    """Prompts of slime, in order; what comes back is given out first."""

    def __init__(self, instances: list[dict[str, Any]], samples: int) -> None:
        self._groups = [
            [
                Sample(index=n * samples + m, group_index=n, label="x", metadata={"instance": one})
                for m in range(samples)
            ]
            for n, one in enumerate(instances)
        ]
        self.returned: list[list[Sample]] = []
        # Where the adapter keeps itself.
        self.prorld_adapter: Any = None

    def get_samples(self, count: int) -> list[list[Sample]]:
        taken, self._groups = self._groups[:count], self._groups[count:]
        return taken

    def add_samples(self, groups: list[list[Sample]]) -> None:
        self.returned += groups


@pytest.fixture
def slime_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of slime that an adapter imports when it is called."""
    base, types = ModuleType("slime.rollout.base_types"), ModuleType("slime.utils.types")
    setattr(base, "RolloutFnTrainOutput", SimpleNamespace)  # noqa: B010
    setattr(base, "RolloutFnEvalOutput", SimpleNamespace)  # noqa: B010
    setattr(types, "Sample", Sample)  # noqa: B010
    for module in (base, types):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def slime_args(here: Started, **more: Any) -> SimpleNamespace:
    """Arguments of slime, as far as an adapter sees them."""
    fields = {
        "prorld": {"state_dir": str(here.state), "handler": "calc"}, "rollout_batch_size": 2,
        "rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": -1, "rollout_max_response_len": 32,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **more})


def test_slime_gets_whole_groups_in_order(here: Started, slime_types: None) -> None:
    """Its own samples with what became of them; tokens, masks and lengths fit as slime asserts."""
    source = Source(sums(2, first=1), 3)
    out = slime.generate_rollout(slime_args(here), 0, source)
    assert [[one.index for one in group] for group in out.samples] == [[0, 1, 2], [3, 4, 5]]
    for group in out.samples:
        for one in group:
            assert (one.status, one.reward, one.label) == (Sample.Status.COMPLETED, 1.0, "x")
            assert len(one.loss_mask) == one.response_length == len(one.rollout_log_probs) < len(one.tokens)
            assert one.rollout_id == one.index
            assert one.metadata["instance"]["answer"] == 42
    assert any(0 in one.loss_mask for one in out.samples[0])
    assert out.metrics["prorld/usable"] == 6.0
    source.prorld_adapter._rollouts.close()


def test_slime_evaluates_on_its_own_files(here: Started, slime_types: None, tmp_path: Path) -> None:
    """The rewards of each set; an unjudged sample is in none of them."""
    file = tmp_path / "eval.jsonl"
    file.write_bytes(b"".join(msgspec.json.encode({"metadata": {"instance": one}}) + b"\n" for one in sums(2, first=1)))
    data = SimpleNamespace(
        name="sums", path=str(file), metadata_key="metadata", n_samples_per_eval_prompt=2, temperature=0.5, top_p=1.0,
        top_k=-1, max_response_len=32,
    )  # fmt: skip
    source = Source([], 1)
    args = slime_args(here, eval_datasets=[data], reward_key="score")
    out = slime.generate_rollout(args, 3, source, evaluation=True)
    assert out.data["sums"]["rewards"] == [1.0] * 4
    assert [one.reward["score"] for one in out.data["sums"]["samples"]] == [1.0] * 4
    source.prorld_adapter._rollouts.close()


def test_slime_without_enough_prompts_is_told(here: Started, slime_types: None) -> None:
    """Fewer groups than a rollout has are no rollout."""
    source = Source(sums(1, first=1), 2)
    with pytest.raises(ClientError, match="1 groups of 2"):
        slime.generate_rollout(slime_args(here), 0, source)
    source.prorld_adapter._rollouts.close()


def test_slime_gets_back_the_prompts_of_surplus_groups(
    here: Started, slime_types: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they came: no prompt is lost, and no rollout is kept for a step of other weights."""
    source = Source(sums(3, first=1), 4)
    asked = [one.index for one in source._groups[2]]
    args = slime_args(here, over_sampling_batch_size=3)
    args.prorld["informative"] = "spread"
    adapter = slime._Adapter(args)
    usable = masked(here)[0]
    monkeypatch.setattr(adapter, "_collect", lambda *_, **__: [usable._replace(place=n) for n in range(3)])
    made, _ = adapter.train(0, source)
    assert [one.index for group in made for one in group] == [*range(8)]
    [back] = source.returned
    assert [one.index for one in back] == asked
    assert {one.status for one in back} == {Sample.Status.PENDING}
    adapter._rollouts.close()


def test_a_row_without_an_instance_is_told(here: Started, slime_types: None) -> None:
    """By the trainer's own place for it."""
    source = Source([{}, {}], 2)
    with pytest.raises(ClientError, match=r"metadata\['instance'\] of prompt 0"):
        slime.generate_rollout(slime_args(here), 0, source)
    source.prorld_adapter._rollouts.close()


def test_what_a_router_says_is_decoded() -> None:
    """Of either version; anything else is told."""
    urls = ["http://10.0.0.1:30000", "http://10.0.0.2:30000"]
    new = msgspec.json.encode({"workers": [{"url": url, "id": 1} for url in urls]})
    assert [one.url for one in slime._engines_of(new, "r")] == urls
    assert [one.url for one in slime._engines_of(msgspec.json.encode({"urls": urls}), "r")] == urls
    with pytest.raises(ClientError, match="slime's router at r"):
        slime._engines_of(b'{"workers": 7}', "r")


def generator_input(instances: list[dict[str, Any]], samples: int) -> dict[str, Any]:
    """That of SkyRL, as ``prepare_generator_input`` makes it."""
    rows = [(n, one, m) for n, one in enumerate(instances) for m in range(samples)]
    return {
        "prompts": [[{"role": "user", "content": "x"}] for _ in rows],
        "env_classes": ["x"] * len(rows),
        "env_extras": [{"instance": one} for _, one, _ in rows],
        "sampling_params": {"temperature": 1.0, "max_tokens": 32, "logprobs": 1, "include_stop_str_in_output": True},
        "trajectory_ids": [SimpleNamespace(instance_id=f"u{n}", repetition_id=m) for n, _, m in rows],
        "batch_metadata": SimpleNamespace(global_step=4, training_phase="train"),
    }


@pytest.mark.parametrize("step_wise", [False, True])
def test_skyrl_gets_trajectories_in_order(here: Started, step_wise: bool) -> None:
    """Under the trainer's own ids, whose objects they are."""
    generator = skyrl.ProrldGenerator(state_dir=str(here.state), handler="calc", step_wise=step_wise)
    asked = generator_input(sums(2, first=1), 2)
    out = asyncio.run(generator.generate(asked))
    assert all(a is b for a, b in zip(out["trajectory_ids"], asked["trajectory_ids"], strict=True))
    assert out["rewards"] == [1.0] * 4
    assert out["is_last_step"] == ([True] * 4 if step_wise else None)
    rows = zip(out["response_ids"], out["loss_masks"], out["rollout_logprobs"], strict=True)
    assert all(len(ids) == len(mask) == len(logprobs) > 0 for ids, mask, logprobs in rows)
    assert any(0 in mask and 1 in mask for mask in out["loss_masks"])
    generator.close()


def masked(here: Started) -> list[Group]:
    """Two groups of real rollouts: in the first one is masked and one was lost; the second was lost whole."""
    own = skyrl.ProrldGenerator(state_dir=str(here.state), handler="calc")
    groups = own._rollouts.collect("step0", prompts_of(sums(1, first=1) * 4), sampling_of({}))
    own.close()
    [group] = groups
    rollouts = list(group.rollouts)
    for n, value in enumerate((3.0, 0.0, 1.0)):
        document = rollouts[n].document
        assert document is not None
        verdict = Verdict.MASK if n == MASKED else Verdict.USE
        rollouts[n] = rollouts[n]._replace(document=msgspec.structs.replace(document, reward=value, verdict=verdict))
    rollouts[3] = Rollout("lost", "drop")
    return [Group(0, rollouts), Group(1, [Rollout()] * 4, "group.failed: no engine")]


def test_what_may_not_be_trained_on_is_no_zero(here: Started) -> None:
    """Its row is masked, its reward moves no mean, its figures say so: in every trainer's shape."""
    groups = masked(here)
    columns = verl.columns_of_groups(groups, pad_id=9, prompt_length=400, response_length=80)
    masks, rewards = columns["batch"]["response_mask"], [sum(row) for row in columns["batch"]["rm_scores"]]
    assert [any(mask) for mask in masks] == [True, False, True, False, False, False, False, False]
    assert rewards == [3.0, 2.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert columns["non_tensor_batch"]["prorld_usable"] == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert None not in columns["non_tensor_batch"]["correct"]
    assert "uid" not in columns["non_tensor_batch"]
    assert columns["meta_info"]["timing"]["prorld/rows_trained"] == 2.0
    assert all(len(row) == 400 for row in columns["batch"]["prompts"])
    out = skyrl.output_of(groups, None, step_wise=False, filler_id=9)
    assert [any(mask) for mask in out["loss_masks"]] == [any(mask) for mask in masks]
    assert out["rewards"] == rewards
    assert out["trajectory_ids"] is None
    assert out["stop_reasons"].count("abort") == 6


def test_a_row_that_does_not_fit_verl_is_masked(here: Started) -> None:
    """Nothing is cut off, and the trainer goes on."""
    columns = verl.columns_of_groups(masked(here), pad_id=9, prompt_length=5, response_length=80)
    assert not any(any(mask) for mask in columns["batch"]["response_mask"])
    assert columns["meta_info"]["timing"]["prorld/rows_trained"] == 0.0


def test_a_group_of_which_some_failed_goes_on_without_them(tmp_path: Path) -> None:
    """From the engine's failure to the trainer's rows: one sample has no reward, and only its own row is masked."""
    script = msgspec.structs.replace(talkative(), faults=[Fault(kind="status", status=400)])
    with world(tmp_path, script) as (here, _):
        generator = skyrl.ProrldGenerator(state_dir=str(here.state), handler="calc", max_attempts=1)
        out = asyncio.run(generator.generate(generator_input(sums(2, first=1), 3)))
        generator.close()
        with here.client() as client:
            [batch] = client.batches().items
            groups = list(client.groups(batch.batch_id, after=0))
            rewards = [reward for group in groups for reward in group.rewards]
    assert rewards.count(None) == 1
    assert rewards.count(1.0) == 5
    masked_rows = [n for n, mask in enumerate(out["loss_masks"]) if not any(mask)]
    # In the order of the prompts, though groups come as they end.
    ordered = sorted(groups, key=lambda group: group.index)
    assert masked_rows == [
        n for n, reward in enumerate(one for group in ordered for one in group.rewards) if reward is None
    ]
    assert out["rewards"] == [1.0] * 6
    assert out["rollout_metrics"]["prorld/usable"] == 5.0
    assert sum(count for name, count in out["rollout_metrics"].items() if "unusable" in name) == 1.0


def test_slime_removes_what_may_not_be_trained_on(here: Started) -> None:
    """The sample stays in its group, with a token and an empty mask."""
    groups, own = masked(here), [[Sample(index=n) for n in range(4)], [Sample(index=n) for n in range(4, 8)]]
    source = Source([], 1)
    adapter = slime._Adapter(slime_args(here))
    made = [one for group in adapter._samples(groups, own) for one in group]
    assert [one.remove_sample for one in made] == [False, True, False, True, True, True, True, True]
    assert [one.reward for one in made] == [3.0, 2.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert all(len(one.loss_mask) == one.response_length > 0 for one in made)
    assert not any(any(one.loss_mask) for one in made if one.remove_sample)
    assert source.returned == []
    adapter._rollouts.close()


def trl_trainer(step: int = 0, *, training: bool = True) -> Any:
    """A ``GRPOTrainer``, as far as an adapter sees it."""
    return SimpleNamespace(
        args=SimpleNamespace(temperature=1.0, top_p=1.0, top_k=0, min_p=None, max_completion_length=32),
        state=SimpleNamespace(global_step=step), model=SimpleNamespace(training=training),
        accelerator=SimpleNamespace(process_index=0, is_main_process=True, wait_for_everyone=lambda: None),
        processing_class=SimpleNamespace(pad_token_id=9, eos_token_id=9),
    )  # fmt: skip


def test_trl_gets_a_row_for_each_prompt(here: Started) -> None:
    """TRL repeats its prompts itself; none is multiplied."""
    rollouts = ProrldRollouts(state_dir=str(here.state), handler="calc")
    asked = [row["prompt"] for row in prompts(sums(2, first=1)) for _ in range(2)]
    out = rollouts(asked, trl_trainer())
    assert {name: len(column) for name, column in out.items()} == dict.fromkeys(out, 4)
    assert reward(["x"] * 4, **out) == [1.0] * 4
    sampled = zip(out["completion_ids"], out["env_mask"], out["logprobs"], strict=True)
    assert all(len(ids) == len(mask) == len(logprobs) for ids, mask, logprobs in sampled)
    rollouts.close()


def test_trl_reads_prompts_of_any_kind(here: Started) -> None:
    """With a function that knows which instance is meant."""
    [one] = sums(1, first=1)
    rollouts = ProrldRollouts(state_dir=str(here.state), handler="calc", instance_of=lambda prompt: one)
    out = rollouts([[{"role": "user", "content": "anything"}]], trl_trainer(training=False))
    assert out["env_reward"] == [1.0]
    rollouts.close()


@pytest.mark.parametrize(
    "wrong",
    [{"weights": "relative/dir"}, {"branches": "all"}, {"run": "a b"}, {"nonsense": 1}, {"informative": "some"}],
)
def test_trl_is_told_what_is_wrong_before_it_trains(wrong: dict[str, Any]) -> None:
    """A typing error is no hour of training later."""
    with pytest.raises(ClientError) as caught:
        ProrldRollouts(**{"address": "http://127.0.0.1:1", **wrong})
    assert caught.value.stable_code == "bad_settings"
