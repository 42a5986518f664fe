"""One bug against the tests: whether it shows, in few tests, and whether it does so every time."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from prorld_swe.factory.baseline import Baseline
from prorld_swe.factory.candidates import Bug
from prorld_swe.factory.suite import Bench, SuiteRun, run_suite

__all__ = ["REASONS", "Rules", "Trial", "Verdict", "try_bug"]

Verdict = Literal["kept", "no_effect", "too_many", "lost", "timed_out", "crashed", "unstable", "twin", "no_gold"]

REASONS: dict[Verdict, str] = {
    "no_effect": "no test fails",
    "too_many": "too many tests fail",
    "lost": "tests are missing",
    "timed_out": "the tests do not end",
    "crashed": "the tests can't be run",
    "unstable": "not the same tests each time",
    "twin": "the same tests fail as with a bug that was kept",
    "no_gold": "the way back does not mend it",
}
SEEN_SHARE_MIN = 0.98
F2P_SHARE_MAX = 0.05


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """``max_f2p`` tests may fail, or a twentieth of all; ``times`` runs under ``load`` have to say the same."""

    max_f2p: int = 3
    times: int = 3
    load: int = 2
    limit_s: float = 120.0

    def f2p_max(self, tests: int) -> int:
        """How many failing tests a task may have."""
        return max(self.max_f2p, int(F2P_SHARE_MAX * tests))


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a bug; ``messages`` are what its failing tests said, and ``dropped`` those that wavered."""

    verdict: Verdict
    f2p: tuple[str, ...] = ()
    p2p: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    messages: dict[str, str] = {}
    seconds: float = 0.0
    detail: str = ""


def run_limit(baseline: Baseline, rules: Rules) -> float:
    """What a run may take: more than the slowest good one, within what the user allows."""
    return min(rules.limit_s, max(15.0, 6 * baseline.suite_s + 10))


async def try_bug(bench: Bench, place: Path, bug: Bug, baseline: Baseline, rules: Rules) -> Trial:
    """Run the tests with the bug, and where it looks like a task, again and again under load, then without it."""
    stable = set(baseline.stable)
    most = rules.f2p_max(len(stable))
    limit_s = run_limit(baseline, rules)
    # Tests that fail by themselves count for pytest's own bound, too.
    spare = baseline.seen - len(stable)
    plan = msgspec.structs.replace(baseline.plan, limit_s=limit_s, failures_max=most + spare + 1)
    first = await run_suite(bench, place, {bug.candidate.path: bug.content}, plan)
    trial = judge(first, stable, most)
    if trial.verdict != "kept":
        return trial
    return await _screen(bench, place, bug, baseline, rules, trial)


def judge(run: SuiteRun, stable: set[str], most: int) -> Trial:
    """What one run with a bug says of it."""
    f2p = stable & run.with_outcome("failed", "error")
    p2p = stable & run.with_outcome("passed")
    if run.timed_out:
        return Trial(verdict="timed_out", seconds=run.seconds)
    if not run.ended:
        # A module that can't be imported any more takes its tests with it, and pytest gives up.
        verdict: Verdict = "lost" if run.broken else "crashed"
        return Trial(verdict=verdict, seconds=run.seconds, detail=run.trouble[-300:])
    if len(f2p) > most:
        return Trial(verdict="too_many", seconds=run.seconds)
    if len(f2p) + len(p2p) < SEEN_SHARE_MIN * len(stable):
        return Trial(verdict="lost", seconds=run.seconds)
    if not f2p:
        return Trial(verdict="no_effect", seconds=run.seconds)
    messages = {name: run.tests[name].message for name in sorted(f2p)}
    return Trial(verdict="kept", f2p=tuple(sorted(f2p)), p2p=tuple(sorted(p2p)), messages=messages, seconds=run.seconds)


async def _screen(bench: Bench, place: Path, bug: Bug, baseline: Baseline, rules: Rules, trial: Trial) -> Trial:
    """The same again by patches, as a grader would have it; the first difference in what fails ends it."""
    plan = msgspec.structs.replace(baseline.plan, load=rules.load, limit_s=run_limit(baseline, rules) * 2)
    f2p, p2p = set(trial.f2p), set(trial.p2p)
    stable = set(baseline.stable)
    seconds = trial.seconds
    for _ in range(rules.times - 1):
        again = await run_suite(bench, place, {}, msgspec.structs.replace(plan, patches=(bug.patch,)))
        seconds += again.seconds
        if not again.ended or stable & again.with_outcome("failed", "error") & f2p != f2p:
            return Trial(verdict="unstable", seconds=seconds, detail=again.trouble[-300:])
        p2p &= again.with_outcome("passed")
    mended = await run_suite(bench, place, {}, msgspec.structs.replace(plan, patches=(bug.patch, bug.gold)))
    seconds += mended.seconds
    if not mended.ended or not f2p <= mended.with_outcome("passed"):
        return Trial(verdict="no_gold", seconds=seconds, detail=mended.trouble[-300:])
    p2p &= mended.with_outcome("passed")
    if len(f2p) + len(p2p) < SEEN_SHARE_MIN * len(stable):
        return Trial(verdict="unstable", seconds=seconds)
    return msgspec.structs.replace(
        trial, p2p=tuple(sorted(p2p)), dropped=tuple(sorted(set(trial.p2p) - p2p)), seconds=round(seconds, 2)
    )
