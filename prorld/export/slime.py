"""slime: a ``Sample`` for each row, as ``Sample.from_dict`` reads it.

All rows of one rollout have the same ``rollout_id``, so that the loss is averaged per rollout. A rollout that may not
be trained on stays in its group as one sample that is removed from the loss, has an empty mask and no reward: slime's
own normalisation refuses to average over a reward that is none, and never takes trouble for a zero.
"""

from __future__ import annotations

from typing import Any

from prorld.domain.outcome import OutcomeKind
from prorld.export.reading import Document, completion_chat, cut_short, is_usable, lists, prompt_chat
from prorld.export.rows import Row, rows_of
from prorld.wire.trajectory import Trajectory

__all__ = ["samples"]

# Ends that came from outside of the policy and its environment; whatever else can't be trained on has failed.
_ABORTED = frozenset({OutcomeKind.CANCELLED, OutcomeKind.LOST, OutcomeKind.TIMEOUT})


def samples(
    document: Document, *, group_index: int | None = None, index: int | None = None, label: str | None = None
) -> list[dict[str, Any]]:
    """The samples of one rollout; the numbers are slime's own, those of the sample that it asked for."""
    document = lists(document)
    rows = rows_of(document)
    if not is_usable(document):
        found = [_removed(document, next((row for row in rows if row.is_last), rows[-1] if rows else None))]
    else:
        found = [_trained(document, row) for row in rows]
    own = {"group_index": group_index, "index": index, "rollout_id": index, "label": label}
    return [sample | own for sample in found]


def _trained(document: Trajectory, row: Row) -> dict[str, Any]:
    return _tokens(document, row) | {
        "loss_mask": row.response_mask,
        "reward": row.reward,
        "remove_sample": False,
        "status": "truncated" if cut_short(document, row) else "completed",
        "metadata": {"prorld": _words(document, row)},
    }


def _removed(document: Trajectory, row: Row | None) -> dict[str, Any]:
    length = 0 if row is None else len(row.response_ids)
    return _tokens(document, row) | {
        "loss_mask": [0] * length,
        "reward": None,
        "remove_sample": True,
        "status": "aborted" if document.outcome.kind in _ABORTED else "failed",
        "metadata": {"prorld": _words(document, row)},
    }


def _tokens(document: Trajectory, row: Row | None) -> dict[str, Any]:
    timing = document.job.timing
    spent = max(0.0, timing.run_s - timing.llm_s)
    if row is None:
        return {
            "prompt": [], "tokens": [], "response": "", "response_length": 0, "rollout_log_probs": [],
            "weight_versions": [], "non_generation_time": spent,
        }  # fmt: skip
    said = [message["content"] for message in completion_chat(document, row) if message["role"] == "assistant"]
    return {
        "prompt": prompt_chat(document, row),
        "tokens": row.token_ids,
        "response": "\n".join(said),
        "response_length": len(row.response_ids),
        "rollout_log_probs": row.response_logprobs,
        "weight_versions": _versions(row),
        "non_generation_time": spent,
    }


def _versions(row: Row) -> list[str]:
    """Each change of the version along the response, as text."""
    made = [version for version in row.versions if version is not None]
    return [str(version) for n, version in enumerate(made) if n == 0 or made[n - 1] != version]


def _words(document: Trajectory, row: Row | None) -> dict[str, Any]:
    job = document.job
    return {
        "job_id": job.job_id,
        "group_id": job.group_id,
        "sample_index": job.sample_index,
        "branch": None if row is None else row.branch,
        "outcome": document.outcome.kind.value,
        "outcome_code": document.outcome.code,
        "verdict": document.verdict.value,
        "reward_parts": job.reward_parts,
        "step_rewards": [] if row is None else sorted(row.step_rewards.items()),
    }
