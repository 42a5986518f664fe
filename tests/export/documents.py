"""Trajectories written by hand: small ids, and log-probabilities that JSON and float32 say alike."""

from __future__ import annotations

from array import array
from typing import Any

from prorld.domain.branch import Branch, ForkReason, VersionSpan
from prorld.domain.calls import CallParams, CallRecord
from prorld.domain.job import JobState, Timing, TokenCounts
from prorld.domain.messages import CallStatus, Message, ToolCall, ToolSchema, system, tool_result, user
from prorld.domain.outcome import Outcome, OutcomeKind, StopReason, Verdict
from prorld.wire.jobs import Drift
from prorld.wire.trajectory import (
    BranchDoc,
    PackedTrajectory,
    StepReward,
    Trajectory,
    TrajectoryJob,
    branch_doc,
    packed_branch,
)

ADD = ToolSchema(name="add", description="Adds.", parameters={"type": "object", "properties": {}})
OK = Outcome(kind=OutcomeKind.OK, code="ok")
CREATED, ENDED = "2026-01-01T00:00:00.000Z", "2026-01-01T00:01:00.000Z"


def said(content: str, *calls: ToolCall, reasoning: str | None = None) -> Message:
    """What the policy said."""
    return Message(role="assistant", content=content, tool_calls=list(calls), reasoning=reasoning)


class Made:
    """A trajectory that grows as a rollout does: branches, and the calls that made them."""

    def __init__(self) -> None:
        self.branches: list[Branch] = []
        self.calls: list[CallRecord] = []

    def fork(self, parent: int | None = None, fork_at: int | None = None, reason: ForkReason | None = None) -> Branch:
        """Another branch."""
        self.branches.append(Branch(len(self.branches), parent=parent, fork_at=fork_at, reason=reason))
        return self.branches[-1]

    def sample(
        self,
        branch: Branch,
        ids: list[int],
        message: Message | None,
        *,
        versions: list[int | None] | None = None,
        finish_reason: str = "stop",
    ) -> None:
        """A turn of the policy: the n-th token of the rollout's turn has log-probability -(n + 1) / 8."""
        made = versions or [3] * len(ids)
        spans = [VersionSpan(start=n, end=n + 1, version=version) for n, version in enumerate(made)]
        call = len(self.calls)
        self.calls.append(
            CallRecord(
                n=call, turn=call, branch=branch.index, backend="b", policy_versions=spans, prompt_len=len(branch),
                sampled_len=len(ids), finish_reason="length" if finish_reason == "length" else "stop", latency_s=0.5,
                params=CallParams(temperature=0.75),
            )
        )  # fmt: skip
        branch.append_sampled(
            ids, [-(n + 1) / 8 for n in range(len(ids))], spans, calls=[call], message=message,
            finish_reason=finish_reason,
        )  # fmt: skip

    def done(
        self,
        job_id: str,
        *,
        reward: float | None = 1.0,
        verdict: Verdict = Verdict.USE,
        outcome: Outcome = OK,
        stop_reason: StopReason | None = StopReason.FINISHED,
        step_rewards: list[StepReward] | None = None,
        tools: list[ToolSchema] | None = None,
        parts: dict[str, float] | None = None,
        **job: Any,
    ) -> Trajectory:
        """The document."""
        branches: list[BranchDoc] = [branch_doc(branch) for branch in self.branches]
        record = TrajectoryJob(
            job_id=job_id, handler="sums", policy="default", tenant="default", state=JobState.DONE, outcome=outcome,
            verdict=verdict, reward=reward, reward_parts=parts or {}, stop_reason=stop_reason,
            timing=Timing(run_s=4.0, llm_s=1.5, tool_s=0.5, eval_s=0.25), turns=len(self.calls), tokens=TokenCounts(),
            group_id="g", created_at=CREATED, ended_at=ENDED, instance={"q": "2+3"}, **job,
        )  # fmt: skip
        return Trajectory(
            job=record, tokenizer="t", tools=tools or [], branches=branches, calls=self.calls, drift=Drift(),
            reward=reward, step_rewards=step_rewards or [], verdict=verdict, outcome=outcome,
        )  # fmt: skip


