"""Rows of each format in the classes of the trainer that reads it, and what is in them then.

A loader gets the rows of one rollout as JSON has them, puts them into the trainer's own class or through its own check,
and says what the trainer has of each: every token, which of them were sampled, their log-probabilities, the reward.
slime and prime-rl are in no package that can be had; their rows are read as they are.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import sys
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from typing import Any, NamedTuple

from prorld.export import trl
from prorld.wire.trajectory import Trajectory
from tests.export.foreign import definitions, of, packages, version_of

TYPING = {name: getattr(typing, name) for name in ("Any", "Optional", "Union", "List", "Dict", "Tuple", "TypedDict")}
Row = dict[str, Any]


class Loaded(NamedTuple):
    """A row as its trainer has it; a log-probability is 0.0 where nothing was sampled, whatever the trainer writes."""

    token_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    reward: float | None


class Loader(NamedTuple):
    """How a format is loaded. ``package`` is the trainer's, or none; ``to_the_end``: tokens behind the last sampled one
    are in it, too.
    """

    what: str
    package: str | None
    load: Callable[[Trajectory, list[Row]], list[Loaded]]
    to_the_end: bool = True

    @property
    def version(self) -> str:
        """The version of the package."""
        if self.package is None:
            return "-"
        return metadata.version("trl") if self.package == "trl" else version_of(self.package)


def expected(document: Trajectory, *, to_the_end: bool = True) -> list[Loaded]:
    """What the rollout itself says of each branch in which something was sampled."""
    found = []
    for branch in document.branches:
        if any(branch.mask):
            end = len(branch.mask) if to_the_end else len(branch.mask) - branch.mask[::-1].index(1)
            ids, mask, logprobs = branch.token_ids[:end], branch.mask[:end], branch.logprobs[:end]
            found.append(Loaded(ids, mask, single(logprobs), document.reward))
    return found


def single(values: list[float]) -> list[float]:
    """As float32, which is what engines and tensors have."""
    numpy = importlib.import_module("numpy")
    found: list[float] = numpy.asarray(values, dtype=numpy.float32).tolist()
    return found


def masked(mask: list[int], logprobs: list[float]) -> list[float]:
    """Log-probabilities of what was sampled alone."""
    return single([value if bit else 0.0 for bit, value in zip(mask, logprobs, strict=True)])


# --- verl -----------------------------------------------------------------------------------------------------------


@cache
def verl_output() -> dict[str, Any]:
    """``AgentLoopOutput`` and its metrics."""
    pydantic, torch = importlib.import_module("pydantic"), importlib.import_module("torch")
    loop = of("verl") / "verl/experimental/agent_loop/agent_loop.py"
    return definitions(loop, "AgentLoopMetrics", "AgentLoopOutput", BaseModel=pydantic.BaseModel, torch=torch, **TYPING)


def load_verl(_: Trajectory, rows: list[Row]) -> list[Loaded]:
    """From the tensors that an ``AgentLoopOutput`` makes of itself."""
    found = []
    for row in rows:
        tensors = verl_output()["AgentLoopOutput"](**row).as_dict()
        prompt, response = tensors["prompts"].tolist(), tensors["responses"].tolist()
        mask = [0] * len(prompt) + tensors["response_mask"].tolist()
        logprobs = [0.0] * len(prompt) + tensors["rollout_log_probs"].tolist()
        found.append(Loaded(prompt + response, mask, masked(mask, logprobs), tensors["rm_scores"].sum().item()))
    return found


# --- TRL ------------------------------------------------------------------------------------------------------------


def trl_samples(documents: list[Trajectory]) -> list[Any]:
    """``RolloutSample`` of TRL's asynchronous worker; the other rows of TRL are a plain dictionary to it."""
    numpy = importlib.import_module("numpy")
    worker = importlib.import_module("trl.experimental.async_grpo.async_rollout_worker")
    columns = ("input_ids", "completion_mask", "old_log_probs")
    # The number is for engines that name no version, which the worker must have.
    rows = trl.worker_samples(documents, group_number=1, model_version=0)
    return [worker.RolloutSample(**(row | {name: numpy.asarray(row[name]) for name in columns})) for row in rows]


