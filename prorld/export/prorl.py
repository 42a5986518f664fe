"""A trajectory as the trainers of the original ProRL Agent server read it: messages that hold the tokens.

Every token of the branch belongs to exactly one message, so joining the messages gives the branch. A message of the
policy holds exactly what was sampled. What the chat template writes between messages goes to the message before it,
or, after a turn of the policy, to the one behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import UNSET

from prorld.domain.branch import Segment
from prorld.domain.calls import CallRecord
from prorld.domain.messages import CallStatus, Message, ToolCall
from prorld.domain.outcome import Outcome, OutcomeKind, StopReason, Verdict
from prorld.wire.compat import (
    CompatMessage,
    CompatTiming,
    CompatToolCall,
    CriticalError,
    ProcessResult,
)
from prorld.wire.jobs import JobRecord
from prorld.wire.trajectory import BranchDoc, Trajectory

__all__ = ["critical_error", "main_branch", "messages_of", "process_result", "timing_of"]

# A reward is a sum of floats; this much below 1 is still all there was to get.
FULL_REWARD: Final = 1.0 - 1e-6
_STARVED: Final = frozenset({"no_backend", "engine_busy"})
_DONE: Final = frozenset({OutcomeKind.OK, OutcomeKind.POLICY_LIMIT})
_CALLED: Final = frozenset({CallStatus.OK, CallStatus.UNKNOWN_TOOL})


def process_result(
    document: Trajectory,
    *,
    name: str,
    total_s: float,
    git_patch: str | None = None,
    ignored: list[str] | None = None,
    noted: Mapping[str, str] | None = None,
) -> ProcessResult:
    """The result of ``/process``. ``name`` is the trainer's for the job, ``total_s`` the budget that it had."""
    job, outcome = document.job, document.outcome
    branch = main_branch(document)
    graded = document.reward is not None
    timing = timing_of(job, outcome, total_s)
    return ProcessResult(
        instance_id=job.instance.get("instance_id"),
        trajectory_id=job.instance.get("trajectory_id"),
        job_id=name,
        prorld_job_id=job.job_id,
        resolved=document.reward is not None and document.reward >= FULL_REWARD,
        success=outcome.kind in _DONE,
        finish=outcome.kind is OutcomeKind.OK and job.stop_reason is StopReason.FINISHED,
        error=None if outcome.kind in _DONE else outcome.message or outcome.code,
        critical_error=critical_error(outcome, timing),
        filter=document.verdict is not Verdict.USE,
        reward=document.reward,
        stop_reason=job.stop_reason,
        messages=messages_of(branch, document.calls) if graded and branch is not None else [],
        tools=[tool.as_function() for tool in document.tools],
        git_patch=git_patch,
        timing=timing,
        ignored=list(ignored or ()),
        noted=dict(noted or {}),
    )


def timing_of(job: JobRecord, outcome: Outcome, total_s: float) -> CompatTiming:
    """Where the time of a job went, and whether its end is that of its budget."""
    spent = job.timing
    counted = spent.init_s + spent.run_s + spent.eval_s
    # Who waits for an engine until the budget is gone failed for want of an engine, and is out of time all the same.
    starved = outcome.kind is OutcomeKind.LLM_ERROR and outcome.code in _STARVED and counted >= total_s
    return CompatTiming(
        init_time=spent.init_s,
        run_time=spent.run_s,
        eval_time=spent.eval_s,
        others_time=spent.queue_init_s + spent.queue_run_s + spent.queue_eval_s,
        counted_elapsed=counted,
        timeout_triggered=outcome.kind is OutcomeKind.TIMEOUT or starved,
    )


def critical_error(outcome: Outcome, timing: CompatTiming) -> CriticalError | None:
    """What of the service failed; a limit that the policy met is none."""
    if outcome.kind in _DONE:
        return None
    if timing.timeout_triggered:
        return "timeout"
    if outcome.kind is OutcomeKind.CANCELLED:
        return "cancelled"
    return outcome.stage or ("eval" if outcome.kind is OutcomeKind.GRADER_ERROR else "run")


def main_branch(document: Trajectory) -> BranchDoc | None:
    """The branch in which the main conversation ended: the last one with something sampled in it.

    What a sub-agent said is in branches of its own, which no trainer of this kind can take.
    """
    beside: set[int] = set()
    found: BranchDoc | None = None
    for branch in document.branches:
        if branch.reason == "sub_agent" or branch.parent in beside:
            beside.add(branch.branch)
        elif found is None or any(branch.mask):
            found = branch
    return found


def messages_of(branch: BranchDoc, calls: list[CallRecord]) -> list[CompatMessage]:
    """The branch in messages."""
    made: list[CompatMessage] = []
    held: list[int] = []
    turn: _Turn | None = None
    for segment in branch.segments:
        ids = branch.token_ids[segment.start : segment.end]
        if segment.source == "sampled":
            if held:
                made.append(_bare(held))
                held = []
            if turn is None or not turn.goes_on(segment, calls):
                turn = _Turn(segment, calls)
                made.append(turn.message(branch))
            else:
                turn.grow(segment)
                made[-1] = turn.message(branch)
            continue
        # The template's own tokens after something that was given are the end of that; see above.
        if segment.message is None and made and turn is None:
            made[-1].token_ids.extend(ids)
        elif segment.message is None:
            held += ids
        else:
            made.append(_given(segment.message, [*held, *ids]))
            held = []
            turn = None
    if held:
        made.append(_bare(held))
    return made


class _Turn:
    """A turn of the policy: one segment, or several where the engine was interrupted and went on."""

    def __init__(self, segment: Segment, calls: list[CallRecord]) -> None:
        self._start, self._end = segment.start, segment.end
        self._said = segment.message
        self._number = _turn_of(segment, calls)

    def goes_on(self, segment: Segment, calls: list[CallRecord]) -> bool:
        """Whether this is more of the same turn."""
        return self._said is None and segment.start == self._end and _turn_of(segment, calls) == self._number

    def grow(self, segment: Segment) -> None:
        """More of it."""
        self._end, self._said = segment.end, segment.message

    def message(self, branch: BranchDoc) -> CompatMessage:
        """All of it so far."""
        said = self._said or Message(role="assistant", content="")
        calls = _calls(said.tool_calls)
        return CompatMessage(
            role="assistant",
            content=said.content,
            token_ids=branch.token_ids[self._start : self._end],
            input_ids=branch.token_ids[: self._start],
            logprobs=branch.logprobs[self._start : self._end],
            tool_calls=calls or UNSET,
            reasoning=said.reasoning or UNSET,
        )


def _turn_of(segment: Segment, calls: list[CallRecord]) -> int | None:
    return calls[segment.calls[0]].turn if segment.calls and segment.calls[0] < len(calls) else None


def _given(message: Message, ids: list[int]) -> CompatMessage:
    calls = _calls(message.tool_calls)
    return CompatMessage(
        role=message.role,
        content=message.content,
        token_ids=ids,
        tool_calls=calls or UNSET,
        reasoning=message.reasoning or UNSET,
        tool_call_id=message.tool_call_id or UNSET,
    )


def _bare(ids: list[int]) -> CompatMessage:
    """Tokens of the template that stand by no message."""
    return CompatMessage(role="system", content="", token_ids=ids)


def _calls(calls: list[ToolCall]) -> list[CompatToolCall]:
    return [_call(call) for call in calls if call.status in _CALLED]


def _call(call: ToolCall) -> CompatToolCall:
    arguments: dict[str, Any] = dict(call.arguments)
    return CompatToolCall(name=call.name, arguments=arguments)
