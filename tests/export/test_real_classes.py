"""Exports in the trainers' own classes and checks: the versions are those of `requirements/trainer-classes.txt`.

slime, prime-rl and NeMo RL are in no package that can be had; `test_batches.py` has the shapes that they publish.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import sys
import types
import typing
from collections import defaultdict
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import pytest

from prorld.export import areal, atif, atropos, nemo_rl, openrlhf, skyrl, trl, verl
from prorld.wire.codec import encode
from tests.export import documents as made
from tests.export.foreign import definitions, of

pytestmark = pytest.mark.real

TYPING = {name: getattr(typing, name) for name in ("Any", "Optional", "Union", "List", "Dict", "Tuple", "TypedDict")}


@pytest.fixture(name="torch")
def _torch():
    return pytest.importorskip("torch")


@pytest.fixture(name="np")
def _np():
    return pytest.importorskip("numpy")


@pytest.fixture
def packages(monkeypatch):
    """Modules of a trainer, imported as packages whose own ``__init__`` is not run; gone after the test."""
    before = set(sys.modules)

    def add(place, *names: str) -> None:
        monkeypatch.syspath_prepend(str(place))
        for name in names:
            package = types.ModuleType(name)
            package.__path__ = [str(place / name.replace(".", "/"))]
            monkeypatch.setitem(sys.modules, name, package)

    yield add
    for name in set(sys.modules) - before:
        if name.split(".")[0] in {"harbor", "nemo_gym", "atroposlib"}:
            del sys.modules[name]


def test_verl_takes_each_row_as_an_agent_loop_output(torch):
    """And makes the tensors of its own that our columns have: the reward on the last token."""
    pydantic = pytest.importorskip("pydantic")
    loop = of("verl") / "verl/experimental/agent_loop/agent_loop.py"
    world = definitions(
        loop, "AgentLoopMetrics", "AgentLoopOutput", BaseModel=pydantic.BaseModel, torch=torch, **TYPING
    )
    for make in made.USABLE:
        for row in verl.agent_loop_outputs(make()):
            output = world["AgentLoopOutput"](**row)
            assert set(row) <= set(type(output).model_fields)
            assert set(row["metrics"]) <= set(world["AgentLoopMetrics"].model_fields)
            tensors = output.as_dict()
            assert tensors["rm_scores"].tolist() == [0.0] * (len(row["response_ids"]) - 1) + [row["reward_score"]]
            assert tensors["rollout_log_probs"].tolist() == row["response_logprobs"]


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


def test_a_sample_is_trls_own_rollout_sample(np, monkeypatch):
    """Its fields are all there and no others; columns become arrays of one length."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    pytest.importorskip("trl")
    assert metadata.version("trl") == "1.16.0"
    worker = importlib.import_module("trl.experimental.async_grpo.async_rollout_worker")
    rows = trl.worker_samples([made.tools(), made.sub_agent(), made.truncated()], group_number=1)
    for row in rows:
        arrays = {name: np.asarray(row[name]) for name in ("input_ids", "completion_mask", "old_log_probs")}
        sample = worker.RolloutSample(**(row | arrays))
        assert len(sample.input_ids) == len(sample.completion_mask) == len(sample.old_log_probs)
        assert not sample.old_log_probs[sample.completion_mask == 0].any()


@pytest.mark.parametrize("step_wise", [False, True])
def test_skyrl_finds_nothing_wrong_with_a_generator_output(np, step_wise):
    """By its own validation, with forks where it trains step-wise, and rows out of the loss where they are neutral."""
    root = of("skyrl") / "skyrl/train"
    documents = [made.tools(), made.masked(), made.truncated(), made.dropped()]
    if step_wise:
        documents += [made.sub_agent(), made.compacted()]
    for n, document in enumerate(documents):
        documents[n] = type(document)(**{
            name: getattr(document, name) for name in document.__struct_fields__ if name != "job"
        }, job=_numbered(document, n))  # fmt: skip
    output = skyrl.generator_output(documents, step_wise=step_wise, unusable="neutral", filler_id=0)
    base = definitions(
        root / "generators/base.py", "TrajectoryID", "GeneratorOutput", dataclass=dataclass,
        torch=types.SimpleNamespace(Tensor=object), **TYPING,
    )  # fmt: skip
    assert set(output) <= set(base["GeneratorOutput"].__annotations__)
    output["trajectory_ids"] = [base["TrajectoryID"](**each) for each in output["trajectory_ids"]]
    world = definitions(
        root / "utils/trainer_utils.py", "validate_generator_output", "_validate_step_wise_fields", np=np,
        logger=logging.getLogger("skyrl"), GeneratorOutput=dict,
    )  # fmt: skip
    world["validate_generator_output"](len(documents), output, step_wise=step_wise)
    output["is_last_step"] = None
    if step_wise:
        with pytest.raises(AssertionError):
            world["validate_generator_output"](len(documents), output, step_wise=True)


def _numbered(document, n):
    fields = {name: getattr(document.job, name) for name in document.job.__struct_fields__}
    return type(document.job)(**(fields | {"sample_index": n}))


