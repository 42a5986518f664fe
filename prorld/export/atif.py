"""ATIF, Harbor's format of trajectories: a document for each branch in which something was sampled.

It is a record and no food for a trainer, so it has every rollout, whatever became of it; ``extra`` says that. The
documents of one rollout share their ``session_id``. Steps of an agent that were told again from another branch are
marked as copied context, which ATIF keeps out of training.
"""

from __future__ import annotations

from typing import Any

from prorld.domain.branch import Segment
from prorld.domain.messages import CallStatus, Message
from prorld.export.reading import Document, as_chat, lists
from prorld.wire.trajectory import BranchDoc, Trajectory

__all__ = ["SCHEMA_VERSION", "trajectories"]

SCHEMA_VERSION = "ATIF-v1.7"


def trajectories(document: Document) -> list[dict[str, Any]]:
    """The documents of a rollout; of one that never sampled, its prompt. None where nothing was ever said."""
    document = lists(document)
    sampled = [branch for branch in document.branches if any(branch.mask)]
    made = [_trajectory(document, branch) for branch in sampled or document.branches[:1]]
    return [each for each in made if each["steps"]]


def _trajectory(document: Trajectory, branch: BranchDoc) -> dict[str, Any]:
    job = document.job
    steps: list[dict[str, Any]] = []
    for segment in branch.segments:
        if segment.message is not None or segment.source == "sampled":
            _add(document, branch, segment, steps)
    own = [step["metrics"] for step in steps if "metrics" in step]
    tools = [tool.as_function() for tool in document.tools]
    return {
        "schema_version": SCHEMA_VERSION,
        "session_id": job.job_id,
        "trajectory_id": f"{job.job_id}/{branch.branch}",
        "agent": {
            "name": job.handler,
            "version": document.format,
            "model_name": job.policy,
            **({"tool_definitions": tools} if tools else {}),
        },
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(metrics["prompt_tokens"] for metrics in own),
            "total_completion_tokens": sum(metrics["completion_tokens"] for metrics in own),
            "total_steps": len(steps),
            "extra": {"reward": document.reward, "reward_parts": job.reward_parts},
        },
        "extra": {
            "outcome": document.outcome.kind.value,
            "outcome_code": document.outcome.code,
            "verdict": document.verdict.value,
            "stop_reason": None if job.stop_reason is None else job.stop_reason.value,
            "group_id": job.group_id,
            "sample_index": job.sample_index,
            "branch": branch.branch,
            "parent": branch.parent,
            "fork_at": branch.fork_at,
            "fork_reason": branch.reason,
            "tokenizer": document.tokenizer,
        },
    }


def _add(document: Trajectory, branch: BranchDoc, segment: Segment, steps: list[dict[str, Any]]) -> None:
    """Another step, or an observation of the agent's last one."""
    message = segment.message or Message(role="assistant", content="")
    if message.role == "tool" and steps and steps[-1]["source"] == "agent":
        known = {call["tool_call_id"] for call in steps[-1].get("tool_calls", [])}
        result = {"content": message.content}
        if message.tool_call_id in known:
            result["source_call_id"] = str(message.tool_call_id)
        steps[-1].setdefault("observation", {"results": []})["results"].append(result)
        return
    chat = as_chat(message)
    step: dict[str, Any] = {"step_id": len(steps) + 1, "source": _SOURCES[message.role], "message": chat["content"]}
    if message.role == "assistant":
        step |= _agents(message)
        step |= _measured(document, branch, segment) if segment.source == "sampled" else {"is_copied_context": True}
    steps.append(step)


# A result that follows no step of an agent is told by the user.
_SOURCES = {"system": "system", "user": "user", "assistant": "agent", "tool": "user"}


def _agents(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if message.reasoning is not None:
        found["reasoning_content"] = message.reasoning
    calls = [
        {"tool_call_id": call.id, "function_name": call.name, "arguments": call.arguments}
        for call in message.tool_calls
        if call.status in {CallStatus.OK, CallStatus.UNKNOWN_TOOL}
    ]
    return found | ({"tool_calls": calls} if calls else {})


def _measured(document: Trajectory, branch: BranchDoc, segment: Segment) -> dict[str, Any]:
    """The tokens of a sampled step, and what is known of the calls that made it."""
    calls = [call for call in document.calls if call.n in segment.calls]
    cached = [call.cached_prefix_len for call in calls if call.cached_prefix_len is not None]
    versions = [
        span.version for span in branch.policy_versions if span.end > segment.start and span.start < segment.end
    ]
    rewards = [
        step.reward
        for step in document.step_rewards
        if step.branch == branch.branch and segment.start <= step.index < segment.end
    ]
    return {
        "llm_call_count": max(1, len(segment.calls)),
        "metrics": {
            "prompt_tokens": segment.start,
            "completion_tokens": segment.end - segment.start,
            **({"cached_tokens": max(cached)} if cached else {}),
            "prompt_token_ids": branch.token_ids[: segment.start],
            "completion_token_ids": branch.token_ids[segment.start : segment.end],
            "logprobs": branch.logprobs[segment.start : segment.end],
            "extra": {"policy_versions": versions, "finish_reason": segment.finish_reason, "step_rewards": rewards},
        },
    }
