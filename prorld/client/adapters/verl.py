"""verl: an agent loop manager whose loops run in a daemon.

    actor_rollout_ref.rollout.agent.agent_loop_manager_class=prorld.client.adapters.verl.ProrldAgentLoopManager
    +actor_rollout_ref.rollout.custom.prorld.handler=math
    trainer.use_v1=False

Written for the trainers that pass a ``DataProto`` and get one back. A row of the batch names its instance in the column
``instance``, or in ``extra_info``. What may not be trained on keeps its row, with an empty ``response_mask``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from prorld.client.adapters.engines import MovedWeights
from prorld.client.adapters.rollouts import (
    Group,
    Rollout,
    Rollouts,
    figures_of,
    instance_from,
    neutral_rewards,
    prompts_of,
)
from prorld.client.adapters.settings import BAD_SETTINGS, sampling_of, settings_from
from prorld.client.errors import ClientError
from prorld.domain.job import Sampling
from prorld.export.reading import one_row
from prorld.export.rows import rows_of
from prorld.export.verl import agent_loop_outputs, columns_of_outputs
from prorld.wire.trajectory import unpacked

__all__ = ["ProrldAgentLoopManager"]

_USABLE = "prorld_usable"
# These stand in the trainer's batch already, under its own names.
_TRAINERS_OWN = frozenset({"uid"})
_INTEGERS = frozenset({"prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids"})


class ProrldAgentLoopManager:
    """Takes the place of verl's ``AgentLoopManager``. Settings stand in ``rollout.custom.prorld``.

    Engines are verl's own servers unless the settings name others. verl moves the weights; each new step names them.
    """

    def __init__(
        self, config: Any, llm_client: Any = None, teacher_client: Any = None, reward_loop_worker_handles: Any = None
    ) -> None:
        if teacher_client is not None:
            raise ClientError("the adapter for verl knows no teacher policy", code=BAD_SETTINGS)
        self._rollout = config.actor_rollout_ref.rollout
        self._settings = settings_from((self._rollout.get("custom") or {}).get("prorld"))
        if self._settings.branches != "last" or self._settings.informative != "all":
            raise ClientError(
                "verl has one row for each sample: branches is 'last', informative is 'all'", code=BAD_SETTINGS
            )
        engines = self._settings.backends() or _servers_of(llm_client, str(self._rollout.name))
        self._rollouts = Rollouts(self._settings)
        self._rollouts.engines = engines
        self._weights = MovedWeights(self._rollouts.client, self._settings, engines)
        # Called from coroutines and from plain functions; verl's own wrapper looks at its caller to tell which.
        self.generate_sequences = import_module("verl.utils.ray_utils").auto_await(self._generate_sequences)

    @classmethod
    def create(cls, *args: Any, **fields: Any) -> ProrldAgentLoopManager:
        """As verl makes its manager."""
        return cls(*args, **fields)

    async def _generate_sequences(self, prompts: Any) -> Any:
        return await asyncio.to_thread(self._generate, prompts)

    def _generate(self, prompts: Any) -> Any:
        rows, meta = getattr(prompts, "non_tensor_batch", None), getattr(prompts, "meta_info", None)
        if rows is None or meta is None:
            kind = type(prompts).__name__
            raise ClientError(
                f"verl passed a {kind}, and the adapter reads a DataProto: set trainer.use_v1=False", code=BAD_SETTINGS
            )
        is_eval, step = bool(meta.get("validate", False)), meta.get("global_steps", 0)
        self._weights.name(step, is_eval=is_eval)
        instances = instances_of(rows, len(prompts), self._settings.instance_key)
        groups = self._rollouts.collect(
            f"{'val' if is_eval else 'step'}{step}",
            prompts_of(instances, rows.get("uid")),
            self._sampling(rows, is_eval=is_eval),
            is_eval=is_eval,
        )
        pad = meta.get("pad_token_id")
        columns = columns_of_groups(
            groups,
            pad_id=0 if pad is None else int(pad),
            prompt_length=int(self._rollout.prompt_length),
            response_length=int(self._rollout.response_length),
        )
        return _data_proto(columns)

    def _sampling(self, rows: Mapping[str, Any], *, is_eval: bool) -> Sampling:
        if not all(bool(one) for one in rows.get("__do_sample__", ())):
            raise ClientError("the adapter samples all rows of a batch in the same way: no REMAX", code=BAD_SETTINGS)
        said = self._rollout.val_kwargs if is_eval else self._rollout
        own = {"temperature": said.temperature, "top_p": said.top_p, "top_k": said.top_k}
        if is_eval and not said.do_sample:
            own = {"temperature": 0.0}
        return sampling_of({**own, "max_tokens": self._rollout.response_length}, self._settings.sampling)


def instances_of(rows: Mapping[str, Any], count: int, key: str) -> list[dict[str, Any]]:
    """The instance of each row: a column of its own, or a field of ``extra_info``."""
    column, extra = rows.get(key), rows.get("extra_info")
    if column is None and extra is None:
        raise ClientError(f"the batch has no column {key!r}, and no extra_info", code=BAD_SETTINGS)
    found: list[dict[str, Any]] = []
    for n in range(count):
        said = extra[n].get(key) if column is None and extra is not None else column[n] if column is not None else None
        found.append(instance_from(said, f"{key} of row {n}"))
    return found


def columns_of_groups(
    groups: Sequence[Group], *, pad_id: int, prompt_length: int, response_length: int
) -> dict[str, Any]:
    """Columns of a ``DataProto`` as plain lists, a row for each rollout, in their order.

    A rollout that does not fit into verl's lengths is no result of the policy either: its row is masked, too.
    """
    rewards, every = iter(neutral_rewards(groups)), _mean_parts([one for group in groups for one in group.rollouts])
    outputs: list[dict[str, Any]] = []
    for group in groups:
        parts = every | _mean_parts(group.rollouts)
        for one in group.rollouts:
            output = _output(one, next(rewards), parts, pad_id)
            fits = len(output["prompt_ids"]) <= prompt_length and len(output["response_ids"]) <= response_length
            outputs.append(output if fits else _nothing(one, output["reward_score"], parts, pad_id))
    columns = columns_of_outputs(outputs, pad_id=pad_id, prompt_length=prompt_length, response_length=response_length)
    other = {name: column for name, column in columns["non_tensor_batch"].items() if name not in _TRAINERS_OWN}
    other["multi_modal_inputs"] = [{} for _ in outputs]
    used = sum(any(output["response_mask"]) for output in outputs)
    timing = _timing(columns["meta_info"]["metrics"]) | figures_of(groups) | {"prorld/rows_trained": float(used)}
    keys = columns["meta_info"]["reward_extra_keys"]
    return {
        "batch": columns["batch"],
        "non_tensor_batch": other,
        "meta_info": {"timing": timing, "reward_extra_keys": keys},
    }


def _mean_parts(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The mean of each part of the usable ones' rewards: what stands in rows that have none of their own."""
    told = [one.document.job.reward_parts for one in rollouts if one.document is not None and one.is_usable]
    names = sorted({name for parts in told for name in parts})
    known = {name: [parts[name] for parts in told if name in parts] for name in names}
    return {name: sum(values) / len(values) for name, values in known.items()}


