"""slime: a rollout function whose samples a daemon makes.

    --rollout-function-path prorld.client.adapters.slime.generate_rollout
    --custom-config-path prorld.yaml      # prorld: {handler: math, run: math-1}

A sample names its instance in ``metadata["instance"]``. With ``informative: spread`` groups that teach nothing are
replaced, as long as there are prompts. What may not be trained on stays in its group as a sample that is removed from
the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from prorld.client.adapters.engines import MovedWeights
from prorld.client.adapters.rollouts import (
    NO_USABLE,
    Group,
    Prompt,
    Rollout,
    Rollouts,
    figures_of,
    instance_from,
    neutral_rewards,
)
from prorld.client.adapters.settings import BAD_SETTINGS, AdapterSettings, sampling_of, settings_from
from prorld.client.errors import ClientError
from prorld.client.find import Address, Target
from prorld.client.flows import Ask
from prorld.client.http import JSON, Transport
from prorld.export.slime import samples
from prorld.wire.ops import SetBackend

__all__ = ["generate_rollout"]

# How often new prompts are fetched for groups that could not be used.
ROUNDS_MAX = 16
ROUTER_S = 30.0
# What slime's router and SGLang's say of their workers, by their versions.
_WORKER_PATHS = ("/workers", "/list_workers")
# Where an adapter is kept between the calls of one run: beside the prompts that it consumes.
_KEPT = "prorld_adapter"
_FILLER_ID = 0


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:  # noqa: FBT001, FBT002 - slime's
    """What slime calls for each rollout and each evaluation."""
    adapter = getattr(data_source, _KEPT, None)
    if adapter is None:
        adapter = _Adapter(args)
        setattr(data_source, _KEPT, adapter)
    types = import_module("slime.rollout.base_types")
    if evaluation:
        return types.RolloutFnEvalOutput(data=adapter.evaluate(rollout_id))
    groups, figures = adapter.train(rollout_id, data_source)
    return types.RolloutFnTrainOutput(samples=groups, metrics=figures)


class _Adapter:
    """What lasts from call to call."""

    def __init__(self, args: Any) -> None:
        self._args = args
        said = getattr(args, "prorld", None)
        if said is not None and not isinstance(said, Mapping):
            raise ClientError("prorld in slime's configuration is no mapping", code=BAD_SETTINGS)
        self._settings: AdapterSettings = settings_from(said)
        engines = self._settings.backends() or workers_of(args)
        self._rollouts = Rollouts(self._settings)
        self._rollouts.engines = engines
        self._weights = MovedWeights(self._rollouts.client, self._settings, engines)

    def train(self, rollout_id: int, data_source: Any) -> tuple[list[list[Any]], dict[str, float]]:
        """So many groups as a rollout has, with new prompts for those that could not be used."""
        self._weights.name(rollout_id, is_eval=False)
        target, found = int(self._args.rollout_batch_size), list[tuple[list[Any], Group]]()
        every: list[Group] = []
        for number in range(ROUNDS_MAX):
            missing = target - len(found)
            asked = data_source.get_samples(max(missing, self._over_sampling() if number == 0 else missing))
            if not asked:
                break
            groups = self._collect(f"rollout{rollout_id}-r{number}", asked, missing, is_more=number > 0)
            every += groups
            found += [(asked[group.place], group) for group in groups if any(one.is_usable for one in group.rollouts)]
            # Each size of group is a batch, which may bring as many as were missing. By the next call their rollouts
            # would be of older weights, so it is the prompts that are kept.
            surplus, found = [own for own, _ in found[target:]], found[:target]
            unused = surplus + [asked[group.place] for group in groups if group.is_unfinished]
            if unused:
                data_source.add_samples(unused)
            if len(found) == target:
                break
        if len(found) < target:
            message = f"rollout {rollout_id}: {len(found)} groups of {target} after {len(every)} prompts"
            raise ClientError(message, code=NO_USABLE)
        made = list(self._samples([group for _, group in found], [own for own, _ in found]))
        return made, figures_of(every) | {"prorld/groups_asked": float(len(every))}

    def evaluate(self, rollout_id: int) -> dict[str, dict[str, Any]]:
        """The rewards of slime's data sets for evaluation. What no grader judged is in none of them."""
        self._weights.name(rollout_id, is_eval=True)
        sample = import_module("slime.utils.types").Sample
        found: dict[str, dict[str, Any]] = {}
        for data in getattr(self._args, "eval_datasets", None) or []:
            count = int(data.n_samples_per_eval_prompt)
            asked = [[sample(metadata=row) for _ in range(count)] for row in rows_of_file(data.path, data.metadata_key)]
            own = {
                "temperature": data.temperature,
                "top_p": data.top_p,
                "top_k": data.top_k,
                "max_tokens": data.max_response_len,
            }
            groups = self._collect(f"eval{rollout_id}-{data.name}", asked, None, said=own, is_eval=True)
            made = [one for group in self._samples(groups, asked) for one in group if not one.remove_sample]
            found[data.name] = {
                "rewards": [one.reward if self._key is None else one.reward[self._key] for one in made],
                "truncated": [one.status.value == "truncated" for one in made],
                "samples": made,
            }
        return found

    @property
    def _key(self) -> str | None:
        return getattr(self._args, "reward_key", None) or None

    def _over_sampling(self) -> int:
        wanted = getattr(self._args, "over_sampling_batch_size", None) or self._args.rollout_batch_size
        return int(wanted) if self._settings.informative == "spread" else int(self._args.rollout_batch_size)

    def _collect(
        self,
        step: str,
        asked: Sequence[Sequence[Any]],
        target: int | None,
        *,
        said: Mapping[str, Any] | None = None,
        is_eval: bool = False,
        is_more: bool = False,
    ) -> list[Group]:
        args, key = self._args, self._settings.instance_key
        prompts = [
            Prompt(instance_from((group[0].metadata or {}).get(key), f"metadata[{key!r}] of prompt {n}"), len(group))
            for n, group in enumerate(asked)
        ]
        own = said or {
            "temperature": args.rollout_temperature, "top_p": args.rollout_top_p, "top_k": args.rollout_top_k,
            "max_tokens": args.rollout_max_response_len,
        }  # fmt: skip
        sampling = sampling_of(own, self._settings.sampling)
        return self._rollouts.collect(step, prompts, sampling, target=target, is_eval=is_eval, is_more=is_more)

    def _samples(self, groups: Sequence[Group], asked: Sequence[Sequence[Any]]) -> Iterator[list[Any]]:
        rewards = iter(neutral_rewards(groups))
        for group, own in zip(groups, asked, strict=True):
            made: list[Any] = []
            for one, sample in zip(group.rollouts, own, strict=True):
                made += self._made(one, sample, next(rewards))
            yield made

    def _made(self, one: Rollout, sample: Any, reward: float) -> list[Any]:
        """The trainer's sample with what became of it, or several of one ``rollout_id``."""
        own = sample.to_dict()
        rows = [_nothing(one)] if one.document is None else samples(one.document)
        if self._settings.branches == "last" and one.is_usable and one.document is not None:
            last = one.document.calls[-1].branch
            rows = [row for row in rows if row["metadata"]["prorld"]["branch"] == last] or rows[-1:]
        made: list[Any] = []
        for row in rows:
            fields = own | (row if row["tokens"] else row | _FILLED)
            parts = row["metadata"]["prorld"].get("reward_parts", {})
            fields |= {name: own.get(name) for name in ("group_index", "index", "label")}
            fields["rollout_id"] = own.get("index")
            fields["reward"] = reward if self._key is None else {**parts, self._key: reward}
            fields["metadata"] = {**(own.get("metadata") or {}), **row["metadata"]}
            made.append(type(sample).from_dict(fields))
        return made