def test_openrlhf_makes_the_experience_that_was_sampled(torch):
    """Its action mask marks the sampled tokens, its log-probabilities are theirs."""
    root = of("openrlhf") / "openrlhf"
    experiences = definitions(
        root / "trainer/ppo_utils/experience.py", "Experience", "tensor_field", dataclass=dataclass,
        field=importlib.import_module("dataclasses").field, torch=torch, **TYPING,
    )  # fmt: skip
    world = definitions(
        root / "trainer/ppo_utils/samples_generator.py", "SamplesGenerator._process_response_into_experience",
        Experience=experiences["Experience"], torch=torch,
    )  # fmt: skip
    document = made.tools()
    experience = world["_process_response_into_experience"](None, openrlhf.execution(document), max_len=64)
    branch = document.branches[0]
    assert experience.sequences.tolist() == [branch.token_ids]
    assert experience.action_mask.tolist() == [branch.mask[1:]]
    assert experience.rollout_log_probs.tolist() == [branch.logprobs[1:]]
    assert (experience.rewards.tolist(), experience.truncated.tolist()) == ([1.0], [False])


def test_areal_finds_nothing_wrong_with_an_episode(torch, caplog):
    """By its own check, which warns of a column that does not fit; a rejected one is None there, too."""
    root = of("areal") / "areal"
    world = definitions(
        root / "infra/workflow_executor.py", "check_trajectory_format", torch=torch, logging=logging,
        InteractionWithTokenLogpReward=type("Nothing", (), {}), **TYPING,
    )  # fmt: skip
    for make in (made.tools, made.sub_agent, made.compacted, made.two_versions, made.truncated):
        found = areal.episode(make())
        assert found is not None
        tensors = {name: torch.tensor(column) for name, column in found.items()}
        assert world["check_trajectory_format"](tensors, batch_size=len(found["rewards"]))
        assert ((tensors["versions"] >= 0) == tensors["loss_mask"].bool()).all()
    assert world["check_trajectory_format"](areal.episode(made.masked_graded()))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_atropos_takes_a_group_and_its_trainer_reads_it(torch, np):
    """Labels where something was sampled, its log-probabilities beside them, the baseline over the rows."""
    pydantic = pytest.importorskip("pydantic")
    root = of("atroposlib")
    world = definitions(
        root / "atroposlib/api/server.py", "ScoredData", BaseModel=pydantic.BaseModel,
        field_validator=pydantic.field_validator, **TYPING,
    )  # fmt: skip
    group = atropos.scored_group([made.tools(), made.masked_graded(), made.truncated()])
    posted = world["ScoredData"](**json.loads(encode(group))).model_dump()
    world = definitions(
        root / "example_trainer/data.py", "pad_data_to_good_offset", math=math, np=np, torch=torch, **TYPING
    )
    _, labels, advantages, _, logprobs = world["pad_data_to_good_offset"]({"batch": [posted]}, 2)
    assert [int((row != -100).sum()) for row in labels[0]] == [5, 3]
    assert logprobs[0][labels[0] != -100].tolist() == [-0.125, -0.25, -0.375, -0.125, -0.25, -0.125, -0.25, -0.375]
    assert advantages[0].flatten().tolist() == [1.0, -1.0]


def test_harbors_own_model_takes_every_atif_document(packages):
    """Whatever became of the rollout."""
    pytest.importorskip("pydantic")
    packages(of("harbor"), "harbor", "harbor.models")
    model = importlib.import_module("harbor.models.trajectories").Trajectory
    for make in made.ALL.values():
        for document in atif.trajectories(make()):
            taken = model.model_validate_json(encode(document), strict=True)
            assert taken.model_dump(mode="json", exclude_unset=True) == json.loads(encode(document))


def test_nemo_gyms_own_models_take_an_answer_of_run(packages):
    """Each sampled turn is an item for training there, with its tokens."""
    pydantic = pytest.importorskip("pydantic")
    pytest.importorskip("openai")
    packages(of("nemo-gym"), "nemo_gym")
    server = types.ModuleType("nemo_gym.server_utils")
    # What a client of servers needs, and no type does.
    for name in ("_GLOBAL_AIOHTTP_CLIENT_REQUEST_DEBUG", "MAX_NUM_TRIES", "ClientResponse", "get_response_json",
                 "raise_for_status", "request"):  # fmt: skip
        setattr(server, name, object)
    sys.modules["nemo_gym.server_utils"] = server
    utils = importlib.import_module("nemo_gym.openai_utils")
    world = definitions(
        of("nemo-gym") / "nemo_gym/base_resources_server.py", "BaseRunRequest", "BaseVerifyRequest",
        "BaseVerifyResponse", BaseModel=pydantic.BaseModel, NeMoGymResponse=utils.NeMoGymResponse,
        NeMoGymResponseCreateParamsNonStreaming=utils.NeMoGymResponseCreateParamsNonStreaming,
    )  # fmt: skip
    for make in made.USABLE:
        document = make()
        for answer, branch in zip(nemo_rl.run_answers(document), document.branches, strict=True):
            taken = world["BaseVerifyResponse"].model_validate(json.loads(encode(answer)))
            assert taken.reward == document.reward
            sampled = [item for item in taken.response.output if getattr(item, "generation_token_ids", None)]
            assert {type(item).__name__.endswith("ForTraining") for item in sampled} == {True}
            assert sum(len(item.generation_token_ids) for item in sampled) == sum(branch.mask)
