"""Whether a trajectory is what it says: the invariants of tokens, masks, versions and calls, from the data alone.

Pure. It trusts neither the session that wrote the trajectory nor the store that kept it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Protocol

import msgspec

from prorld.domain.branch import ForkReason, Segment, VersionSpan
from prorld.domain.calls import CallRecord

__all__ = ["VIOLATIONS_MAX", "BranchLike", "Violation", "verify"]

VIOLATIONS_MAX = 100


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that does not hold."""

    code: str
    message: str
    branch: int | None = None
    call: int | None = None


class BranchLike(Protocol):
    """What a branch is to a reader; ``prorld.domain.branch.Branch`` is one."""

    @property
    def index(self) -> int:
        """Its place among the branches."""
        ...

    @property
    def parent(self) -> int | None:
        """The branch it forked from."""
        ...

    @property
    def fork_at(self) -> int | None:
        """How many tokens it shares with its parent."""
        ...

    @property
    def reason(self) -> ForkReason | None:
        """Why it forked."""
        ...

    @property
    def ids(self) -> Sequence[int]:
        """The token ids."""
        ...

    @property
    def mask(self) -> Sequence[int]:
        """1 where the policy sampled the token in this branch."""
        ...

    @property
    def logprobs(self) -> Sequence[float]:
        """The sampler's log-probabilities, 0.0 where the mask is 0."""
        ...

    @property
    def segments(self) -> Sequence[Segment]:
        """Runs of tokens by origin."""
        ...

    @property
    def versions(self) -> Sequence[VersionSpan]:
        """Policy versions."""
        ...


def verify(branches: Sequence[BranchLike], calls: Sequence[CallRecord]) -> list[Violation]:
    """Everything that does not hold, up to ``VIOLATIONS_MAX``. Empty for a sound trajectory."""
    return list(islice(_violations(branches, calls), VIOLATIONS_MAX))


def _violations(branches: Sequence[BranchLike], calls: Sequence[CallRecord]) -> Iterator[Violation]:
    for place, branch in enumerate(branches):
        yield from _branch(branch, place)
        yield from _fork(branch, branches[:place])
    for place, call in enumerate(calls):
        yield from _call(call, place, branches)
    yield from _log(branches, calls)
    yield from _sums(branches, calls)


def _branch(branch: BranchLike, place: int) -> Iterator[Violation]:
    size = len(branch.ids)
    bad = _at_branch(place)
    if branch.index != place:
        yield bad("branch_order", f"branch {place} calls itself {branch.index}")
    if len(branch.mask) != size or len(branch.logprobs) != size:
        yield bad("lengths", f"{size} ids, {len(branch.mask)} mask, {len(branch.logprobs)} log-probabilities")
        return
    if not set(branch.mask) <= {0, 1}:
        yield bad("mask_value", "a mask value is neither 0 nor 1")
    for index, (bit, logprob) in enumerate(zip(branch.mask, branch.logprobs, strict=True)):
        if not bit and logprob != 0.0:
            yield bad("logprob_without_sample", f"token {index} was given and has log-probability {logprob}")
        if bit and not (math.isfinite(logprob) and logprob <= 1e-3):
            yield bad("logprob_value", f"token {index} has log-probability {logprob}")
    yield from _cover(branch, bad)


def _cover(branch: BranchLike, bad: Callable[[str, str], Violation]) -> Iterator[Violation]:
    """Segments and versions cover the branch without gaps, and the mask says what the segments say."""
    at = 0
    for segment in branch.segments:
        if segment.start != at or segment.end < at:
            yield bad("segment_gap", f"a segment [{segment.start}, {segment.end}) does not follow {at}")
            return
        at = segment.end
        sampled = segment.source == "sampled"
        if set(branch.mask[segment.start : segment.end]) - {int(sampled)}:
            yield bad("mask_source", f"the mask of [{segment.start}, {segment.end}) is not that of {segment.source}")
        if not sampled and segment.calls:
            yield bad("given_by_call", f"[{segment.start}, {segment.end}) was given and names calls")
    if at != len(branch.ids):
        yield bad("segment_gap", f"segments cover {at} of {len(branch.ids)} tokens")
    at = 0
    for span in branch.versions:
        if span.start != at or span.end <= at:
            yield bad("version_gap", f"a version span [{span.start}, {span.end}) does not follow {at}")
            return
        at = span.end
    if at != len(branch.ids):
        yield bad("version_gap", f"version spans cover {at} of {len(branch.ids)} tokens")


def _fork(branch: BranchLike, before: Sequence[BranchLike]) -> Iterator[Violation]:
    bad = _at_branch(len(before))
    if branch.parent is None:
        if branch.fork_at is not None or before:
            yield bad("fork", "a branch without a parent is the first one and forks nowhere")
        return
    if not 0 <= branch.parent < len(before) or branch.fork_at is None:
        yield bad("fork", f"a fork of branch {branch.parent} at {branch.fork_at}")
        return
    shared = branch.fork_at
    if not 0 <= shared <= len(branch.ids) or list(branch.ids[:shared]) != list(before[branch.parent].ids[:shared]):
        yield bad("fork_prefix", f"the first {shared} tokens are not those of branch {branch.parent}")
    if any(branch.mask[:shared]):
        yield bad("fork_mask", "a token that came from the parent has mask 1")


