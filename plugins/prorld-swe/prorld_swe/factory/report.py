"""What was made, as tables: by package after a run, and of a whole file of tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from prorld_swe.factory.package import PackageReport
from prorld_swe.factory.trial import REASONS

__all__ = ["package_table", "stats_of", "stats_table", "summary_of"]

_COLUMNS = ("package", "tests", "flaky", "suite s", "tried", "kept", "s per task", "thrown away")


def summary_of(reports: Sequence[PackageReport], tasks: int, seconds: float) -> dict[str, Any]:
    """All of it for a program."""
    tried, kept = sum(each.tried for each in reports), sum(each.kept for each in reports)
    return {
        "tasks": tasks,
        "tried": tried,
        "kept": kept,
        "kept_share": round(kept / tried, 3) if tried else None,
        "flaky": sum(each.flaky for each in reports),
        "seconds": round(seconds, 1),
        "packages": [msgspec.to_builtins(each) for each in reports],
    }


def package_table(reports: Sequence[PackageReport]) -> list[str]:
    """One line for each package, and what was wrong with those that gave nothing."""
    rows = [_COLUMNS, *(tuple(_cells(each)) for each in reports)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_COLUMNS) - 1)]
    lines = [_line(row, widths) for row in rows]
    refused = [f"{each.name}: {' '.join(each.refused.split())[:300]}" for each in reports if each.refused]
    late = [f"{each.name}: its time was up" for each in reports if each.out_of_time]
    return [*lines, *([""] if refused or late else []), *refused, *late]


def _cells(report: PackageReport) -> Iterator[str]:
    yield f"{report.name} {report.version}".strip()
    yield str(report.tests)
    yield str(report.flaky)
    yield f"{report.suite_s:.1f}"
    yield str(report.tried)
    yield str(report.kept)
    yield f"{report.seconds / report.kept:.1f}" if report.kept else "-"
    counts = sorted(report.verdicts.items(), key=lambda each: -each[1])
    yield ", ".join(f"{count} {REASONS.get(verdict, verdict)}" for verdict, count in counts)  # type: ignore[call-overload]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *numbers = [cell.ljust(width) if not at else cell.rjust(width) for at, (cell, width) in
                       enumerate(zip(row, widths, strict=False))]  # fmt: skip
    return "  ".join([first, *numbers, row[-1]]).rstrip()


def stats_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How hard the tasks of a file look, before any policy has tried them."""
    hard = [row.get("difficulty") or {} for row in rows]
    return {
        "tasks": len(rows),
        "packages": dict(Counter(str(row.get("repo", "")).removeprefix("pypi/") for row in rows).most_common()),
        "operators": dict(Counter(str(each.get("operator", "")) for each in hard).most_common()),
        "hints": dict(Counter(str(each.get("hint", "")) for each in hard).most_common()),
        **{
            name: _spread([float(each[name]) for each in hard if isinstance(each.get(name), int | float)])
            for name in ("f2p", "p2p", "changed_lines", "bugs", "file_lines", "suite_s")
        },
    }


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    values.sort()
    at = {"least": 0.0, "median": 0.5, "p90": 0.9, "most": 1.0}
    return {name: values[round(share * (len(values) - 1))] for name, share in at.items()}


def stats_table(stats: Mapping[str, Any]) -> list[str]:
    """The same for a reader."""
    lines = [f"{stats['tasks']} tasks of {len(stats['packages'])} packages", ""]
    lines.append(f"{'':14}{'least':>10}{'median':>10}{'p90':>10}{'most':>10}")
    for name in ("f2p", "p2p", "changed_lines", "bugs", "file_lines", "suite_s"):
        cells = [f"{value:>10g}" for value in stats[name].values()]
        lines += [f"{name:14}{''.join(cells)}"] if cells else []
    for title in ("hints", "operators", "packages"):
        lines += ["", f"{title}:"]
        lines += [f"  {name or '-':36}{count:>6}" for name, count in stats[title].items()]
    return lines
