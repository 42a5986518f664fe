"""The verdict over an instance, from what its plays came to. Pure: it knows numbers and words, no world.

A rollout that failed for reasons of infrastructure says nothing about the instance. Every other one either came to the
play's reward or did not; an end without a reward did not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from statistics import median
from typing import Any

import msgspec

from prorld.domain.outcome import STAGES, OutcomeKind
from prorld.handlers.play import GOLD, Play
from prorld.wire.jobs import JobRecord

__all__ = ["PlayReport", "Report", "StageTimes", "Tried", "Verdict", "report_of", "troubled"]

TOLERANCE = 1e-9
TOLD_LINES = 3
WORDS_CHARS = 400

_INFRASTRUCTURE = frozenset({OutcomeKind.ENV_ERROR, OutcomeKind.LLM_ERROR, OutcomeKind.CANCELLED, OutcomeKind.LOST})
NO_JUDGE = "no_judge"
_ABOUT_JUDGES = "a preflight has no engine and so no judge; try such tasks with one in the daemon: `prorld run`"


class Verdict(StrEnum):
    """Of an instance, the worst that one of its plays came to.

    ``bad``: a play never comes to its reward. ``flaky``: now and then. ``unsure``: could not be tried often enough.
    """

    GOOD = "good"
    UNSURE = "unsure"
    FLAKY = "flaky"
    BAD = "bad"


_RISING = tuple(Verdict)


class StageTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long one stage took, in seconds."""

    p50: float
    max: float


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of a play that ended, and what its handler told on the way."""

    record: JobRecord
    told: Sequence[Mapping[str, Any]] = ()

    @property
    def is_void(self) -> bool:
        """Whether it says nothing about the instance."""
        outcome = self.record.outcome
        if outcome is None or outcome.kind in _INFRASTRUCTURE:
            return True
        return self.record.reward is None and (outcome.retryable or self.lacks_judge)

    @property
    def lacks_judge(self) -> bool:
        """Whether its handler asked a judge, of which a preflight has none: that is no fault of the instance."""
        return self.record.outcome is not None and self.record.outcome.code == NO_JUDGE

    def hits(self, reward: float) -> bool:
        """Whether it came to this reward."""
        return self.record.reward is not None and abs(self.record.reward - reward) <= TOLERANCE


class PlayReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One play of an instance: the reward it has to come to, what it came to, and how long the stages took."""

    reward: float
    rewards: list[float | None]
    outcomes: dict[str, int]
    times: dict[str, StageTimes]
    flake_rate: float = 0.0
    metrics: dict[str, float] = {}
    why: str | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the report."""

    line: int
    digest: str
    verdict: Verdict
    plays: dict[str, PlayReport]
    rollouts: int = 0
    flake_rate: float = 0.0
    why: str | None = None


def troubled(line: int, digest: str, why: str) -> Report:
    """Of an instance that could not be played at all."""
    return Report(line=line, digest=digest, verdict=Verdict.UNSURE, plays={}, why=why[:WORDS_CHARS])


def report_of(line: int, digest: str, tried: Sequence[tuple[Play, Sequence[Tried]]]) -> Report:
    """The verdict, and what it rests on. Each play was tried at least once."""
    judged = [(play.name, *_judged(play, rollouts)) for play, rollouts in tried]
    verdict = max((found for _, found, _ in judged), key=_RISING.index, default=Verdict.UNSURE)
    # Of several, the gold play first: the others may have failed for the same reason.
    blame = [(name, play) for name, found, play in judged if found is verdict and play.why]
    blamed = min(blame, key=lambda one: one[0] != GOLD, default=None)
    valid = sum(not one.is_void for _, rollouts in tried for one in rollouts)
    odd = sum(_minority(play, rollouts) for play, rollouts in tried)
    return Report(
        line=line,
        digest=digest,
        verdict=verdict,
        plays={name: play for name, _, play in judged},
        rollouts=sum(len(rollouts) for _, rollouts in tried),
        flake_rate=_rate(odd, valid),
        why=None if blamed is None or verdict is Verdict.GOOD else f"{blamed[0]}: {blamed[1].why}",
    )


def _judged(play: Play, rollouts: Sequence[Tried]) -> tuple[Verdict, PlayReport]:
    valid = [one for one in rollouts if not one.is_void]
    misses = [one for one in valid if not one.hits(play.reward)]
    if misses and len(misses) < len(valid):
        verdict = Verdict.FLAKY
    elif len(valid) < len(rollouts):
        verdict = Verdict.UNSURE
    else:
        verdict = Verdict.BAD if misses else Verdict.GOOD
    blamed = misses or [one for one in rollouts if one.is_void]
    why = _why(play, blamed[0], len(blamed), len(rollouts)) if blamed else None
    return verdict, PlayReport(
        reward=play.reward,
        rewards=[one.record.reward for one in rollouts],
        outcomes=dict(Counter(_kind(one) for one in rollouts)),
        times={stage: _times([getattr(one.record.timing, f"{stage}_s") for one in rollouts]) for stage in STAGES},
        flake_rate=_rate(_minority(play, rollouts), len(valid)),
        metrics=_largest([one.record.metrics for one in rollouts]),
        why=why,
    )


def _why(play: Play, one: Tried, times: int, of: int) -> str:
    """What went otherwise, as the handler and the daemon tell it."""
    record, outcome = one.record, one.record.outcome
    if record.reward is None:
        words = "no end" if outcome is None else f"{outcome.kind.value} ({outcome.code}): {outcome.message}"
        words += f"; {_ABOUT_JUDGES}" if one.lacks_judge else ""
    else:
        parts = ", ".join(f"{name} {value:g}" for name, value in record.reward_parts.items())
        words = f"reward {record.reward:g}, and not {play.reward:g}{f' ({parts})' if parts else ''}"
    told = "; ".join(_line(line) for line in one.told[-TOLD_LINES:])
    return f"{words}, in {times} of {of}{f' [{told}]' if told else ''}"[:WORDS_CHARS]


def _line(told: Mapping[str, Any]) -> str:
    found = told.get("facts")
    facts = ", ".join(f"{name}={value}" for name, value in found.items()) if isinstance(found, Mapping) else found
    return f"{told.get('what')}{f' ({facts})' if facts else ''}"


def _kind(one: Tried) -> str:
    return "none" if one.record.outcome is None else one.record.outcome.kind.value


def _minority(play: Play, rollouts: Sequence[Tried]) -> int:
    """Rollouts that went another way than most of their play."""
    valid = [one.hits(play.reward) for one in rollouts if not one.is_void]
    return min(sum(valid), len(valid) - sum(valid))


def _rate(odd: int, of: int) -> float:
    return round(odd / of, 4) if of else 0.0


def _times(seconds: Sequence[float]) -> StageTimes:
    return StageTimes(p50=round(median(seconds), 3), max=round(max(seconds), 3))


def _largest(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for metrics in found for name in metrics}
    return {name: max(metrics[name] for metrics in found if name in metrics) for name in sorted(names)}
