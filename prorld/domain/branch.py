"""A branch: one conversation whose tokens only grow, on packed arrays.

The mask is decided here and nowhere else: ``append_sampled`` writes ones, every other way of growing writes zeros.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal

import msgspec

from prorld.domain.messages import Message
from prorld.domain.versions import PolicyVersion, parse_label

Source = Literal["prompt", "sampled", "observation", "glue"]
ForkReason = Literal["compaction", "think_strip", "sub_agent", "history_rewrite", "renderer_refused"]
# Why a handler may give a conversation another history.
Rewrite = Literal["compaction", "history_rewrite"]


class VersionSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens ``[start, end)`` came from this policy version; ``None`` where the policy did not make them."""

    start: int
    end: int
    epoch: int = 0
    version: int | None = None

    @property
    def made_by(self) -> PolicyVersion | None:
        """The policy version; ``None`` for one that is not known, and where the policy made nothing."""
        return None if self.version is None else PolicyVersion(self.epoch, self.version)


def labelled(label: str | None, start: int, end: int) -> VersionSpan:
    """The span of tokens that an engine labels so; without a version where the label means none of ours."""
    version = parse_label(label)
    if version is None:
        return VersionSpan(start=start, end=end)
    return VersionSpan(start=start, end=end, epoch=version.epoch, version=version.version)


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A run of tokens with one origin, the message it stands for, and the engine calls that made it."""

    start: int
    end: int
    source: Source
    calls: list[int] = []
    message: Message | None = None
    finish_reason: str | None = None


class Branch:
    """Token ids, mask and log-probabilities of one branch. Nothing is ever removed or rewritten."""

    __slots__ = (
        "_ids",
        "_logprobs",
        "_mask",
        "_sampled",
        "_segments",
        "_versions",
        "fork_at",
        "index",
        "parent",
        "reason",
    )

    def __init__(
        self, index: int = 0, *, parent: int | None = None, fork_at: int | None = None, reason: ForkReason | None = None
    ) -> None:
        self.index = index
        self.parent = parent
        self.fork_at = fork_at
        self.reason: ForkReason | None = reason
        self._ids = array("i")
        self._mask = bytearray()
        self._sampled = 0
        self._logprobs = array("f")
        self._segments: list[Segment] = []
        self._versions: list[VersionSpan] = []

    @classmethod
    def rebuilt(
        cls,
        index: int,
        *,
        parent: int | None,
        fork_at: int | None,
        reason: ForkReason | None,
        ids: array[int],
        mask: bytes,
        logprobs: array[float],
        segments: Sequence[Segment],
        versions: Sequence[VersionSpan],
    ) -> Branch:
        """A branch as it was written down, with everything in it that may be wrong: judging it is for who looks."""
        if not len(ids) == len(mask) == len(logprobs):
            raise ValueError(
                f"branch {index}: {len(ids)} ids, {len(mask)} in the mask, {len(logprobs)} log-probabilities"
            )
        branch = cls(index, parent=parent, fork_at=fork_at, reason=reason)
        branch._ids, branch._mask, branch._logprobs = ids, bytearray(mask), logprobs
        branch._sampled = mask.count(1)
        branch._segments, branch._versions = list(segments), list(versions)
        return branch

    def __len__(self) -> int:
        return len(self._ids)

    def __repr__(self) -> str:
        return f"<Branch {self.index}: {len(self)} tokens, {self.sampled} sampled, {len(self._segments)} segments>"

    @property
    def ids(self) -> array[int]:
        """The token ids; a live view that callers must not change."""
        return self._ids

    @property
    def mask(self) -> bytes:
        """1 where the policy sampled the token in this branch, else 0."""
        return bytes(self._mask)

    @property
    def logprobs(self) -> array[float]:
        """The sampler's log-probability per token, 0.0 where the mask is 0."""
        return self._logprobs

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The runs of tokens in order, covering the branch without gaps."""
        return tuple(self._segments)

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """Policy versions in order, covering the branch without gaps."""
        return tuple(self._versions)

    @property
    def sampled(self) -> int:
        """How many tokens the policy sampled in this branch."""
        return self._sampled

    def append_given(self, ids: Sequence[int], source: Source, message: Message | None = None) -> None:
        """Grow by tokens that the policy did not sample."""
        if source == "sampled":
            raise AssertionError("sampled tokens come from append_sampled")
        if not ids and message is None:
            return
        start = len(self)
        self._ids.extend(ids)
        self._mask.extend(bytes(len(ids)))
        self._logprobs.frombytes(bytes(len(ids) * self._logprobs.itemsize))
        self._segments.append(Segment(start=start, end=len(self), source=source, message=message))
        self._grow_versions(VersionSpan(start=start, end=len(self)))

    def append_sampled(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        spans: Sequence[VersionSpan],
        *,
        calls: list[int],
        message: Message | None,
        finish_reason: str,
    ) -> None:
        """Grow by what the policy sampled. ``spans`` are relative to the first sampled token and cover all of them."""
        if len(ids) != len(logprobs):
            raise AssertionError(f"{len(ids)} ids but {len(logprobs)} log-probabilities")
        covered = 0
        for span in spans:
            if span.start != covered or span.end < span.start:
                raise AssertionError("version spans leave a gap or overlap")
            covered = span.end
        if covered != len(ids):
            raise AssertionError(f"version spans cover {covered} of {len(ids)} tokens")
        start = len(self)
        self._ids.extend(ids)
        self._mask.extend(b"\x01" * len(ids))
        self._sampled += len(ids)
        self._logprobs.extend(logprobs)
        self._segments.append(
            Segment(
                start=start, end=len(self), source="sampled", calls=calls, message=message, finish_reason=finish_reason
            )
        )
        for span in spans:
            self._grow_versions(
                VersionSpan(start=start + span.start, end=start + span.end, epoch=span.epoch, version=span.version)
            )

    def _grow_versions(self, span: VersionSpan) -> None:
        if span.start == span.end:
            return
        last = self._versions[-1] if self._versions else None
        if last is not None and (last.epoch, last.version) == (span.epoch, span.version):
            self._versions[-1] = VersionSpan(start=last.start, end=span.end, epoch=span.epoch, version=span.version)
        else:
            self._versions.append(span)
