"""Recorded log-probabilities beside those of a second look: what can be compared, and how far apart they are. Pure.

Two numbers of one token are comparable where the first one is of the distribution that scoring asks for: the model's
own, before temperature and truncation. What is not comparable is named with its reason and never passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from prorld.domain.branch import Branch
from prorld.domain.calls import CallParams, CallRecord
from prorld.domain.versions import PolicyVersion

__all__ = ["Gap", "Piece", "Section", "Skipped", "Tolerance", "UnscoredReason", "Worst", "compare", "drifts", "plan"]

# ``not_served``: no engine serves the version now. ``no_scores``: those that do can't score. ``inexact``: the engine
# took or gave text, or its versions are a guess. ``no_logprobs``: none were recorded. ``processed``: those recorded are
# of the distribution after temperature or truncation. ``too_long``: no room in the engine's context. ``unscored``: the
# engine failed, or the time was over.
UnscoredReason = Literal["not_served", "no_scores", "inexact", "no_logprobs", "processed", "too_long", "unscored"]


class Tolerance(msgspec.Struct, frozen=True, kw_only=True):
    """How far apart two looks at the same tokens may be: on average over the tokens of a version, and at any one.

    ``varying`` stands for ``mean`` where the engine's results depend on what else it computes at the time.
    """

    mean: float
    max: float
    varying: float = 0.0

    def on_engines(self, *, varies: bool) -> Tolerance:
        """What holds for tokens that such engines scored."""
        return msgspec.structs.replace(self, mean=max(self.mean, self.varying)) if varies else self


class Piece(msgspec.Struct, frozen=True):
    """Tokens ``[start, end)`` of a branch that one call sampled from one version."""

    start: int
    end: int
    call: int


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """All comparable tokens of one version in one branch: one question to an engine answers for all of them."""

    branch: int
    version: PolicyVersion | None
    pieces: tuple[Piece, ...]

    @property
    def start(self) -> int:
        """The first token that is compared."""
        return self.pieces[0].start

    @property
    def end(self) -> int:
        """Behind the last one."""
        return self.pieces[-1].end

    @property
    def tokens(self) -> int:
        """How many are compared."""
        return sum(piece.end - piece.start for piece in self.pieces)


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that were not compared, and why."""

    reason: UnscoredReason
    version: PolicyVersion | None
    tokens: int


class Worst(msgspec.Struct, frozen=True, kw_only=True):
    """The token whose two log-probabilities are furthest apart."""

    branch: int
    index: int
    token_id: int
    call: int
    recorded: float
    scored: float


class Gap(msgspec.Struct, kw_only=True):
    """Differences over many tokens."""

    tokens: int = 0
    total: float = 0.0
    worst: Worst | None = None

    @property
    def mean(self) -> float | None:
        """The mean absolute difference; ``None`` where nothing was compared."""
        return self.total / self.tokens if self.tokens else None

    @property
    def max(self) -> float | None:
        """The largest one."""
        return None if self.worst is None else abs(self.worst.recorded - self.worst.scored)

    def add(self, other: Gap) -> None:
        """Take the tokens of another one in."""
        self.tokens += other.tokens
        self.total += other.total
        if self.worst is None or (other.max or 0.0) > (self.max or 0.0):
            self.worst = other.worst or self.worst


def plan(branches: Sequence[Branch], calls: Sequence[CallRecord]) -> tuple[list[Section], list[Skipped]]:
    """Every sampled token of a sound trajectory, either in one section or in one of those that can't be compared."""
    found: dict[tuple[int, PolicyVersion | None], list[Piece]] = {}
    skipped: list[Skipped] = []
    for place, branch in enumerate(branches):
        for piece, version in _pieces(branch, calls):
            reason = _incomparable(calls[piece.call])
            if reason is None:
                found.setdefault((place, version), []).append(piece)
            else:
                skipped.append(Skipped(reason=reason, version=version, tokens=piece.end - piece.start))
    sections = [
        Section(branch=place, version=version, pieces=tuple(pieces)) for (place, version), pieces in found.items()
    ]
    return sections, skipped


def _pieces(branch: Branch, calls: Sequence[CallRecord]) -> Iterator[tuple[Piece, PolicyVersion | None]]:
    for segment in branch.segments:
        at = segment.start
        for n in segment.calls:
            for span in calls[n].policy_versions:
                version = span.made_by
                yield Piece(at + span.start, at + span.end, n), version
            at += calls[n].sampled_len


def _incomparable(call: CallRecord) -> UnscoredReason | None:
    if call.params.logprobs_mode == "none":
        return "no_logprobs"
    if not call.exact:
        return "inexact"
    return None if call.params.logprobs_mode == "raw" or _untouched(call.params) else "processed"


def _untouched(params: CallParams) -> bool:
    """Whether nothing was done to the model's distribution, so that processed and raw are the same."""
    whole = params.top_p == 1.0 and params.top_k <= 0 and params.min_p == 0.0
    return whole and params.temperature == 1.0 and not any(params.penalties.values())


def compare(branch: Branch, section: Section, scored: Sequence[float]) -> Gap:
    """``scored`` begins at ``section.start``; it may end early, and then so does the comparison."""
    gap = Gap()
    furthest, place = -1.0, (0, 0)
    known = section.start + len(scored)
    for piece in section.pieces:
        for index in range(piece.start, min(piece.end, known)):
            apart = abs(branch.logprobs[index] - scored[index - section.start])
            gap.tokens += 1
            gap.total += apart
            if apart > furthest:
                furthest, place = apart, (index, piece.call)
    if gap.tokens:
        index, call = place
        gap.worst = Worst(
            branch=section.branch,
            index=index,
            token_id=branch.ids[index],
            call=call,
            recorded=branch.logprobs[index],
            scored=scored[index - section.start],
        )
    return gap


def drifts(gap: Gap, tolerance: Tolerance) -> bool:
    """Whether the tokens are not what the version says of them."""
    return (gap.mean or 0.0) > tolerance.mean or (gap.max or 0.0) > tolerance.max
