"""Counts of a run and how they are told: a bar on a terminal, now and then a line elsewhere, nothing when asked."""

from __future__ import annotations

import time
from collections import Counter
from typing import Protocol, TextIO

import msgspec

from prorld.cli.output import clean, number, seconds
from prorld.domain.outcome import Outcome, OutcomeKind

__all__ = ["FAILED", "Counted", "Progress", "Stats"]

# A rollout that ended so says nothing of the policy.
FAILED = frozenset({
    OutcomeKind.ENV_ERROR,
    OutcomeKind.LLM_ERROR,
    OutcomeKind.HANDLER_ERROR,
    OutcomeKind.GRADER_ERROR,
    OutcomeKind.CANCELLED,
    OutcomeKind.LOST,
})  # fmt: skip

_BAR = 24
_REDRAW_S = 0.2
_LINE_S = 5.0
_REFUSALS_TOLD = 20


class Stats:
    """What has become of a run so far. ``kept`` rollouts were in the file before."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.kept = 0
        self.refused = 0
        self.running = 0
        self.tokens = 0
        self.outcomes: Counter[str] = Counter()
        self.failed = 0
        self.rewards = 0
        self.reward_sum = 0.0
        self.began = time.monotonic()

    def count(self, outcome: Outcome, reward: float | None, *, sampled: int = 0, kept: bool = False) -> None:
        """A rollout has ended, in this run or, ``kept``, in an earlier one."""
        self.outcomes[outcome.kind.value] += 1
        self.kept += kept
        self.failed += outcome.kind in FAILED
        self.tokens += sampled
        if reward is not None:
            self.rewards += 1
            self.reward_sum += reward

    @property
    def ended(self) -> int:
        """Rollouts with a line in the file."""
        return sum(self.outcomes.values())

    @property
    def rate(self) -> float:
        """Rollouts that ended in a second of this run."""
        return (self.ended - self.kept) / max(time.monotonic() - self.began, 1e-3)

    def words(self) -> str:
        """All of it on one line."""
        parts = [f"{self.ended}/{self.total}", f"{self.rate:.1f}/s"]
        parts += [f"{count} {kind}" for kind, count in sorted(self.outcomes.items())]
        if self.rewards:
            parts.append(f"mean reward {number(self.reward_sum / self.rewards)}")
        if self.refused:
            parts.append(f"{self.refused} refused")
        if self.running:
            parts.append(f"{self.running} in flight")
        left = self.total - self.ended - self.refused
        if left and self.ended > self.kept:
            parts.append(f"about {seconds(left / self.rate)} left")
        return ", ".join(parts)

    def summary(self) -> Summary:
        """The end of a run."""
        return Summary(
            total=self.total,
            ended=self.ended,
            kept=self.kept,
            refused=self.refused,
            failed=self.failed,
            outcomes=dict(self.outcomes),
            mean_reward=self.reward_sum / self.rewards if self.rewards else None,
            sampled_tokens=self.tokens,
            wall_s=round(time.monotonic() - self.began, 3),
        )


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to."""

    total: int
    ended: int
    kept: int
    refused: int
    failed: int
    outcomes: dict[str, int]
    mean_reward: float | None
    sampled_tokens: int
    wall_s: float


class Counted(Protocol):
    """What progress is shown of."""

    @property
    def total(self) -> int:
        """How many there are to do."""
        ...

    @property
    def ended(self) -> int:
        """How many are done."""
        ...

    @property
    def kept(self) -> int:
        """How many of them were done before."""
        ...

    @property
    def running(self) -> int:
        """How many are being worked on."""
        ...

    def words(self) -> str:
        """All of it on one line."""
        ...


class Progress:
    """Tells a person how it goes."""

    def __init__(self, stream: TextIO, *, quiet: bool) -> None:
        self._stream = stream
        self._quiet = quiet
        self._live = stream.isatty() and not quiet
        self._next = 0.0
        self._refusals = 0

    def show(self, stats: Counted) -> None:
        """Where the run is, if it is time to say so."""
        now = time.monotonic()
        if self._quiet or now < self._next:
            return
        self._next = now + (_REDRAW_S if self._live else _LINE_S)
        if self._live:
            filled = round(_BAR * stats.ended / max(stats.total, 1))
            self._write(f"\r\x1b[K[{'█' * filled}{'·' * (_BAR - filled)}] {stats.words()}")
        elif stats.ended > stats.kept or stats.running:
            self._write(stats.words() + "\n")

    def say(self, line: str) -> None:
        """Something that happened."""
        if not self._quiet:
            self._write(("\r\x1b[K" if self._live else "") + clean(line) + "\n")

    def refused(self, line: str) -> None:
        """A task that was refused; told even when quiet, but not a thousand times."""
        self._refusals += 1
        if self._refusals <= _REFUSALS_TOLD:
            self._write(("\r\x1b[K" if self._live else "") + clean(line) + "\n")
        elif self._refusals == _REFUSALS_TOLD + 1:
            self._write("more tasks are refused and not told one by one\n")

    def end(self, stats: Counted) -> None:
        """The last line."""
        self.say(stats.words())

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
