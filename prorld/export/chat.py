"""Chat lines for supervised fine-tuning: the messages of each branch that may be trained on, with their reward.

No tokens: whoever trains on them renders them again. ``weight`` is 1 on what the policy said in this branch and 0 on
what it said in another one and was told again here, so that nothing is learned twice.
"""

from __future__ import annotations

from typing import Any

from prorld.export.reading import Document, as_chat, branch_of_row, lists, trained_rows
from prorld.export.rows import Row
from prorld.wire.trajectory import Trajectory

__all__ = ["lines"]


def lines(document: Document) -> list[dict[str, Any]]:
    """A line for each branch; none where training may not use the rollout, or where the tokens stand for no message."""
    document = lists(document)
    found = [_line(document, row) for row in trained_rows(document)]
    return [line for line in found if any(message.get("weight") for message in line["messages"])]


def _line(document: Trajectory, row: Row) -> dict[str, Any]:
    job = document.job
    messages: list[dict[str, Any]] = []
    for segment in branch_of_row(document, row).segments:
        if segment.message is not None:
            said = as_chat(segment.message)
            if segment.message.role == "assistant":
                said["weight"] = int(segment.source == "sampled")
            messages.append(said)
    line: dict[str, Any] = {"messages": messages}
    if document.tools:
        line["tools"] = [tool.as_function() for tool in document.tools]
    return line | {
        "reward": row.reward,
        "job_id": row.job_id,
        "group_id": row.group_id,
        "sample_index": row.sample_index,
        "branch": row.branch,
        "handler": job.handler,
        "policy": job.policy,
        "policy_versions": job.policy_versions,
        "stop_reason": None if job.stop_reason is None else job.stop_reason.value,
    }
