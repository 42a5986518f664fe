"""What a package's tests say when nothing is wrong: several runs, and only what passes in all of them is kept."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from prorld.handlers import Impossible
from prorld_swe.factory.layout import Layout
from prorld_swe.factory.suite import ROOT, Bench, SuitePlan, SuiteRun, run_suite

__all__ = ["BASE_ARGS", "Baseline", "BaselineRules", "measure_baseline"]

# The package's own options may name plugins that are not there; its other settings stay.
BASE_ARGS = ("-o", "addopts=", "--rootdir=.")
# Tried where the one before lets less than half of the tests pass.
_VARIANTS: tuple[tuple[str, ...], ...] = ((), ("-W", "ignore"), ("-c", "/dev/null", "-W", "ignore"))
# Names that stay whole on a line of a log.
_SAFE_ID = re.compile(r"[!-~]{3,400}")
TESTS_MIN = 5
# The words of all of them have to fit into an instance.
DESELECTED_MAX = 12
TRACE_FACTOR = 25.0


class BaselineRules(msgspec.Struct, frozen=True, kw_only=True):
    """``limit_s`` bounds a run of the whole suite, ``slow_s`` one test, ``times`` are the runs under load."""

    limit_s: float = 120.0
    slow_s: float = 5.0
    times: int = 3
    load: int = 2


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """What can be relied on: ``stable`` tests pass however often, in whatever order, on a busy machine.

    ``flaky`` are those that passed once and not always, ``unnamed`` those whose names can't be written down safely.
    """

    plan: SuitePlan
    stable: list[str]
    flaky: list[str]
    slow: list[str]
    unnamed: int
    seen: int
    suite_s: float
    executed: dict[str, list[int]] | None


async def measure_baseline(bench: Bench, place: Path, layout: Layout, rules: BaselineRules) -> Baseline:
    """Run the tests of an unchanged package until it is known which of them count. Raises ``Impossible``."""
    plan, first = await _first_run(bench, place, layout, rules)
    slow = sorted(test.id for test in first.tests.values() if test.seconds > rules.slow_s)
    if slow:
        if len(slow) > DESELECTED_MAX or not all(_SAFE_ID.fullmatch(name) for name in slow):
            raise Impossible(f"{len(slow)} tests take over {rules.slow_s:g} s each")
        left_out = [word for name in slow for word in ("--deselect", name)]
        plan = msgspec.structs.replace(plan, args=(*plan.args, *left_out))
        first = await _run_whole(bench, place, plan)
    passed = first.with_outcome("passed")
    # From here on as a grader runs them: the files that hold tests that count, and no others.
    plan = msgspec.structs.replace(plan, tests=_files(passed))
    runs: list[SuiteRun] = [await _run_whole(bench, place, msgspec.structs.replace(plan, reversed=True))]
    loaded = msgspec.structs.replace(plan, load=rules.load)
    runs += [await _run_whole(bench, place, loaded) for _ in range(rules.times)]
    always = passed.intersection(*(run.with_outcome("passed") for run in runs))
    stable = sorted(name for name in always if _SAFE_ID.fullmatch(name) and "::" in name)
    if len(stable) < TESTS_MIN:
        raise Impossible(f"only {len(stable)} of its tests can be relied on{_first_failure(first)}")
    return Baseline(
        plan=msgspec.structs.replace(plan, tests=_files(stable)),
        stable=stable,
        flaky=sorted(name[:400] for name in passed - always),
        slow=slow,
        unnamed=len(always) - len(stable),
        seen=len(first.tests),
        suite_s=round(min(run.seconds for run in (first, *runs)), 2),
        executed=await _executed(bench, place, plan, first.seconds, rules),
    )


def _files(tests: Sequence[str] | set[str]) -> tuple[str, ...]:
    return tuple(sorted({name.split("::", 1)[0] for name in tests}))


async def _first_run(bench: Bench, place: Path, layout: Layout, rules: BaselineRules) -> tuple[SuitePlan, SuiteRun]:
    """The variant of pytest's options that lets most tests pass."""
    best: tuple[SuitePlan, SuiteRun] | None = None
    for variant in _VARIANTS:
        plan = SuitePlan(
            tests=layout.tests,
            args=(*BASE_ARGS, *variant, *layout.pytest_args),
            python_path=layout.python_path,
            limit_s=rules.limit_s,
            modules=layout.modules,
        )
        run = await run_suite(bench, place, {}, plan)
        if run.broken and run.status == 2:
            # Files that can't be collected here need what is not here; the others may do without.
            ignored = [f"--ignore={path}" for path in sorted(run.broken) if _SAFE_ID.fullmatch(path)][:DESELECTED_MAX]
            plan = msgspec.structs.replace(plan, args=(*plan.args, *ignored))
            run = await run_suite(bench, place, {}, plan)
        good = len(run.with_outcome("passed"))
        if best is None or good > len(best[1].with_outcome("passed")):
            best = plan, run
        if run.timed_out or (run.ended and good * 2 > len(run.tests) and good >= TESTS_MIN):
            break
    assert best is not None
    _must_be_ours(best[1])
    return best


def _must_be_ours(run: SuiteRun) -> None:
    if not run.ended:
        why = "they do not end in time" if run.timed_out else run.trouble[-400:] or "pytest could not run them"
        raise Impossible(f"its tests can't be run: {why}")
    for name, where in run.modules.items():
        if where and not where.startswith(f"{ROOT}/"):
            raise Impossible(f"its tests import {name} from {where}, and not from the tree")
    if not any(run.modules.values()):
        raise Impossible(f"its tests import none of {', '.join(run.modules)}{_first_failure(run)}")


def _first_failure(run: SuiteRun) -> str:
    for name, message in run.broken.items():
        return f"; {name}: {message[-200:]}"
    for test in run.tests.values():
        if test.message:
            return f"; {test.id[:100]}: {test.message[:200]}"
    return ""


async def _run_whole(bench: Bench, place: Path, plan: SuitePlan) -> SuiteRun:
    run = await run_suite(bench, place, {}, plan)
    _must_be_ours(run)
    return run


async def _executed(
    bench: Bench, place: Path, plan: SuitePlan, seconds: float, rules: BaselineRules
) -> dict[str, list[int]] | None:
    """The lines that the tests reach; ``None`` where they do not end while they are watched."""
    limit_s = min(max(seconds * TRACE_FACTOR, 30.0), rules.limit_s * 3)
    run = await run_suite(bench, place, {}, msgspec.structs.replace(plan, trace=True, limit_s=limit_s))
    return run.lines if run.ended and run.lines else None
