"""What one run with a bug says of it, and what is told of a package at the end."""

from __future__ import annotations

import pytest

from prorld_swe.factory.package import PackageReport
from prorld_swe.factory.report import package_table, summary_of
from prorld_swe.factory.suite import SuiteRun, SuiteTest
from prorld_swe.factory.trial import Rules, judge

STABLE = {f"t.py::test_{number}" for number in range(100)}


def _run(failed: int, missing: int = 0, outcome: str = "failed", **how) -> SuiteRun:
    names = sorted(STABLE)[missing:]
    tests = {
        name: SuiteTest(
            id=name, outcome=outcome if at < failed else "passed", seconds=0.1, message="no" * (at < failed)
        )
        for at, name in enumerate(names)
    }
    return SuiteRun(tests=tests, **{"ended": True, "status": 1, **how})


@pytest.mark.parametrize(
    ("run", "verdict"),
    [
        (_run(1), "kept"),
        (_run(5), "kept"),
        (_run(3, outcome="error"), "kept"),
        (_run(0), "no_effect"),
        (_run(6), "too_many"),
        (_run(6, missing=50), "too_many"),
        (_run(1, missing=2), "kept"),
        (_run(1, missing=3), "lost"),
        (_run(3, outcome="skipped"), "lost"),
        (_run(1, ended=False, timed_out=True), "timed_out"),
        (_run(1, ended=False, trouble="killed"), "crashed"),
        (_run(0, ended=False, broken={"t.py": "ImportError"}), "lost"),
    ],
)
def test_a_run_with_a_bug_is_judged(run, verdict):
    """Few failing tests, nearly all the others there, to the end."""
    trial = judge(run, STABLE, Rules().f2p_max(len(STABLE)))
    assert trial.verdict == verdict
    assert bool(trial.f2p) == (verdict == "kept")
    assert set(trial.messages) == set(trial.f2p)


def test_tests_that_nobody_relies_on_do_not_count():
    """A flaky one may fail or be gone."""
    run = _run(1)
    run.tests["t.py::test_flaky"] = SuiteTest(id="t.py::test_flaky", outcome="failed", seconds=1.0)
    trial = judge(run, STABLE, 3)
    assert (trial.verdict, "t.py::test_flaky" in trial.f2p) == ("kept", False)


def test_the_table_says_what_became_of_each_package():
    """What was kept, why not, how long it took, and what is wrong with one that gave nothing."""
    reports = [
        PackageReport(name="a", version="1", tests=9, tried=4, kept=2, seconds=10.0, verdicts={"no_effect": 2}),
        PackageReport(name="b", refused="its tests\ncan't be run", out_of_time=True),
    ]
    lines = package_table(reports)
    assert lines[1].split() == ["a", "1", "9", "0", "0.0", "4", "2", "5.0", "2", "no", "test", "fails"]
    assert lines[-2:] == ["b: its tests can't be run", "b: its time was up"]
    summary = summary_of(reports, 2, 12.34)
    assert (summary["kept_share"], summary["seconds"], summary["packages"][1]["name"]) == (0.5, 12.3, "b")
    assert summary_of([], 0, 0)["kept_share"] is None
