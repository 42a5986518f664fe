"""SkyRL: a generator whose trajectories a daemon makes.

    class Exp(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return ProrldGenerator(
                handler="math", run="math-1", inference_engine_client=inference_engine_client,
                step_wise=cfg.generator.step_wise_trajectories,
            )

For the synchronous trainer. A row names its instance in ``env_extras["instance"]``. What may not be trained on keeps
its place, with an empty loss mask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
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
from prorld.client.adapters.settings import BAD_SETTINGS, AdapterSettings, sampling_of, settings_from
from prorld.client.errors import ClientError
from prorld.export.skyrl import generator_output

__all__ = ["ProrldGenerator"]

# What vLLM's parameters are called that we have, too.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
_BY_ROW = (
    "prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs", "is_last_step",
    "env_metrics",
)  # fmt: skip


class ProrldGenerator:
    """SkyRL's ``GeneratorInterface``. Settings are those of ``AdapterSettings``, by name.

    Engines are those of ``inference_engine_client`` unless the settings name others. With ``step_wise`` every branch of
    a rollout is a row; without it the one sampled from last stands for it. ``filler_id`` stands where a rollout left no
    token.
    """

    def __init__(
        self,
        settings: AdapterSettings | Mapping[str, Any] | None = None,
        *,
        inference_engine_client: Any = None,
        step_wise: bool = False,
        filler_id: int = 0,
        **more: Any,
    ) -> None:
        self._settings = settings_from(settings, **more)
        if self._settings.informative != "all":
            raise ClientError("SkyRL wants every trajectory: informative must be 'all'", code=BAD_SETTINGS)
        urls = getattr(inference_engine_client, "server_urls", None) or []
        named = settings_from(None, engines=[f"vllm={url}" for url in urls])
        engines = self._settings.backends() or named.backends()
        self._rollouts = Rollouts(self._settings)
        self._rollouts.engines = engines
        self._weights = MovedWeights(self._rollouts.client, self._settings, engines)
        self._step_wise = step_wise
        self._filler_id = filler_id
        # Of whoever calls at the same time, one is served after the other.
        self._turn = asyncio.Lock()

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """One trajectory for each prompt, in their order."""
        async with self._turn:
            return await asyncio.to_thread(self._generate, input_batch)

    def close(self) -> None:
        """Acknowledge what was handed out last. For the end of training."""
        self._rollouts.close()

    def _generate(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        meta, ids = asked.get("batch_metadata"), asked.get("trajectory_ids")
        step, is_eval = (0, False) if meta is None else (int(meta.global_step), meta.training_phase == "eval")
        self._weights.name(step, is_eval=is_eval)
        instances = instances_of(asked, self._settings.instance_key)
        names = None if ids is None else [one.instance_id for one in ids]
        said = asked.get("sampling_params") or {}
        own = {name: said[name] for name in _SAMPLING if name in said}
        sampling = sampling_of(own, self._settings.sampling)
        name = f"{'eval' if is_eval else 'step'}{step}"
        groups = self._rollouts.collect(name, prompts_of(instances, names), sampling, is_eval=is_eval)
        return output_of(groups, ids, step_wise=self._step_wise, filler_id=self._filler_id)


def instances_of(asked: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The instance of each row."""
    extras = asked.get("env_extras")
    if extras is None:
        raise ClientError(f"the batch has no env_extras, where instances stand as {key!r}", code=BAD_SETTINGS)
    return [instance_from((row or {}).get(key), f"{key} of row {n}") for n, row in enumerate(extras)]


def output_of(
    groups: Sequence[Group], trajectory_ids: Sequence[Any] | None, *, step_wise: bool, filler_id: int
) -> dict[str, Any]:
    """A ``GeneratorOutput``; ``trajectory_ids`` are the trainer's own, one for each rollout."""
    rollouts = [one for group in groups for one in group.rollouts]
    columns: dict[str, list[Any]] = {name: [] for name in _BY_ROW}
    named: list[Any] = []
    for place, (one, reward) in enumerate(zip(rollouts, neutral_rewards(groups), strict=True)):
        rows = _rows(one, step_wise=step_wise, filler_id=filler_id)
        count = len(rows["response_ids"])
        # The mean of its own group, whose documents are not all here at once.
        rows["rewards"] = [reward] * count
        rows["is_last_step"] = [n == count - 1 for n in range(count)]
        for name in _BY_ROW:
            columns[name] += rows[name]
        named += [] if trajectory_ids is None else [trajectory_ids[place]] * count
    times = [0.0 if one.document is None else one.document.job.timing.run_s for one in rollouts]
    return {
        **columns,
        "is_last_step": columns["is_last_step"] if step_wise else None,
        "trajectory_ids": None if trajectory_ids is None else named,
        "trajectory_generation_times": times,
        "rollout_metrics": figures_of(groups),
        "rollout_expert_indices": None,
        "pixel_values": None,
        "image_grid_thw": None,
    }


def _rows(one: Rollout, *, step_wise: bool, filler_id: int) -> dict[str, list[Any]]:
    if one.document is None:
        return {
            "prompt_token_ids": [[filler_id]], "response_ids": [[filler_id]], "loss_masks": [[0]],
            "rollout_logprobs": [[0.0]], "stop_reasons": ["abort"], "env_metrics": [{}],
        }  # fmt: skip
    return generator_output(
        [one.document], step_wise=step_wise, last_branch=True, unusable="neutral", filler_id=filler_id
    )