def _call(call: CallRecord, place: int, branches: Sequence[BranchLike]) -> Iterator[Violation]:
    bad = _at_call(place, call.branch)
    if call.n != place:
        yield bad("call_order", f"call {place} calls itself {call.n}")
    if not 0 <= call.branch < len(branches):
        yield bad("unknown_branch", f"there is no branch {call.branch}")
        return
    if call.sampled_len < 1:
        yield bad("call_empty", "a call that sampled nothing is none")
    at = 0
    for span in call.policy_versions:
        if span.start != at or span.end <= at:
            yield bad("call_versions", f"a version span [{span.start}, {span.end}) does not follow {at}")
        at = span.end
    if at != call.sampled_len:
        yield bad("call_versions", f"version spans cover {at} of {call.sampled_len} tokens")


def _log(branches: Sequence[BranchLike], calls: Sequence[CallRecord]) -> Iterator[Violation]:
    """Replay the call log: each call's prompt is what its branch held, and no token has two calls."""
    named: Counter[int] = Counter()
    for place, branch in enumerate(branches):
        for segment in branch.segments:
            if segment.source == "sampled":
                named.update(segment.calls)
                yield from _replay(segment, place, branch, calls)
    for place, call in enumerate(calls):
        if named[place] != 1:
            yield _at_call(place, call.branch)("call_segments", f"it made {named[place]} segments")
    yield from _order(branches, calls)


def _order(branches: Sequence[BranchLike], calls: Sequence[CallRecord]) -> Iterator[Violation]:
    """Turns follow each other, each in one branch, and a branch that another one took the place of grows no more.

    A sub-agent's branch takes no place: the one that asked may grow again.
    """
    for place, (before, after) in enumerate(pairwise(calls), 1):
        bad = _at_call(place, after.branch)
        if not before.turn <= after.turn <= before.turn + 1:
            yield bad("call_order", f"turn {after.turn} of branch {after.branch} after turn {before.turn}")
        if after.turn == before.turn and before.finish_reason != "abort":
            yield bad("turn_reopened", f"turn {after.turn} goes on though it had ended with {before.finish_reason}")
        if after.turn == before.turn and after.branch != before.branch:
            yield bad("call_order", f"turn {after.turn} goes on in branch {after.branch} from {before.branch}")
    replaced: dict[int, int] = {}
    for place, call in enumerate(calls):
        if call.branch in replaced:
            yield _at_call(place, call.branch)(
                "call_order", f"branch {call.branch} grows though branch {replaced[call.branch]} took its place"
            )
        at: int | None = call.branch
        # Upwards through forks of one conversation; parents come before their children, so this ends.
        while at is not None and 0 <= at < len(branches) and branches[at].reason != "sub_agent":
            parent = branches[at].parent
            if parent is None or parent >= at or parent in replaced:
                break
            replaced[parent] = at
            at = parent


def _replay(segment: Segment, place: int, branch: BranchLike, calls: Sequence[CallRecord]) -> Iterator[Violation]:
    at = segment.start
    for n in segment.calls:
        if not 0 <= n < len(calls):
            yield _at_branch(place)("unknown_call", f"[{segment.start}, {segment.end}) names call {n}")
            return
        call = calls[n]
        bad = _at_call(n, place)
        if call.branch != place:
            yield bad("call_branch", f"it is of branch {call.branch} and made tokens in {place}")
        if call.prompt_len != at:
            yield bad("prompt_len", f"its prompt had {call.prompt_len} tokens, the branch {at}")
        for span in call.policy_versions:
            moved = VersionSpan(start=at + span.start, end=at + span.end, epoch=span.epoch, version=span.version)
            if not any(_within(moved, held) for held in branch.versions):
                yield bad("versions", f"[{moved.start}, {moved.end}) is not of version {moved.version} in the branch")
        at += call.sampled_len
    if at != segment.end:
        made, size = at - segment.start, segment.end - segment.start
        yield _at_branch(place)("segment_calls", f"calls made {made} of {size} tokens")


def _within(made: VersionSpan, held: VersionSpan) -> bool:
    same = (made.epoch, made.version) == (held.epoch, held.version)
    return same and held.start <= made.start and made.end <= held.end


def _sums(branches: Sequence[BranchLike], calls: Sequence[CallRecord]) -> Iterator[Violation]:
    masked = sum(sum(branch.mask) for branch in branches)
    sampled = sum(call.sampled_len for call in calls)
    if masked != sampled:
        yield Violation(code="mask_sum", message=f"the masks sum to {masked}, the calls sampled {sampled}")


def _at_branch(place: int) -> Callable[[str, str], Violation]:
    return lambda code, message: Violation(code=code, message=message, branch=place)


def _at_call(place: int, branch: int) -> Callable[[str, str], Violation]:
    return lambda code, message: Violation(code=code, message=message, branch=branch, call=place)