def load_trl(document: Trajectory, rows: list[Row]) -> list[Loaded]:
    """From the worker's samples; the row of a ``rollout_func`` has to say the same."""
    found = []
    for sample in trl_samples([document]):
        mask, logprobs = sample.completion_mask.tolist(), sample.old_log_probs.tolist()
        found.append(Loaded(sample.input_ids.tolist(), mask, masked(mask, logprobs), sample.metrics["reward"]))
    for row in rows:
        before = len(row["prompt_ids"])
        mask = [0] * before + row["env_mask"]
        logprobs = masked(mask, [0.0] * before + row["logprobs"])
        assert Loaded(row["prompt_ids"] + row["completion_ids"], mask, logprobs, row["env_reward"]) in found
    return found


# --- SkyRL ----------------------------------------------------------------------------------------------------------


@cache
def skyrl_checks() -> dict[str, Any]:
    """``GeneratorOutput``, ``TrajectoryID`` and the check that its trainer makes."""
    numpy = importlib.import_module("numpy")
    root = of("skyrl") / "skyrl/train"
    base = definitions(
        root / "generators/base.py", "TrajectoryID", "GeneratorOutput", dataclass=dataclass,
        torch=types.SimpleNamespace(Tensor=object), **TYPING,
    )  # fmt: skip
    checks = definitions(
        root / "utils/trainer_utils.py", "validate_generator_output", "_validate_step_wise_fields", np=numpy,
        logger=logging.getLogger("skyrl"), GeneratorOutput=dict,
    )  # fmt: skip
    return checks | base


def load_skyrl(document: Trajectory, rows: list[Row]) -> list[Loaded]:
    """Through its own validation of step-wise training."""
    world = skyrl_checks()
    output: Row = {name: [row[name] for row in rows] for name in rows[0]}
    assert set(output) <= set(world["GeneratorOutput"].__annotations__)
    output["trajectory_ids"] = [world["TrajectoryID"](**each) for each in output["trajectory_ids"]]
    output |= {"rollout_metrics": {}, "trajectory_generation_times": [document.job.timing.run_s]}
    world["validate_generator_output"](1, world["GeneratorOutput"](**output), step_wise=True)
    found = []
    for row in rows:
        before = len(row["prompt_token_ids"])
        mask = [0] * before + row["loss_masks"]
        logprobs = masked(mask, [0.0] * before + row["rollout_logprobs"])
        found.append(Loaded(row["prompt_token_ids"] + row["response_ids"], mask, logprobs, row["rewards"]))
    return found


# --- OpenRLHF -------------------------------------------------------------------------------------------------------


@cache
def openrlhf_experience() -> Callable[..., Any]:
    """The method that makes an ``Experience`` of what ``execute`` returned."""
    torch = importlib.import_module("torch")
    root = of("openrlhf") / "openrlhf"
    experiences = definitions(
        root / "trainer/ppo_utils/experience.py", "Experience", "tensor_field", dataclass=dataclass, field=field,
        torch=torch, **TYPING,
    )  # fmt: skip
    world = definitions(
        root / "trainer/ppo_utils/samples_generator.py", "SamplesGenerator._process_response_into_experience",
        Experience=experiences["Experience"], torch=torch,
    )  # fmt: skip
    made: Callable[..., Any] = world["_process_response_into_experience"]
    return made


def load_openrlhf(_: Trajectory, rows: list[Row]) -> list[Loaded]:
    """From its ``Experience``, whose mask begins with the second token."""
    found = []
    for row in rows:
        experience = openrlhf_experience()(None, row, max_len=1 << 20)
        [ids], [mask], [logprobs] = (
            tensor.tolist() for tensor in (experience.sequences, experience.action_mask, experience.rollout_log_probs)
        )
        mask = [0, *(int(bit) for bit in mask)]
        found.append(Loaded(ids, mask, masked(mask, [0.0, *logprobs]), experience.rewards.item()))
    return found