def packed_document(document: Trajectory) -> PackedTrajectory:
    """The same with packed columns."""
    fields = {name: getattr(document, name) for name in document.__struct_fields__}
    fields["branches"] = [packed_branch(grown(branch)) for branch in document.branches]
    return PackedTrajectory(**fields)


def grown(doc: BranchDoc) -> Branch:
    """The branch that a document was made of."""
    return Branch.rebuilt(
        doc.branch, parent=doc.parent, fork_at=doc.fork_at, reason=doc.reason, ids=array("i", doc.token_ids),
        mask=bytes(doc.mask), logprobs=array("f", doc.logprobs), segments=doc.segments, versions=doc.policy_versions,
    )  # fmt: skip


def asked(made: Made) -> Branch:
    """A branch with a system message of two tokens, a question of three, and glue of one."""
    branch = made.fork()
    branch.append_given([1, 2], "prompt", system("Be brief."))
    branch.append_given([3, 4, 5], "prompt", user("2+3?"))
    branch.append_given([6], "glue")
    return branch


def answered(made: Made, answer: str = "5") -> Branch:
    """One turn."""
    branch = asked(made)
    made.sample(branch, [10, 11], said(answer))
    return branch


def tools() -> Trajectory:
    """Two turns with a tool between them."""
    made = Made()
    branch = asked(made)
    call = ToolCall(id="call_0", name="add", arguments={"a": 2, "b": 3}, raw="<add>")
    made.sample(branch, [10, 11, 12], said("I add.", call, reasoning="A sum."))
    branch.append_given([20, 21], "observation", tool_result("5", "call_0"))
    branch.append_given([6], "glue")
    made.sample(branch, [13, 14], said("5"))
    return made.done("tools", tools=[ADD], parts={"exact": 1.0}, sample_index=1, policy_versions=[3])


def malformed() -> Trajectory:
    """A call that can't be parsed, which the policy is told."""
    made = Made()
    branch = asked(made)
    broken = ToolCall(id="call_0", name="", status=CallStatus.INVALID_JSON, raw="<add>{")
    made.sample(branch, [10, 11], said("", broken))
    branch.append_given([20], "observation", tool_result("not JSON", "call_0"))
    made.sample(branch, [12], said("5"))
    return made.done("malformed", tools=[ADD], reward=0.25)


def sub_agent() -> Trajectory:
    """A second agent between two turns of the first, which speaks last."""
    made = Made()
    first = answered(made, "I ask.")
    second = made.fork(parent=0, fork_at=0, reason="sub_agent")
    second.append_given([30, 31], "prompt", user("What is 2+3?"))
    made.sample(second, [40, 41, 42], said("It is 5."))
    first.append_given([50], "observation", user("It is 5."))
    made.sample(first, [12], said("5"))
    return made.done("sub_agent", reward=0.5)


def compacted() -> Trajectory:
    """A conversation that went on with another history."""
    made = Made()
    answered(made, "Let me think.")
    second = made.fork(parent=0, fork_at=6, reason="compaction")
    second.append_given([1, 2], "prompt", system("Be brief."))
    second.append_given([10, 11], "prompt", said("Let me think."))
    second.append_given([60], "prompt", user("So?"))
    made.sample(second, [70], said("5"))
    return made.done("compacted", reward=1.0)


def nested() -> Trajectory:
    """A fork of a fork, with an update of the policy and a reward of its own in each."""
    made = Made()
    answered(made, "Let me think.")
    second = made.fork(parent=0, fork_at=6, reason="history_rewrite")
    told_again(second)
    second.append_given([60], "prompt", user("So?"))
    made.sample(second, [70, 71], said("Hm."), versions=[3, 4])
    third = made.fork(parent=1, fork_at=7, reason="history_rewrite")
    told_again(third)
    third.append_given([60], "prompt", user("So?"))
    made.sample(third, [80], said("5"), versions=[4], finish_reason="length")
    steps = [StepReward(branch=1, index=8, reward=0.25), StepReward(branch=2, index=7, reward=0.5)]
    return made.done("nested", reward=0.75, step_rewards=steps, policy_versions=[3, 4], parts={"exact": 0.5})


