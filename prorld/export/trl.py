"""TRL: what a ``rollout_func`` returns, and the ``RolloutSample`` of the asynchronous worker.

``GRPOTrainer`` wants one completion for each prompt, in order, so a rollout that may not be trained on has a row, too:
with an empty ``env_mask`` and no ``env_reward``. A completion that no reward function has a value for is out of TRL's
baseline and has no advantage. The worker computes advantages itself, and such a rollout gives it nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from prorld.export.reading import (
    Document,
    NotExportable,
    completion_chat,
    is_usable,
    lists,
    one_row,
    prompt_chat,
    span_of,
    trained_rows,
)
from prorld.export.rows import Row, rows_of
from prorld.wire.trajectory import Trajectory

__all__ = ["rollout", "worker_samples"]

# Keeps the advantages of a group finite when its rewards are all the same; TRL's own.
_EPSILON = 1e-8


def rollout(
    documents: Iterable[Document], *, last_branch: bool = False, filler_id: int | None = None
) -> dict[str, list[Any]]:
    """What a ``rollout_func`` returns for these rollouts, a row for each.

    A rollout with several branches is refused with ``several_branches``; with ``last_branch`` the one sampled from last
    stands for it. One without any sampled token is refused with ``no_tokens``, unless ``filler_id`` names a token to
    stand there unmasked.
    """
    found: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    for each in documents:
        for name, value in _completion(lists(each), last_branch=last_branch, filler_id=filler_id).items():
            found[name].append(value)
    return found


_COLUMNS = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "env_reward", "job_id", "outcome", "verdict")


def _completion(document: Trajectory, *, last_branch: bool, filler_id: int | None) -> dict[str, Any]:
    usable, rows = is_usable(document), rows_of(document)
    if not rows and filler_id is not None:
        columns: tuple[Any, ...] = ([filler_id], [filler_id], [0.0], [0])
        usable = False
    else:
        row = one_row(document, rows, form="a rollout_func", last=last_branch or not usable)
        mask = row.response_mask if usable else [0] * len(row.response_mask)
        columns = (row.prompt_ids, row.response_ids, row.response_logprobs, mask)
    words = (document.reward if usable else None, document.job.job_id, document.outcome.kind, document.verdict)
    return dict(zip(_COLUMNS, (*columns, *words), strict=True))


def worker_samples(
    documents: Iterable[Document], *, group_number: int, model_version: int | None = None
) -> list[dict[str, Any]]:
    """Keyword arguments of ``RolloutSample`` for the rollouts of one group, a sample for each row.

    The advantage is over the rollouts that may be used, each of which counts once however many rows it has. Columns are
    lists, which TRL wants as arrays. ``model_version`` is for engines that name none.
    """
    usable = [lists(document) for document in documents if is_usable(document)]
    rewards = [document.reward for document in usable if document.reward is not None]
    mean, std = _moments(rewards)
    return [
        _sample(document, row, mean, std, group_number, model_version)
        for document in usable
        for row in trained_rows(document)
    ]


def _moments(rewards: Sequence[float]) -> tuple[float, float]:
    if not rewards:
        return 0.0, 0.0
    mean = math.fsum(rewards) / len(rewards)
    return mean, math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))


def _sample(
    document: Trajectory, row: Row, mean: float, std: float, group_number: int, model_version: int | None
) -> dict[str, Any]:
    oldest = span_of(row)[0]
    version = model_version if oldest is None else oldest
    if version is None:
        raise NotExportable(
            f"job {row.job_id} does not know which version sampled it, and the worker must say one", code="no_version"
        )
    assert document.reward is not None, "only what has a reward is usable"
    return {
        "prompt": prompt_chat(document, row),
        "completion": completion_chat(document, row),
        "input_ids": row.token_ids,
        "completion_mask": [0] * len(row.prompt_ids) + row.response_mask,
        "old_log_probs": [0.0] * len(row.prompt_ids) + row.response_logprobs,
        "advantage": (document.reward - mean) / (std + _EPSILON),
        "model_version": version,
        "group_id": group_number,
        "metrics": {
            "reward": document.reward,
            "reward_std": std,
            **{f"rewards/{name}": value for name, value in document.job.reward_parts.items()},
        },
    }