# --- AReaL ----------------------------------------------------------------------------------------------------------


@cache
def areal_check() -> Callable[..., bool]:
    """The check of an episode, which warns of a column that does not fit."""
    torch = importlib.import_module("torch")
    world = definitions(
        of("areal") / "areal/infra/workflow_executor.py", "check_trajectory_format", torch=torch, logging=logging,
        InteractionWithTokenLogpReward=type("Nothing", (), {}), **TYPING,
    )  # fmt: skip
    check: Callable[..., bool] = world["check_trajectory_format"]
    return check


def load_areal(_: Trajectory, rows: list[Row]) -> list[Loaded]:
    """From its tensors, without their padding."""
    torch = importlib.import_module("torch")
    found = []
    for episode in rows:
        tensors = {name: torch.tensor(column) for name, column in episode.items()}
        assert areal_check()(tensors, batch_size=len(episode["rewards"]))
        assert ((tensors["versions"] >= 0) == tensors["loss_mask"].bool()).all()
        for n, reward in enumerate(tensors["rewards"].tolist()):
            is_there = tensors["attention_mask"][n].bool()
            ids, mask, logprobs = (
                tensors[name][n][is_there].tolist() for name in ("input_ids", "loss_mask", "logprobs")
            )
            found.append(Loaded(ids, mask, masked(mask, logprobs), reward))
    return found


# --- Atropos --------------------------------------------------------------------------------------------------------


@cache
def atropos_data() -> type[Any]:
    """The model of what is posted to ``/scored_data``."""
    pydantic = importlib.import_module("pydantic")
    world = definitions(
        of("atroposlib") / "atroposlib/api/server.py", "ScoredData", BaseModel=pydantic.BaseModel,
        field_validator=pydantic.field_validator, **TYPING,
    )  # fmt: skip
    data: type[Any] = world["ScoredData"]
    return data


@cache
def atropos_reader() -> Callable[..., Any]:
    """How its trainer makes batches of what was posted."""
    world = definitions(
        of("atroposlib") / "example_trainer/data.py", "pad_data_to_good_offset", math=math,
        np=importlib.import_module("numpy"), torch=importlib.import_module("torch"), **TYPING,
    )  # fmt: skip
    reader: Callable[..., Any] = world["pad_data_to_good_offset"]
    return reader


def load_atropos(_: Trajectory, rows: list[Row]) -> list[Loaded]:
    """From ``ScoredData``, in which a label stands where something was sampled."""
    columns = ("tokens", "masks", "scores", "inference_logprobs", "messages")
    posted = atropos_data()(**{name: [row[name] for row in rows] for name in columns})
    found = []
    for ids, labels, score, logprobs in zip(
        posted.tokens, posted.masks, posted.scores, posted.inference_logprobs, strict=True
    ):
        mask = [int(label != -100) for label in labels]
        assert all(label in {-100, token} for label, token in zip(labels, ids, strict=True))
        found.append(Loaded(ids, mask, masked(mask, logprobs), score))
    return found


# --- NeMo RL --------------------------------------------------------------------------------------------------------


@contextmanager
def gym_answer() -> Iterator[type[Any]]:
    """The model of an answer of ``/run``."""
    pydantic, _ = importlib.import_module("pydantic"), importlib.import_module("openai")
    with packages(of("nemo-gym"), "nemo_gym"):
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
        yield world["BaseVerifyResponse"]