def _output(one: Rollout, reward: float, parts: dict[str, float], pad_id: int) -> dict[str, Any]:
    if one.document is None or not one.is_usable:
        return _nothing(one, reward, parts, pad_id)
    row = one_row(unpacked(one.document), rows_of(one.document), form="a DataProto", last=True)
    outputs = agent_loop_outputs(one.document)
    output = next(each for each in outputs if each["extra_fields"]["branch"] == row.branch)
    info = output["extra_fields"]["reward_extra_info"] | {_USABLE: 1.0}
    return output | {"extra_fields": output["extra_fields"] | {"reward_extra_info": info}}


def _nothing(one: Rollout, reward: float, parts: dict[str, float], pad_id: int) -> dict[str, Any]:
    """A row of which nothing is trained: verl wants at least one token in it, and a number for its reward."""
    return {
        "prompt_ids": [pad_id], "response_ids": [pad_id], "response_mask": [0], "response_logprobs": [0.0],
        "reward_score": reward, "num_turns": 0,
        "metrics": {"generate_sequences": 0.0, "tool_calls": 0.0, "compute_score": 0.0},
        "extra_fields": {
            "min_global_steps": None, "max_global_steps": None, "turn_scores": [], "group_id": None,
            "job_id": one.job_id, "sample_index": None, "branch": None,
            "reward_extra_info": {**parts, "score": reward, _USABLE: 0.0},
        },
    }  # fmt: skip


def _timing(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Seconds by what they went into, under verl's names."""
    found: dict[str, float] = {}
    for name in ("generate_sequences", "tool_calls", "compute_score"):
        spent = [one[name] for one in metrics]
        found |= {
            f"agent_loop/{name}/min": min(spent, default=0.0),
            f"agent_loop/{name}/max": max(spent, default=0.0),
            f"agent_loop/{name}/mean": sum(spent) / max(1, len(spent)),
        }
    return found


def _servers_of(llm_client: Any, kind: str) -> list[Any]:
    """The trainer's own servers, by the load balancer that knows them."""
    balancer = getattr(llm_client, "_load_balancer", None)
    if balancer is None:
        return []
    addresses = import_module("ray").get(balancer.get_all_servers.remote())
    return settings_from(None, engines=[f"{kind}=http://{address}" for address in sorted(addresses)]).backends()


def _data_proto(columns: Mapping[str, Any]) -> Any:
    """The columns as verl's own class, whose packages are there when it is used."""
    numpy, torch = import_module("numpy"), import_module("torch")
    tensors = {
        name: torch.tensor(column, dtype=torch.int64 if name in _INTEGERS else torch.float32)
        for name, column in columns["batch"].items()
    }
    other: dict[str, Any] = {}
    for name, column in columns["non_tensor_batch"].items():
        is_number = name in columns["meta_info"]["reward_extra_keys"] or name == "__num_turns__"
        array = numpy.empty(len(column), dtype=float if is_number else object)
        array[:] = column
        other[name] = array
    size = len(columns["batch"]["prompts"])
    return import_module("verl.protocol").DataProto(
        batch=import_module("tensordict").TensorDict(tensors, batch_size=size),
        non_tensor_batch=other,
        meta_info=dict(columns["meta_info"]),
    )
