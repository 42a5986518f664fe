"""What ``verify`` accepts and what it must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.domain.branch import Branch, ForkReason, Segment, VersionSpan
from prorld.domain.calls import CallRecord, FinishReason
from prorld.tokens.verify import VIOLATIONS_MAX, verify


class Doc(msgspec.Struct, kw_only=True):
    """A branch as a reader has it, open to change."""

    index: int
    parent: int | None
    fork_at: int | None
    reason: ForkReason | None
    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    segments: list[Segment]
    versions: list[VersionSpan]


class Story(msgspec.Struct):
    """A trajectory."""

    branches: list[Doc]
    calls: list[CallRecord]

    def codes(self) -> set[str]:
        """What does not hold."""
        return {violation.code for violation in verify(self.branches, self.calls)}


def doc(branch: Branch) -> Doc:
    """A branch, open to change."""
    return Doc(
        index=branch.index,
        parent=branch.parent,
        fork_at=branch.fork_at,
        reason=branch.reason,
        ids=branch.ids.tolist(),
        mask=list(branch.mask),
        logprobs=branch.logprobs.tolist(),
        segments=list(branch.segments),
        versions=list(branch.versions),
    )


turns = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2)), min_size=1, max_size=3),
        st.integers(0, 4),
        st.booleans(),
    ),
    max_size=5,
)


def tell(plan: list[tuple[list[tuple[int, int]], int, bool]]) -> Story:
    """A sound trajectory: per turn its calls (length, version), the length of the observation, and whether it forks."""
    branches, calls = [Branch()], list[CallRecord]()
    branches[0].append_given([1, 2, 3], "prompt")
    for turn, (parts, observed, forks) in enumerate(plan):
        for place, (size, version) in enumerate(parts):
            branch = branches[-1]
            finish: FinishReason = "stop" if place == len(parts) - 1 else "abort"
            spans = [VersionSpan(start=0, end=1, version=version)]
            spans += [VersionSpan(start=1, end=size, version=version + 1)] if size > 1 else []
            calls.append(
                CallRecord(
                    n=len(calls),
                    turn=turn,
                    branch=branch.index,
                    backend="b",
                    policy_versions=spans,
                    prompt_len=len(branch),
                    sampled_len=size,
                    finish_reason=finish,
                    latency_s=0.1,
                )
            )
            branch.append_sampled(
                [7] * size, [-0.5] * size, spans, calls=[len(calls) - 1], message=None, finish_reason=finish
            )
        if forks:
            child = Branch(len(branches), parent=branches[-1].index, fork_at=2, reason="renderer_refused")
            child.append_given([1, 2, 9, 9], "prompt")
            branches.append(child)
        branches[-1].append_given([5] * observed, "observation")
    return Story([doc(branch) for branch in branches], calls)


@given(turns)
def test_a_sound_trajectory_has_no_violation(plan: list[tuple[list[tuple[int, int]], int, bool]]) -> None:
    """Any number of turns, interrupted calls, versions and forks."""
    assert verify(tell(plan).branches, tell(plan).calls) == []


def aside(*order: int, reason: ForkReason = "sub_agent") -> Story:
    """Turns of one token each in a branch and a child of it, in this order."""
    branches = [Branch(), Branch(1, parent=0, fork_at=0, reason=reason)]
    for branch in branches:
        branch.append_given([1], "prompt")
    calls: list[CallRecord] = []
    for turn, place in enumerate(order):
        branch, spans = branches[place], [VersionSpan(start=0, end=1, version=1)]
        calls.append(
            CallRecord(
                n=turn,
                turn=turn,
                branch=place,
                backend="b",
                policy_versions=spans,
                prompt_len=len(branch),
                sampled_len=1,
                finish_reason="abort",
                latency_s=0.1,
            )
        )
        branch.append_sampled([7], [-0.5], spans, calls=[turn], message=None, finish_reason="abort")
    return Story([doc(branch) for branch in branches], calls)


def test_a_branch_that_asked_a_sub_agent_grows_on() -> None:
    """Only the branch of a sub-agent leaves its parent its place."""
    assert not aside(0, 1, 0, 1, 0).codes()
    reasons: list[ForkReason] = ["compaction", "history_rewrite", "think_strip", "renderer_refused"]
    for reason in reasons:
        assert not aside(0, 0, 1, 1, reason=reason).codes()
        assert aside(0, 1, 0, reason=reason).codes() == {"call_order"}


def test_a_turn_stays_in_its_branch() -> None:
    """It can be interrupted, but not go on elsewhere."""
    story = aside(0, 1, 0)
    story.calls[1] = msgspec.structs.replace(story.calls[1], turn=0)
    story.calls[2] = msgspec.structs.replace(story.calls[2], turn=1)
    assert story.codes() == {"call_order"}


def test_the_branches_of_the_domain_are_accepted_as_they_are() -> None:
    """No conversion is needed for a trajectory in memory."""
    branch = Branch()
    branch.append_given([1], "prompt")
    assert verify([branch], []) == []


PLAN = [([(3, 0), (2, 1)], 2, False), ([(4, 1)], 0, True), ([(2, 2)], 1, False)]


def with_call(place: int, /, **changes: Any) -> Callable[[Story], None]:
    """Changes one call."""

    def change(story: Story) -> None:
        story.calls[place] = msgspec.structs.replace(story.calls[place], **changes)

    return change


def set_in(field: str, index: int, value: Any, branch: int = 0) -> Callable[[Story], None]:
    """Changes one item of a list of a branch."""

    def change(story: Story) -> None:
        getattr(story.branches[branch], field)[index] = value

    return change


def with_segment(index: int, /, **changes: Any) -> Callable[[Story], None]:
    """Changes one segment of the first branch."""

    def change(story: Story) -> None:
        segments = story.branches[0].segments
        segments[index] = msgspec.structs.replace(segments[index], **changes)

    return change


def drop(field: str, branch: int = 0) -> Callable[[Story], None]:
    """Loses the last item of a list of a branch."""
    return lambda story: getattr(story.branches[branch], field).pop()


def set_field(branch: int, field: str, value: Any) -> Callable[[Story], None]:
    """Changes a field of a branch."""
    return lambda story: setattr(story.branches[branch], field, value)


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("lengths", drop("ids")),
        ("lengths", drop("mask")),
        ("lengths", drop("logprobs")),
        ("mask_value", set_in("mask", 4, 2)),
        ("mask_source", set_in("mask", 4, 0)),
        ("mask_source", set_in("mask", 0, 1)),
        ("mask_sum", set_in("mask", 4, 0)),
        ("mask_sum", with_call(0, sampled_len=4)),
        ("logprob_without_sample", set_in("logprobs", 0, -0.1)),
        ("logprob_value", set_in("logprobs", 4, float("nan"))),
        ("logprob_value", set_in("logprobs", 4, 0.5)),
        ("branch_order", set_field(1, "index", 0)),
        ("fork", set_field(1, "parent", None)),
        ("fork", set_field(1, "parent", 1)),
        ("fork", set_field(0, "fork_at", 1)),
        ("fork_prefix", set_field(1, "fork_at", 3)),
        ("fork_prefix", set_in("ids", 0, 99, branch=1)),
        ("segment_gap", drop("segments")),
        ("segment_gap", with_segment(1, start=4)),
        ("segment_calls", with_segment(1, end=5)),
        ("given_by_call", with_segment(0, calls=[0])),
        ("unknown_call", with_segment(1, calls=[17])),
        ("call_segments", with_segment(1, calls=[])),
        ("call_segments", with_segment(2, calls=[0])),
        ("version_gap", drop("versions")),
        ("versions", set_in("versions", 1, VersionSpan(start=3, end=4, version=9))),
        ("call_order", with_call(1, n=0)),
        ("call_order", with_call(2, turn=5)),
        ("turn_reopened", with_call(2, turn=0)),
        ("call_branch", with_call(0, branch=1)),
        ("unknown_branch", with_call(0, branch=9)),
        ("fork_mask", set_in("mask", 0, 1, branch=1)),
        ("version_gap", set_in("versions", 1, VersionSpan(start=2, end=4, version=0))),
        ("call_versions", with_call(0, policy_versions=[VersionSpan(start=0, end=1), VersionSpan(start=2, end=3)])),
        ("call_empty", with_call(0, sampled_len=0)),
        ("call_versions", with_call(0, policy_versions=[])),
        ("prompt_len", with_call(0, prompt_len=2)),
        ("prompt_len", with_call(3, prompt_len=5)),
        ("turn_reopened", with_call(0, finish_reason="stop")),
        ("call_segments", lambda story: story.calls.append(msgspec.structs.replace(story.calls[-1], n=4))),
        ("unknown_call", lambda story: story.calls.pop()),
    ],
)
def test_every_lie_is_caught(code: str, change: Callable[[Story], None]) -> None:
    """Each invariant has a change that breaks it, and it is named."""
    story = tell(PLAN)
    assert not story.codes()
    change(story)
    assert code in story.codes()


@given(turns.filter(len), st.data())
def test_moving_any_bit_of_the_mask_is_caught(
    plan: list[tuple[list[tuple[int, int]], int, bool]], data: st.DataObject
) -> None:
    """There is no token whose mask could be flipped unseen."""
    story = tell(plan)
    branch = data.draw(st.sampled_from(story.branches))
    at = data.draw(st.integers(0, len(branch.mask) - 1))
    branch.mask[at] ^= 1
    assert story.codes()


def test_the_list_is_bounded() -> None:
    """A trajectory that is all wrong does not give a list as long as itself."""
    branch = tell([]).branches[0]
    branch.ids, branch.mask = [1] * 5000, [0] * 5000
    branch.logprobs = [-1.0] * 5000
    assert len(verify([branch], [])) == VIOLATIONS_MAX