def told_again(branch: Branch) -> None:
    """What ``asked`` begins with, in a fork."""
    branch.append_given([1, 2], "prompt", system("Be brief."))
    branch.append_given([3, 4, 5], "prompt", user("2+3?"))
    branch.append_given([6], "glue")


def unsaid_fork() -> Trajectory:
    """The history was rewritten, and then there was no room for another turn: a branch in which nothing was sampled."""
    made = Made()
    answered(made, "Let me think.")
    second = made.fork(parent=0, fork_at=6, reason="compaction")
    told_again(second)
    second.append_given([60, 61, 62], "prompt", user("So?"))
    outcome = Outcome(kind=OutcomeKind.POLICY_LIMIT, stage="run", code="context_full")
    return made.done("unsaid_fork", reward=0.0, outcome=outcome, stop_reason=StopReason.CONTEXT_FULL)


def two_versions() -> Trajectory:
    """The policy was updated within a turn; each turn has a reward of its own."""
    made = Made()
    branch = asked(made)
    made.sample(branch, [10, 11, 12], said("Well,"), versions=[3, 3, 4])
    branch.append_given([20], "observation", user("Go on."))
    made.sample(branch, [13], said("5"), versions=[4])
    steps = [StepReward(branch=0, index=8, reward=0.25), StepReward(branch=0, index=10, reward=0.5)]
    return made.done("two_versions", reward=0.75, step_rewards=steps, policy_versions=[3, 4])


def unknown_version() -> Trajectory:
    """An engine that names no version."""
    made = Made()
    branch = asked(made)
    made.sample(branch, [10, 11], said("5"), versions=[None, None])
    return made.done("unknown_version")


def truncated() -> Trajectory:
    """The tokens ran out; graded."""
    made = Made()
    branch = asked(made)
    made.sample(branch, [10, 11, 12], said("Well, we"), finish_reason="length")
    outcome = Outcome(kind=OutcomeKind.POLICY_LIMIT, stage="run", code="max_tokens")
    return made.done("truncated", reward=0.0, outcome=outcome, stop_reason=StopReason.MAX_TOKENS)


def masked() -> Trajectory:
    """Time ran out; no grade."""
    made = Made()
    answered(made)
    outcome = Outcome(kind=OutcomeKind.TIMEOUT, stage="run", code="run_timeout")
    return made.done("masked", reward=None, verdict=Verdict.MASK, outcome=outcome, stop_reason=None)


def masked_graded() -> Trajectory:
    """A rollout with a grade that the configuration does not train on."""
    made = Made()
    answered(made)
    return made.done("masked_graded", reward=1.0, verdict=Verdict.MASK)


def masked_fork() -> Trajectory:
    """Two branches and a grade that must not be trained on."""
    made = Made()
    answered(made, "I ask.")
    second = made.fork(parent=0, fork_at=6, reason="compaction")
    told_again(second)
    made.sample(second, [70], said("5"))
    return made.done("masked_fork", reward=1.0, verdict=Verdict.MASK)


def dropped() -> Trajectory:
    """The sandbox never came up: no branch."""
    outcome = Outcome(kind=OutcomeKind.ENV_ERROR, stage="init", code="sandbox_failed")
    return Made().done("dropped", reward=None, verdict=Verdict.DROP, outcome=outcome, stop_reason=None)


def dropped_late() -> Trajectory:
    """The grader failed after all was said."""
    made = Made()
    answered(made)
    outcome = Outcome(kind=OutcomeKind.GRADER_ERROR, stage="eval", code="grader_failed")
    return made.done("dropped_late", reward=None, verdict=Verdict.DROP, outcome=outcome)


def unsampled() -> Trajectory:
    """Cancelled before the first answer: a prompt and nothing else."""
    made = Made()
    asked(made)
    outcome = Outcome(kind=OutcomeKind.CANCELLED, stage="run", code="cancelled")
    return made.done("unsampled", reward=None, verdict=Verdict.DROP, outcome=outcome, stop_reason=None)


USABLE = (tools, malformed, sub_agent, compacted, nested, unsaid_fork, two_versions, unknown_version, truncated)
UNUSABLE = (masked, masked_graded, masked_fork, dropped, dropped_late, unsampled)
ALL = {make.__name__: make for make in (*USABLE, *UNUSABLE)}
