"""What a preflight has come to, counted and told: a line while it runs, a summary, and what to do next."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

import msgspec

from prorld.cli.output import Style, clean, count, program, seconds
from prorld.cli.preflight_judge import Report, Verdict
from prorld.domain.outcome import STAGES

__all__ = ["Summary", "Tally", "summary_lines"]

# So many instances that are not good are told one by one; the report has them all.
TOLD_MAX = 10
_COLOURS = {Verdict.GOOD: "green", Verdict.UNSURE: "yellow", Verdict.FLAKY: "yellow", Verdict.BAD: "red"}


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a preflight. Times are of gold plays: the median, and the longest."""

    instances: int
    good: int
    bad: int
    flaky: int
    unsure: int
    refused: int
    left: int
    kept: int
    rollouts: int
    flake_rate: float
    load: int
    jobs: int
    wall_s: float
    init_p50_s: float | None
    init_max_s: float | None
    run_p50_s: float | None
    run_max_s: float | None
    eval_p50_s: float | None
    eval_max_s: float | None
    out: str | None
    report: str | None


class Tally:
    """What has become of the instances so far. ``kept`` ones were in the report before."""

    def __init__(self, total: int, refused: int) -> None:
        self.total = total
        self.refused = refused
        self.kept = 0
        self.running = 0
        self.rollouts = 0
        self.verdicts: Counter[Verdict] = Counter()
        self.good: set[str] = set()
        self.worst: list[Report] = []
        self._odd = 0.0
        self._gold: dict[str, list[tuple[float, float]]] = {stage: [] for stage in STAGES}
        self._began = time.monotonic()

    def count(self, report: Report, *, kept: bool = False) -> None:
        """An instance is judged, now or, ``kept``, by an earlier run."""
        self.verdicts[report.verdict] += 1
        self.kept += kept
        self.rollouts += report.rollouts
        self._odd += report.flake_rate * report.rollouts
        if report.verdict is Verdict.GOOD:
            self.good.add(report.digest)
        elif len(self.worst) < TOLD_MAX:
            self.worst.append(report)
        gold = report.plays.get("gold")
        for stage, times in () if gold is None else gold.times.items():
            self._gold[stage].append((times.p50, times.max))

    def runs(self, change: int) -> None:
        """So many rollouts more, or fewer, are under way."""
        self.running += change

    @property
    def ended(self) -> int:
        """Instances that are judged."""
        return sum(self.verdicts.values())

    def words(self) -> str:
        """All of it on one line."""
        parts = [f"{self.ended}/{self.total} instances"]
        parts += [f"{self.verdicts[verdict]} {verdict.value}" for verdict in Verdict if self.verdicts[verdict]]
        if self.refused:
            parts.append(f"{self.refused} refused")
        if self.running:
            parts.append(count(self.running, "rollout") + " in flight")
        left, done = self.total - self.ended, self.ended - self.kept
        if left and done:
            parts.append(f"about {seconds(left * (time.monotonic() - self._began) / done)} left")
        return ", ".join(parts)

    def summary(self, *, load: int, jobs: int, out: str | None, report: str | None) -> Summary:
        """The whole of it."""
        times: dict[str, float | None] = {}
        for stage, found in self._gold.items():
            times[f"{stage}_p50_s"] = round(median(p50 for p50, _ in found), 3) if found else None
            times[f"{stage}_max_s"] = max((longest for _, longest in found), default=None)
        return Summary(
            instances=self.total,
            good=self.verdicts[Verdict.GOOD],
            bad=self.verdicts[Verdict.BAD],
            flaky=self.verdicts[Verdict.FLAKY],
            unsure=self.verdicts[Verdict.UNSURE],
            refused=self.refused,
            left=self.total - self.ended,
            kept=self.kept,
            rollouts=self.rollouts,
            flake_rate=round(self._odd / self.rollouts, 4) if self.rollouts else 0.0,
            load=load,
            jobs=jobs,
            wall_s=round(time.monotonic() - self._began, 3),
            out=out,
            report=report,
            **times,
        )


def summary_lines(found: Summary, worst: Sequence[Report], handler: str, style: Style) -> Iterator[str]:
    """The summary, the first of those that are not good, and what to do next."""
    counted = [f"{getattr(found, verdict.value)} {verdict.value}" for verdict in Verdict]
    yield f"{count(found.instances, 'instance')}: {', '.join(counted)}; {count(found.rollouts, 'rollout')}"
    if found.init_p50_s is not None:
        times = [f"{stage} {_span(found, stage)}" for stage in STAGES]
        yield f"gold plays took {', '.join(times)} (median, longest); flake rate {found.flake_rate:g}"
    for report in worst:
        name = style(report.verdict.value, _COLOURS[report.verdict], "bold")
        yield f"line {report.line} is {name}: {clean(report.why or 'no reason is known')}"
    more = found.bad + found.flaky + found.unsure - len(worst)
    if more > 0:
        yield f"and {more} more{' in the report' if found.report else ''}"
    yield ""
    if found.report is not None:
        yield f"report: {found.report}"
    yield from _next(found, handler)


def _next(found: Summary, handler: str) -> Iterator[str]:
    if found.left:
        yield f"next: the same command again goes on with the other {found.left}"
    elif found.out is None:
        yield "next: the same command with `-o GOOD.jsonl` writes the good instances"
    elif found.good:
        good = shlex.quote(found.out)
        yield f"next: {program()} run {good} --handler {handler} -o out.jsonl"
        if found.unsure:
            yield f"      the same command again tries the {found.unsure} unsure once more"
    else:
        yield f"next: {program()} try {handler} @TASKS --turn TEXT shows one rollout with all that happens in it"


def _span(found: Summary, stage: str) -> str:
    p50, longest = getattr(found, f"{stage}_p50_s"), getattr(found, f"{stage}_max_s")
    return f"{seconds(p50)}, {seconds(longest)}"