# slime computes over every sample that it is given, so even one that is removed has a token.
_FILLED = {
    "tokens": [_FILLER_ID, _FILLER_ID], "response_length": 1, "loss_mask": [0], "rollout_log_probs": [0.0],
}  # fmt: skip


def _nothing(one: Rollout) -> dict[str, Any]:
    return {
        **_FILLED, "response": "", "weight_versions": [], "remove_sample": True, "status": "failed",
        "metadata": {"prorld": {"job_id": one.job_id, "verdict": one.verdict}},
    }  # fmt: skip


def rows_of_file(path: str, key: str | None) -> list[dict[str, Any]]:
    """The metadata of each row of a JSON Lines file, as slime's own data sets have it."""
    if not str(path).endswith(".jsonl"):
        raise ClientError(f"an evaluation on {path}: the adapter reads .jsonl", code=BAD_SETTINGS)
    try:
        lines = [line for line in Path(path).read_bytes().splitlines() if line.strip()]
        rows = [msgspec.json.decode(line) for line in lines]
    except (OSError, msgspec.DecodeError) as exc:
        raise ClientError(f"an evaluation on {path}: {exc}", code=BAD_SETTINGS) from exc
    found = [row.get(key or "metadata") if isinstance(row, dict) else None for row in rows]
    if not all(isinstance(one, dict) for one in found):
        raise ClientError(f"an evaluation on {path}: a row without {key or 'metadata'!r}", code=BAD_SETTINGS)
    return [one for one in found if isinstance(one, dict)]


def workers_of(args: Any) -> list[SetBackend]:
    """The engines behind slime's router; none where there is no router."""
    host, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
    if not host or not port:
        return []
    router = Target(Address(str(host), int(port)), None)
    transport = Transport()
    try:
        for path in _WORKER_PATHS:
            reply = transport.request(Ask(router, "GET", path, None, ROUTER_S, JSON))
            if reply.status == 200:
                return _engines_of(reply.body, f"{host}:{port}")
    finally:
        transport.close()
    raise ClientError(f"slime's router at {host}:{port} does not say which workers it has", code=BAD_SETTINGS)


def _engines_of(body: bytes, where: str) -> list[SetBackend]:
    try:
        said = msgspec.json.decode(body, type=_Workers)
    except msgspec.DecodeError as exc:
        raise ClientError(f"slime's router at {where}: {exc}", code=BAD_SETTINGS) from exc
    urls = [one.url for one in said.workers] or said.urls
    return settings_from(None, engines=[f"sglang={url}" for url in urls]).backends()


class _Worker(msgspec.Struct):
    url: str


class _Workers(msgspec.Struct):
    workers: list[_Worker] = []
    urls: list[str] = []
