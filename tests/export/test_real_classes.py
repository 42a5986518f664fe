"""Exports in the trainers' own classes and checks: the versions are those of `requirements/trainer-classes.txt`.

slime, prime-rl and NeMo RL are in no package that can be had; `test_batches.py` has the shapes that they publish.
"""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from importlib import metadata
from typing import Any

import pytest

from prorld.export import areal, atif, atropos, nemo_rl, openrlhf, skyrl, verl
from prorld.export.formats import export
from prorld.export.reading import NotExportable
from prorld.wire.codec import encode
from tests.export import documents as made
from tests.export.foreign import definitions, of
from tests.export.loading import (
    LOADERS,
    TYPING,
    areal_check,
    atif_document,
    atropos_data,
    atropos_reader,
    expected,
    gym_answer,
    openrlhf_experience,
    skyrl_checks,
    trl_samples,
    verl_output,
)

pytestmark = pytest.mark.real


@pytest.fixture(name="torch")
def _torch():
    return pytest.importorskip("torch")


@pytest.fixture(name="np")
def _np():
    return pytest.importorskip("numpy")


@pytest.fixture(autouse=True)
def _calm(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


# Those for which TRL has no row, AReaL no version, or OpenRLHF one row for two branches.
REFUSED = {
    ("trl", "sub_agent"), ("trl", "compacted"), ("trl", "nested"), ("openrlhf", "sub_agent"),
    ("openrlhf", "compacted"), ("openrlhf", "nested"), ("areal", "unknown_version"),
}  # fmt: skip


@pytest.mark.parametrize("make", made.USABLE)
@pytest.mark.parametrize("form", LOADERS)
def test_a_trainer_has_of_a_rollout_what_the_rollout_has(form, make, torch, np):
    """Every token, the mask, the log-probabilities and the reward of each branch, in its own class."""
    document, loader = make(), LOADERS[form]
    if loader.package == "trl":
        pytest.importorskip("trl")
    pytest.importorskip("pydantic")
    if (form, make.__name__) in REFUSED:
        with pytest.raises(NotExportable):
            export(document, form)
        return
    rows = json.loads(encode(export(document, form)))
    assert sorted(loader.load(document, rows)) == sorted(expected(document, to_the_end=loader.to_the_end))


def test_the_branch_that_stands_for_a_fork_is_whole(torch):
    """Where OpenRLHF has one row for two or three, on request: the one that was sampled from last."""
    for make, last in ((made.sub_agent, 0), (made.compacted, 1), (made.nested, 2)):
        document = make()
        [loaded] = LOADERS["openrlhf"].load(document, [openrlhf.execution(document, last_branch=True)])
        assert loaded == expected(document)[last]


def test_verl_takes_each_row_as_an_agent_loop_output(torch):
    """And makes the tensors of its own that our columns have: the reward on the last token."""
    pytest.importorskip("pydantic")
    world = verl_output()
    for make in made.USABLE:
        for row in verl.agent_loop_outputs(make()):
            output = world["AgentLoopOutput"](**row)
            assert set(row) <= set(type(output).model_fields)
            assert set(row["metrics"]) <= set(world["AgentLoopMetrics"].model_fields)
            tensors = output.as_dict()
            assert tensors["rm_scores"].tolist() == [0.0] * (len(row["response_ids"]) - 1) + [row["reward_score"]]


def test_verls_own_padding_and_baseline_agree_with_the_columns(torch, np):
    """Its positions are ours, and its GRPO advantages are over what may be used."""
    root = of("verl") / "verl"
    columns = verl.dataproto_columns([made.tools(), made.masked_graded(), made.truncated()], pad_id=0)
    batch = {name: torch.tensor(column) for name, column in columns["batch"].items()}
    world = definitions(root / "utils/model.py", "compute_position_id_with_mask", torch=torch)
    assert torch.equal(world["compute_position_id_with_mask"](batch["attention_mask"]), batch["position_ids"])
    world = definitions(
        root / "trainer/ppo/core_algos.py", "compute_grpo_outcome_advantage", torch=torch, np=np,
        defaultdict=defaultdict, AlgoConfig=Any, **TYPING,
    )  # fmt: skip
    advantages, _ = world["compute_grpo_outcome_advantage"](
        batch["rm_scores"], batch["response_mask"], np.array(columns["non_tensor_batch"]["uid"], dtype=object)
    )
    # Rewards 1 and 0, deviation with Bessel's correction.
    share = 0.5 / (math.sqrt(0.5) + 1e-6)
    expected = torch.tensor([[share], [-share]]) * batch["response_mask"]
    assert torch.allclose(advantages, expected, atol=1e-6)


def test_a_sample_is_trls_own_rollout_sample(np):
    """Its fields are all there and no others; columns become arrays of one length."""
    pytest.importorskip("trl")
    assert metadata.version("trl") == "1.16.0"
    samples = trl_samples([made.tools(), made.sub_agent(), made.truncated()])
    assert len(samples) == 4
    for sample in samples:
        assert len(sample.input_ids) == len(sample.completion_mask) == len(sample.old_log_probs)
        assert not sample.old_log_probs[sample.completion_mask == 0].any()


@pytest.mark.parametrize("step_wise", [False, True])
def test_skyrl_finds_nothing_wrong_with_a_generator_output(np, step_wise):
    """By its own validation, with forks where it trains step-wise, and rows out of the loss where they are neutral."""
    documents = [made.tools(), made.masked(), made.truncated(), made.dropped()]
    if step_wise:
        documents += [made.sub_agent(), made.compacted(), made.nested(), made.masked_fork(), made.unsaid_fork()]
    for n, document in enumerate(documents):
        documents[n] = type(document)(**{
            name: getattr(document, name) for name in document.__struct_fields__ if name != "job"
        }, job=_numbered(document, n))  # fmt: skip
    output = skyrl.generator_output(documents, step_wise=step_wise, unusable="neutral", filler_id=0)
    world = skyrl_checks()
    assert set(output) <= set(world["GeneratorOutput"].__annotations__)
    output["trajectory_ids"] = [world["TrajectoryID"](**each) for each in output["trajectory_ids"]]
    world["validate_generator_output"](len(documents), output, step_wise=step_wise)
    output["is_last_step"] = None
    if step_wise:
        with pytest.raises(AssertionError):
            world["validate_generator_output"](len(documents), output, step_wise=True)


def _numbered(document, n):
    fields = {name: getattr(document.job, name) for name in document.job.__struct_fields__}
    return type(document.job)(**(fields | {"sample_index": n}))


def test_openrlhf_knows_that_nothing_was_cut_off(torch):
    """Tokens and rewards are looked at above; a turn that was cut off is marked as one."""
    truncated = [
        openrlhf_experience()(None, openrlhf.execution(make()), max_len=64).truncated.tolist()
        for make in (made.tools, made.truncated)
    ]
    assert truncated == [[False], [True]]


def test_areal_finds_nothing_wrong_with_an_episode(torch, caplog):
    """By its own check, which warns of a column that does not fit; a rejected one is None there, too."""
    check = areal_check()
    for make in (made.tools, made.sub_agent, made.compacted, made.two_versions, made.truncated):
        found = areal.episode(make())
        assert found is not None
        tensors = {name: torch.tensor(column) for name, column in found.items()}
        assert check(tensors, batch_size=len(found["rewards"]))
        assert ((tensors["versions"] >= 0) == tensors["loss_mask"].bool()).all()
    assert check(areal.episode(made.masked_graded()))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_atropos_takes_a_group_and_its_trainer_reads_it(torch, np):
    """Labels where something was sampled, its log-probabilities beside them, the baseline over the rows."""
    pytest.importorskip("pydantic")
    group = atropos.scored_group([made.tools(), made.masked_graded(), made.truncated()])
    posted = atropos_data()(**json.loads(encode(group))).model_dump()
    _, labels, advantages, _, logprobs = atropos_reader()({"batch": [posted]}, 2)
    assert [int((row != -100).sum()) for row in labels[0]] == [5, 3]
    assert logprobs[0][labels[0] != -100].tolist() == [-0.125, -0.25, -0.375, -0.125, -0.25, -0.125, -0.25, -0.375]
    assert advantages[0].flatten().tolist() == [1.0, -1.0]


def test_harbors_own_model_takes_every_atif_document():
    """Whatever became of the rollout."""
    pytest.importorskip("pydantic")
    with atif_document() as model:
        for make in made.ALL.values():
            for document in atif.trajectories(make()):
                taken = model.model_validate_json(encode(document), strict=True)
                assert taken.model_dump(mode="json", exclude_unset=True) == json.loads(encode(document))


def test_nemo_gyms_own_models_take_an_answer_of_run():
    """Each sampled turn is an item for training there, with its tokens."""
    pytest.importorskip("pydantic")
    pytest.importorskip("openai")
    with gym_answer() as model:
        for make in made.USABLE:
            document = make()
            branches = [branch for branch in document.branches if any(branch.mask)]
            for answer, branch in zip(nemo_rl.run_answers(document), branches, strict=True):
                taken = model.model_validate(json.loads(encode(answer)))
                assert taken.reward == document.reward
                sampled = [item for item in taken.response.output if getattr(item, "generation_token_ids", None)]
                assert {type(item).__name__.endswith("ForTraining") for item in sampled} == {True}
                assert sum(len(item.generation_token_ids) for item in sampled) == sum(branch.mask)
