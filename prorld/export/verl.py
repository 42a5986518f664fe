"""verl: an ``AgentLoopOutput`` for each row, or the columns of a ``DataProto``.

verl has no place for a rollout that may not be trained on: its baseline is over every row it is given. Such a rollout
gives no row. The versions of the policy stand where verl keeps its global steps, so a trainer that names its step as
the version of an update gets its staleness for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from prorld.export.reading import Document, NotExportable, branch_of_row, lists, span_of, trained_rows
from prorld.export.rows import Row
from prorld.wire.trajectory import Trajectory

__all__ = ["agent_loop_outputs", "columns_of_outputs", "dataproto_columns"]

# What verl's own agent loops put beside a log-probability that is none, and into padding.
_NO_LOGPROB = 0.0


def agent_loop_outputs(document: Document) -> list[dict[str, Any]]:
    """Keyword arguments of ``AgentLoopOutput``, for each row; none where training may not use the rollout."""
    document = lists(document)
    return [_output(document, row) for row in trained_rows(document)]


def _output(document: Trajectory, row: Row) -> dict[str, Any]:
    oldest, newest = span_of(row)
    timing = document.job.timing
    return {
        "prompt_ids": row.prompt_ids,
        "response_ids": row.response_ids,
        "response_mask": row.response_mask,
        "response_logprobs": row.response_logprobs,
        "reward_score": row.reward,
        "num_turns": _turns(document, row),
        "metrics": {
            "generate_sequences": timing.llm_s,
            "tool_calls": timing.tool_s,
            "compute_score": timing.eval_s,
        },
        "extra_fields": {
            "min_global_steps": oldest,
            "max_global_steps": newest,
            "turn_scores": [row.step_rewards[index] for index in sorted(row.step_rewards)],
            # What dynamic sampling filters on: `filter_groups.metric` names one of these.
            "reward_extra_info": {**document.job.reward_parts, "score": row.reward},
            # Not as "uid": verl writes extra fields over its own columns, and would group by ours.
            "group_id": row.group_id,
            "job_id": row.job_id,
            "sample_index": row.sample_index,
            "branch": row.branch,
        },
    }


def _turns(document: Trajectory, row: Row) -> int:
    """Turns of user, assistant and tool, as verl counts them."""
    return sum(
        segment.source == "sampled" or (segment.message is not None and segment.message.role != "system")
        for segment in branch_of_row(document, row).segments
    )


def dataproto_columns(
    documents: Iterable[Document],
    *,
    pad_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
) -> dict[str, Any]:
    """``batch`` and ``non_tensor_batch`` of a ``DataProto`` as plain lists, and its ``meta_info``.

    Prompts are padded on the left and responses on the right, to the lengths given or to the longest. Nothing is cut
    off: a row that is longer than its column is refused with ``too_long``.
    """
    outputs = [output for document in documents for output in agent_loop_outputs(document)]
    return columns_of_outputs(outputs, pad_id=pad_id, prompt_length=prompt_length, response_length=response_length)


def columns_of_outputs(
    outputs: Sequence[dict[str, Any]],
    *,
    pad_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
) -> dict[str, Any]:
    """The same of what ``agent_loop_outputs`` gave, a row for each."""
    prompts = _width(outputs, "prompt_ids", prompt_length)
    responses = _width(outputs, "response_ids", response_length)
    batch: dict[str, list[list[Any]]] = {name: [] for name in _BATCH}
    for output in outputs:
        for name, column in _padded(output, prompts, responses, pad_id).items():
            batch[name].append(column)
    rewards = [output["extra_fields"]["reward_extra_info"] for output in outputs]
    named = sorted({name for info in rewards for name in info})
    extra = [output["extra_fields"] for output in outputs]
    other: dict[str, list[Any]] = {"__num_turns__": [output["num_turns"] for output in outputs]}
    other |= {name: [info.get(name) for info in rewards] for name in named}
    other |= {name: [fields[name] for fields in extra] for name in _FIELDS}
    other["uid"] = [fields["job_id"] if fields["group_id"] is None else fields["group_id"] for fields in extra]
    metrics = [output["metrics"] for output in outputs]
    return {
        "batch": batch,
        "non_tensor_batch": other,
        "meta_info": {"metrics": metrics, "reward_extra_keys": named},
    }


_BATCH = (
    "prompts",
    "responses",
    "response_mask",
    "input_ids",
    "attention_mask",
    "position_ids",
    "rollout_log_probs",
    "rm_scores",
)
_FIELDS = (
    "group_id",
    "job_id",
    "sample_index",
    "branch",
    "turn_scores",
    "min_global_steps",
    "max_global_steps",
)


def _width(outputs: Sequence[dict[str, Any]], name: str, wanted: int | None) -> int:
    """How wide a column is; a row that does not fit is refused."""
    longest = max((len(output[name]) for output in outputs), default=0)
    if wanted is None:
        return longest
    if longest > wanted:
        job_id = next(output["extra_fields"]["job_id"] for output in outputs if len(output[name]) == longest)
        raise NotExportable(f"job {job_id}: {name} has {longest} tokens, and {wanted} fit", code="too_long")
    return wanted


def _padded(output: dict[str, Any], prompts: int, responses: int, pad_id: int) -> dict[str, list[Any]]:
    prompt, response = output["prompt_ids"], output["response_ids"]
    before, after = prompts - len(prompt), responses - len(response)
    scores = [0.0] * responses
    scores[len(response) - 1] = output["reward_score"]
    total = len(prompt) + len(response)
    return {
        "prompts": [pad_id] * before + prompt,
        "responses": response + [pad_id] * after,
        "response_mask": output["response_mask"] + [0] * after,
        "input_ids": [pad_id] * before + prompt + response + [pad_id] * after,
        "attention_mask": [0] * before + [1] * total + [0] * after,
        # As verl counts them: the running sum of the attention mask, which stands still in the padding.
        "position_ids": [0] * before + list(range(total)) + [total - 1] * after,
        "rollout_log_probs": output["response_logprobs"] + [_NO_LOGPROB] * after,
        "rm_scores": scores,
    }