def load_nemo_rl(_: Trajectory, rows: list[Row]) -> list[Loaded]:
    """As NeMo RL walks an answer: each prompt begins with every token seen so far."""
    found = []
    with gym_answer() as model:
        for row in rows:
            answer = model.model_validate(row)
            ids: list[int] = []
            mask: list[int] = []
            logprobs: list[float] = []
            for item in answer.response.output:
                if not getattr(item, "generation_token_ids", None):
                    continue
                assert type(item).__name__.endswith("ForTraining")
                assert item.prompt_token_ids[: len(ids)] == ids
                told, made = len(item.prompt_token_ids) - len(ids), len(item.generation_token_ids)
                ids = [*item.prompt_token_ids, *item.generation_token_ids]
                mask += [0] * told + [1] * made
                logprobs += [0.0] * told + list(item.generation_log_probs)
            found.append(Loaded(ids, mask, single(logprobs), answer.reward))
    return found


# --- ATIF -----------------------------------------------------------------------------------------------------------


@contextmanager
def atif_document() -> Iterator[type[Any]]:
    """Harbor's own ``Trajectory``."""
    with packages(of("harbor"), "harbor", "harbor.models"):
        yield importlib.import_module("harbor.models.trajectories").Trajectory


def load_atif(_: Trajectory, rows: list[Row]) -> list[Loaded]:
    """From the metrics of the agent's steps; a document that it takes says the same again."""
    found = []
    with atif_document() as model:
        for row in rows:
            taken = model.model_validate_json(json.dumps(row), strict=True)
            assert taken.model_dump(mode="json", exclude_unset=True) == row
            ids: list[int] = []
            mask: list[int] = []
            logprobs: list[float] = []
            for step in taken.steps:
                if step.metrics is None:
                    continue
                told, made = step.metrics.prompt_token_ids, step.metrics.completion_token_ids
                assert told[: len(ids)] == ids
                mask += [0] * (len(told) - len(ids)) + [1] * len(made)
                logprobs += [0.0] * (len(told) - len(ids)) + step.metrics.logprobs
                ids = [*told, *made]
            found.append(Loaded(ids, mask, single(logprobs), taken.final_metrics.extra["reward"]))
    return found


# --- no class ---------------------------------------------------------------------------------------------------------


def load_slime(_: Trajectory, rows: list[Row]) -> list[Loaded]:
    """As it is published."""
    found = []
    for row in rows:
        before = len(row["tokens"]) - row["response_length"]
        mask = [0] * before + row["loss_mask"]
        found.append(
            Loaded(row["tokens"], mask, masked(mask, [0.0] * before + row["rollout_log_probs"]), row["reward"])
        )
    return found


def load_prime_rl(_: Trajectory, rows: list[Row]) -> list[Loaded]:
    """As it is published."""
    masks = [[int(bit) for bit in row["mask"]] for row in rows]
    return [
        Loaded(row["token_ids"], mask, masked(mask, row["logprobs"]), row["reward"])
        for row, mask in zip(rows, masks, strict=True)
    ]


LOADERS: dict[str, Loader] = {
    "verl": Loader("AgentLoopOutput", "verl", load_verl),
    "slime": Loader("the published fields of Sample", None, load_slime),
    "trl": Loader("RolloutSample", "trl", load_trl),
    "nemo_rl": Loader("BaseVerifyResponse", "nemo-gym", load_nemo_rl, to_the_end=False),
    "skyrl": Loader("GeneratorOutput", "skyrl", load_skyrl),
    "openrlhf": Loader("Experience", "openrlhf", load_openrlhf),
    "prime_rl": Loader("the published fields of TrainingSample", None, load_prime_rl),
    "areal": Loader("check_trajectory_format", "areal", load_areal),
    "atropos": Loader("ScoredData", "atroposlib", load_atropos),
    "atif": Loader("Trajectory", "harbor", load_atif, to_the_end=False),
}


def chat_rows(rows: list[Row]) -> Any:
    """Lines of ``chat`` as a data set of which TRL says that it is one of conversations."""
    datasets = importlib.import_module("datasets")
    is_conversational = importlib.import_module("trl").is_conversational
    found = datasets.Dataset.from_list(rows)
    assert all(is_conversational(line) for line in found)
    return found
