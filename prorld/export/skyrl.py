"""SkyRL: a ``GeneratorOutput``. Without step-wise training it has one row for a rollout, with it one for each branch.

SkyRL wants a row for each rollout that it asked for, and a reward in it. One that may not be trained on is refused,
unless the caller wants it neutral: then its mask is empty, and its reward is the mean of its group's usable ones, so
that it moves no baseline. (A group's deviation becomes a little smaller by it.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

from prorld.export.reading import Document, NotExportable, cut_short, is_usable, lists, one_row
from prorld.export.rows import Row, rows_of
from prorld.wire.trajectory import Trajectory

__all__ = ["COLUMNS", "generator_output"]


def generator_output(
    documents: Iterable[Document],
    *,
    step_wise: bool = False,
    last_branch: bool = False,
    unusable: Literal["refuse", "neutral"] = "refuse",
    filler_id: int | None = None,
) -> dict[str, Any]:
    """A ``GeneratorOutput`` of these rollouts, in their order.

    ``trajectory_ids`` are dictionaries with the fields of ``TrajectoryID``. A rollout that may not be used is refused
    with ``not_usable``; one with several branches with ``several_branches``, unless training is ``step_wise``, or
    ``last_branch`` lets the one sampled from last stand for it. What has no sampled token needs a ``filler_id``.
    """
    given = [lists(document) for document in documents]
    means = _means(given)
    output: dict[str, Any] = {name: [] for name in COLUMNS}
    for document in given:
        if not is_usable(document) and unusable == "refuse":
            raise NotExportable(
                f"job {document.job.job_id} ended as {document.outcome.kind} and may not be trained on, "
                "and SkyRL wants a reward in each row",
                code="not_usable",
            )
        neutral = means.get(_group(document), 0.0)
        for row in _rows(document, neutral, step_wise=step_wise, last_branch=last_branch, filler_id=filler_id):
            for name, value in row.items():
                output[name].append(value)
    usable = sum(is_usable(document) for document in given)
    return output | {
        "trajectory_generation_times": [document.job.timing.run_s for document in given],
        "rollout_metrics": {"prorld/usable": float(usable), "prorld/unusable": float(len(given) - usable)},
        "rollout_expert_indices": None,
        "is_last_step": output["is_last_step"] if step_wise else None,
    }


# The columns that have a value for each row.
COLUMNS = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs",
            "trajectory_ids", "is_last_step", "env_metrics")  # fmt: skip


def _group(document: Trajectory) -> str:
    return document.job.job_id if document.job.group_id is None else document.job.group_id


def _means(documents: Iterable[Trajectory]) -> dict[str, float]:
    """Each group's mean over what may be used."""
    rewards: dict[str, list[float]] = {}
    for document in documents:
        if is_usable(document) and document.reward is not None:
            rewards.setdefault(_group(document), []).append(document.reward)
    return {group: math.fsum(known) / len(known) for group, known in rewards.items()}


def _rows(
    document: Trajectory, neutral: float, *, step_wise: bool, last_branch: bool, filler_id: int | None
) -> list[dict[str, Any]]:
    rows = rows_of(document)
    usable = is_usable(document)
    if not rows and filler_id is not None:
        ids = ([filler_id], [filler_id], [0], [0.0])
        return [_row(document, ids, stop="abort", reward=neutral, is_last=True)]
    # SkyRL takes the last row of a rollout for its last step, and its reward for the rollout's.
    if not step_wise or not usable or not rows:
        rows = [one_row(document, rows, form="SkyRL without step-wise training", last=last_branch or not usable)]
    ordered = sorted(rows, key=lambda row: row.is_last)
    return [
        _row(
            document,
            (row.prompt_ids, row.response_ids, _mask(row, usable=usable), row.response_logprobs),
            stop="abort" if not usable else "length" if cut_short(document, row) else "stop",
            reward=document.reward if usable and document.reward is not None else neutral,
            is_last=n == len(ordered) - 1,
        )
        for n, row in enumerate(ordered)
    ]


def _mask(row: Row, *, usable: bool) -> list[int]:
    return row.response_mask if usable else [0] * len(row.response_mask)


def _row(
    document: Trajectory,
    ids: tuple[list[int], list[int], list[int], list[float]],
    *,
    stop: str,
    reward: float,
    is_last: bool,
) -> dict[str, Any]:
    prompt, response, mask, logprobs = ids
    return {
        "prompt_token_ids": prompt,
        "response_ids": response,
        "rewards": reward,
        "loss_masks": mask,
        "stop_reasons": stop,
        "rollout_logprobs": logprobs,
        "trajectory_ids": {"instance_id": _group(document), "repetition_id": document.job.sample_index},
        "is_last_step": is_last,
        "env_metrics": dict(document.job.reward_parts),
    }
