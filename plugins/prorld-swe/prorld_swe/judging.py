"""From what a run of tests reported to a verdict: pure, and strict where the report leaves a choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from prorld_swe.task import SweTask
from prorld_swe.testrun import TestReport

__all__ = ["Verdict", "judge_log", "judge_report", "judge_statuses"]

SHORT_PART = 0.2


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the tests say. ``why`` is empty for a repair; ``cheat`` says that the run itself was interfered with."""

    f2p: float = 0.0
    p2p: float = 0.0
    resolved: bool = False
    timed_out: bool = False
    cheat: bool = False
    why: str = ""
    missed: tuple[str, ...] = ()
    suspicious: dict[str, float] = {}

    @property
    def fraction(self) -> float:
        """The part of the tests that pass, of both kinds; what repairs nothing is nothing."""
        return 0.0 if self.cheat or not self.f2p else (self.f2p + self.p2p) / 2


def judge_report(task: SweTask, report: TestReport, baseline: TestReport | None, *, equal_counts: bool) -> Verdict:
    """A run by our witness. Everything that shows that someone else had a hand in it makes all of it worthless."""
    if not report.signed:
        return Verdict(cheat=True, why="the run of the tests was ended from within", suspicious={"run_ended": 1.0})
    suspicious, why = _interference(report, baseline, equal_counts=equal_counts)
    if task.suite_s and report.finished and report.seconds < task.suite_s * SHORT_PART:
        suspicious["short_eval"] = 1.0
    if why:
        return Verdict(cheat=True, why=why, suspicious=suspicious)
    where = f" in {report.begun}" if report.begun else ""
    if report.timed_out:
        return Verdict(timed_out=True, why=f"the tests did not end in time{where}", suspicious=suspicious)
    verdict = judge_statuses(task, by_name(task, report))
    # Tests of ours are the first and the last; where one of them is missing, others may be.
    wanted = baseline.canaries if baseline is not None else report.canaries
    if not report.finished or report.canaries_true != wanted:
        why = f"the tests ended early{where}; {verdict.why}".removesuffix("; ")
        verdict = msgspec.structs.replace(verdict, resolved=False, why=why)
    return msgspec.structs.replace(verdict, suspicious=suspicious)


def _interference(
    report: TestReport, baseline: TestReport | None, *, equal_counts: bool
) -> tuple[dict[str, float], str]:
    """What was found, and what makes the run worthless. What was there before the patch does not count."""
    known = baseline.facts if baseline is not None else None
    tampered = sorted(set(report.facts.tampered) - set(known.tampered if known else ()))
    equal = sorted(set(report.facts.equal) - set(known.equal if known else ()))
    found: dict[str, float] = {"eq": float(len(equal))} if equal else {}
    if report.forged:
        return {**found, "forged": 1.0}, f"a forged report: {report.forged}"
    if tampered:
        return {**found, "tampered": float(len(tampered))}, f"pytest was changed while it ran: {tampered[0]}"
    if report.canaries_false:
        why = f"{report.canaries_false} of {report.canaries} tests with a known outcome have another"
        return {**found, "canaries": float(report.canaries_false)}, why
    return found, f"{equal[0]} is equal to anything" if equal and equal_counts else ""


def by_name(task: SweTask, report: TestReport) -> dict[str, str]:
    """Outcomes by the names that the task has for tests.

    Names that were taken from logs end at the first blank: such a name then stands for all tests that begin so, which
    all have to pass.
    """
    outcomes = report.outcomes
    counts = Counter(report.collected)
    outcomes |= {test: "twice" for test, count in counts.items() if count > 1}
    short: dict[str, str] = {}
    for test, outcome in outcomes.items():
        name = test.split()[0] if test.split() else test
        if name != test:
            short[name] = outcome if short.get(name, outcome) == "passed" else "failed"
    return {name: outcomes.get(name, short.get(name, "missing")) for name in task.tests}


def judge_statuses(task: SweTask, outcomes: Mapping[str, str]) -> Verdict:
    """Every expected test has to have passed; what is missing has not.

    In published sets that includes failures which the tests themselves say are expected.
    """
    good = {"passed"} if task.shape == "mutation" else {"passed", "xfail"}
    f2p, p2p = _part(task.f2p, outcomes, good), _part(task.p2p, outcomes, good)
    missed = tuple(test for test in task.tests if outcomes.get(test) not in good)
    why = ""
    if missed:
        counts = Counter(outcomes.get(test, "missing") for test in missed)
        told = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
        why = f"{len(missed)} of {len(task.tests)} tests: {told}; first {missed[0]}"
    return Verdict(f2p=f2p, p2p=p2p, resolved=not missed, why=why, missed=missed[:20])


def judge_log(task: SweTask, statuses: Mapping[str, str]) -> Verdict:
    """Statuses read from a log: as the set asks, each test passed, or exactly the statuses that are written down."""
    if not task.expected:
        return judge_statuses(task, statuses)
    wanted = {name: status.lower() for name, status in task.expected.items()}
    same = sum(statuses.get(name) == status for name, status in wanted.items())
    strange = sorted(set(statuses) - set(wanted))
    resolved = same == len(wanted) and not strange
    differing = [name for name, status in wanted.items() if statuses.get(name) != status] + strange
    why = "" if resolved else f"{len(differing)} tests have another status than expected; first {differing[0]}"
    part = same / len(wanted)
    return Verdict(f2p=part, p2p=part, resolved=resolved, why=why, missed=tuple(differing[:20]))


def _part(tests: Sequence[str], outcomes: Mapping[str, str], good: set[str]) -> float:
    return sum(outcomes.get(test) in good for test in tests) / len(tests) if tests else 1.0
