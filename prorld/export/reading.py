"""What exporters ask of a trajectory: may it be trained on, was it cut off, which versions made it, what was said.

One rule holds in every format: tokens that may be trained on come only from a rollout whose verdict is ``use`` and
that has a reward. A format whose reader counts rows can be given the row of another, with an empty mask and no reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from prorld.domain.messages import CallStatus, Message
from prorld.domain.outcome import StopReason, Verdict
from prorld.errors import Conflict
from prorld.export.rows import Row, rows_of
from prorld.wire.trajectory import BranchDoc, PackedTrajectory, Trajectory, unpacked

__all__ = [
    "Document",
    "NotExportable",
    "as_chat",
    "branch_of_row",
    "chat_of",
    "completion_chat",
    "cut_short",
    "is_usable",
    "lists",
    "one_row",
    "prompt_chat",
    "span_of",
    "trained_rows",
]

Document = Trajectory | PackedTrajectory

# Ends of an episode that leave the last thing sampled without an end of its own.
_CUT = frozenset({StopReason.MAX_TOKENS, StopReason.CONTEXT_FULL})
_WELL_FORMED = frozenset({CallStatus.OK, CallStatus.UNKNOWN_TOOL})


class NotExportable(Conflict):
    """A rollout that a format has no honest place for; ``stable_code`` says why."""

    code = "not_exportable"


def lists(document: Document) -> Trajectory:
    """The form with lists for columns."""
    return unpacked(document) if isinstance(document, PackedTrajectory) else document


def is_usable(document: Document) -> bool:
    """Whether training may use it: the verdict says so, there is a reward, and the policy sampled something."""
    return (
        document.verdict is Verdict.USE
        and document.reward is not None
        and any(any(branch.mask) for branch in document.branches)
    )


def trained_rows(document: Document) -> list[Row]:
    """A row for each branch in which something was sampled, and none at all where training may not use the rollout."""
    return rows_of(document) if is_usable(document) else []


def one_row(document: Trajectory, rows: Sequence[Row], *, form: str, last: bool = False) -> Row:
    """The row for a format that has room for one. With ``last`` the branch sampled from last stands for a fork."""
    if len(rows) == 1:
        return rows[0]
    job_id = document.job.job_id
    if not rows:
        raise NotExportable(f"job {job_id} has no sampled token, and {form} has no row without one", code="no_tokens")
    if last:
        return next((row for row in rows if row.is_last), rows[-1])
    raise NotExportable(
        f"job {job_id} has {len(rows)} branches, and {form} has one row for a rollout", code="several_branches"
    )


def cut_short(document: Document, row: Row) -> bool:
    """Whether the row ends because something was full, not because the policy stopped."""
    return row.finish_reason == "length" or (row.is_last and document.job.stop_reason in _CUT)


def span_of(row: Row) -> tuple[int | None, int | None]:
    """The oldest and the newest policy version in the row; ``None`` where not all are known."""
    made = [version for version, mask in zip(row.versions, row.response_mask, strict=True) if mask]
    known = [version for version in made if version is not None]
    return (min(known), max(known)) if known and len(known) == len(made) else (None, None)


def branch_of_row(document: Trajectory, row: Row) -> BranchDoc:
    """The branch that a row was made of."""
    return next(branch for branch in document.branches if branch.branch == row.branch)


def chat_of(branch: BranchDoc, start: int = 0, end: int | None = None) -> list[dict[str, Any]]:
    """The messages whose tokens begin in ``[start, end)``, as chat APIs have them."""
    return [
        as_chat(segment.message)
        for segment in branch.segments
        if segment.message is not None and start <= segment.start and (end is None or segment.start < end)
    ]


def prompt_chat(document: Trajectory, row: Row) -> list[dict[str, Any]]:
    """What was said before anything was sampled in the row."""
    return chat_of(branch_of_row(document, row), 0, len(row.prompt_ids))


def completion_chat(document: Trajectory, row: Row) -> list[dict[str, Any]]:
    """What was said from the first sampled token on."""
    return chat_of(branch_of_row(document, row), len(row.prompt_ids))


def as_chat(message: Message) -> dict[str, Any]:
    """A message as chat APIs have it. What the policy wrote for a call that can't be parsed stays in its text."""
    broken = [call.raw for call in message.tool_calls if call.status not in _WELL_FORMED]
    said: dict[str, Any] = {"role": message.role, "content": "\n".join([message.content, *broken]).removeprefix("\n")}
    if message.reasoning is not None:
        said["reasoning_content"] = message.reasoning
    calls = [call for call in message.tool_calls if call.status in _WELL_FORMED]
    if calls:
        said["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()},
            }
            for call in calls
        ]
    if message.tool_call_id is not None:
        said["tool_call_id"] = message.tool_call_id
    return said
