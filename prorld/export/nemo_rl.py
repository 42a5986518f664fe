"""NeMo RL: what the ``/run`` of a NeMo Gym agent answers, one answer for each branch.

The last item of each sampled turn carries all tokens before it, its own tokens and their log-probabilities. NeMo RL
asserts that each prompt begins with every token seen so far in the answer, which holds within a branch and not across
branches. It has no rollout without a reward: where training may not use one, ``run_answer`` is refused.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from prorld.domain.branch import Segment
from prorld.domain.messages import Message
from prorld.export.reading import Document, NotExportable, as_chat, branch_of_row, is_usable, lists, one_row
from prorld.export.rows import Row, rows_of
from prorld.wire.trajectory import BranchDoc, Trajectory

__all__ = ["run_answer", "run_answers"]


def run_answer(
    document: Document, *, responses_create_params: dict[str, Any] | None = None, last_branch: bool = False
) -> dict[str, Any]:
    """The answer to one ``/run``, with the parameters that it was asked with.

    Refused with ``not_usable`` where training may not use the rollout, and with ``several_branches`` for a fork, unless
    ``last_branch`` lets the one sampled from last stand for it.
    """
    document = lists(document)
    if not is_usable(document):
        raise NotExportable(
            f"job {document.job.job_id} ended as {document.outcome.kind} and may not be trained on", code="not_usable"
        )
    row = one_row(document, rows_of(document), form="an answer of /run", last=last_branch)
    return _answer(document, row, responses_create_params)


def run_answers(document: Document) -> list[dict[str, Any]]:
    """An answer for each branch; none where training may not use the rollout."""
    document = lists(document)
    return [_answer(document, row, None) for row in rows_of(document)] if is_usable(document) else []


def _answer(document: Trajectory, row: Row, params: dict[str, Any] | None) -> dict[str, Any]:
    branch = branch_of_row(document, row)
    start = len(row.prompt_ids)
    before = [segment for segment in branch.segments if segment.start < start]
    after = [segment for segment in branch.segments if segment.start >= start]
    tools = [
        {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters,
         "strict": False}
        for tool in document.tools
    ]  # fmt: skip
    own = {
        "input": [item for segment in before if segment.message is not None for item in _given(segment.message)],
        "tools": tools,
        "temperature": row.temperature,
    }
    created = document.job.ended_at or document.job.created_at
    return {
        "responses_create_params": own if params is None else params,
        "response": {
            "id": f"{row.job_id}/{row.branch}",
            "object": "response",
            "created_at": datetime.fromisoformat(created).timestamp(),
            "model": document.job.policy,
            "output": [item for n, segment in enumerate(after) for item in _items(branch, segment, n)],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": tools,
            "temperature": row.temperature,
            "status": "incomplete" if row.finish_reason == "length" else "completed",
        },
        "reward": row.reward,
    }


def _items(branch: BranchDoc, segment: Segment, place: int) -> list[dict[str, Any]]:
    """The items of a segment: those of a sampled turn end with the one that carries its tokens."""
    if segment.source != "sampled":
        return [] if segment.message is None else _given(segment.message)
    items = _said(segment.message or Message(role="assistant", content=""), f"{branch.branch}_{place}")
    items[-1] |= {
        "prompt_token_ids": branch.token_ids[: segment.start],
        "generation_token_ids": branch.token_ids[segment.start : segment.end],
        "generation_log_probs": branch.logprobs[segment.start : segment.end],
    }
    return items


def _said(message: Message, place: str) -> list[dict[str, Any]]:
    """What the policy said: its reasoning, its text, its calls; the text alone where there is nothing else."""
    chat = as_chat(message)
    items: list[dict[str, Any]] = []
    if message.reasoning:
        summary = [{"type": "summary_text", "text": message.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{place}", "summary": summary})
    calls = chat.get("tool_calls", [])
    if chat["content"] or not (calls or items):
        text = [{"type": "output_text", "text": chat["content"], "annotations": []}]
        items.append({"type": "message", "id": f"msg_{place}", "role": "assistant", "status": "completed",
                      "content": text})  # fmt: skip
    items += [
        {"type": "function_call", "call_id": call["id"], "name": call["function"]["name"],
         "arguments": call["function"]["arguments"]}
        for call in calls
    ]  # fmt: skip
    return items


def _given(message: Message) -> list[dict[str, Any]]:
    """What the policy was told. The result of no call that has a name is told by the user."""
    if message.role == "tool" and message.tool_call_id is not None:
        return [{"type": "function_call_output", "call_id": message.tool_call_id, "output": message.content}]
    if message.role == "assistant":
        return _said(message, "given")
    role = "user" if message.role == "tool" else message.role
    return [{"type": "message", "role": role, "content": message.content}]
