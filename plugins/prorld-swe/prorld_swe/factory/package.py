"""One package made into tasks: its baseline once, then bug after bug until there are enough or time is up."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import trio

from prorld.errors import chain
from prorld.handlers import Impossible
from prorld_swe.factory.baseline import Baseline, BaselineRules, measure_baseline
from prorld_swe.factory.candidates import Bug, Candidate, combined, find_candidates, make_bug
from prorld_swe.factory.journal import Journal, Measured, Tried
from prorld_swe.factory.layout import find_layout
from prorld_swe.factory.rows import Origin, row_of
from prorld_swe.factory.settings import Order, Settings
from prorld_swe.factory.suite import Bench
from prorld_swe.factory.tree import Tree, read_sdist, write_tree
from prorld_swe.factory.trial import Rules, Trial, try_bug

__all__ = ["PackageReport", "make_package"]

# A combination waits for this many bugs of one kind each that were kept.
_SINGLES_MIN = 2
CLEANUP_S = 30.0


class PackageReport(msgspec.Struct, kw_only=True):
    """What became of a package. ``reused`` counts what the journal knew already."""

    name: str
    version: str = ""
    tests: int = 0
    flaky: int = 0
    suite_s: float = 0.0
    tried: int = 0
    kept: int = 0
    reused: int = 0
    wavering: int = 0
    verdicts: dict[str, int] = {}
    seconds: float = 0.0
    refused: str = ""
    out_of_time: bool = False


class _Maker:
    """The state of one package while it is made."""

    def __init__(
        self, bench: Bench, journal: Journal, settings: Settings, order: Order, origin: Origin, tree: Tree, place: Path
    ) -> None:
        self.bench = bench
        self.journal = journal
        self.settings = settings
        self.order = order
        self.origin = origin
        self.tree = tree
        self.place = place
        self.key = settings.key(origin.sha256, order.wishes)
        self.report = PackageReport(name=origin.name, version=origin.version)
        self.rules = Rules(max_f2p=settings.max_f2p, times=settings.times, load=settings.load, limit_s=settings.limit_s)
        # So that packages of which only a few tasks are made have their part of those with two bugs.
        self.head_start = int(origin.sha256[:8], 16) / 0x1_0000_0000
        self.singles: list[Candidate] = []
        self.kept_of: Counter[str] = Counter()
        # By where a bug is and which tests fail: the one that was kept, now or by an earlier run.
        self.shown = {
            (each.functions, each.f2p): each.digest
            for each in journal.tried(self.key).values()
            if each.verdict == "kept"
        }
        self.verdicts: Counter[str] = Counter()
        # Two kinds of change can write the same program: it is one bug, and one task.
        self.taken: set[str] = set()

    async def baseline(self, tell: Callable[[str], None]) -> Baseline | None:
        """From the journal, or measured now, which takes minutes."""
        known = self.journal.measured(self.key)
        if known is None:
            started = trio.current_time()
            known = Measured(package=self.key, name=self.origin.name, version=self.origin.version)
            s = self.settings
            tell(f"{self.origin.name}: running its own tests again and again, to see which can be relied on")
            rules = BaselineRules(limit_s=s.limit_s, slow_s=s.slow_s, times=s.times, load=s.load)
            try:
                layout = find_layout(self.tree, self.origin.name, self.order.wishes)
                found = await measure_baseline(self.bench, self.place, layout, rules)
                known = msgspec.structs.replace(known, baseline=found)
            except Impossible as exc:
                known = msgspec.structs.replace(known, refused=exc.message[:1_000])
            known = msgspec.structs.replace(known, seconds=round(trio.current_time() - started, 2))
            self.journal.add(known)
        self.report.seconds += known.seconds
        self.report.refused = known.refused
        return known.baseline

    async def make(self, width: int, tell: Callable[[str], None]) -> None:
        """Bugs in waves of ``width``, which are taken in order, so that a run's speed does not decide what is kept."""
        baseline = await self.baseline(tell)
        if baseline is None:
            return
        self.report.tests, self.report.flaky = len(baseline.stable), len(baseline.flaky)
        self.report.suite_s = baseline.suite_s
        queue = deque(await trio.to_thread.run_sync(self._candidates, baseline))
        while self.report.kept < self.settings.per_package and self.report.tried < self.settings.tries:
            wave = self._wave(queue, width)
            if not wave:
                break
            tell(f"{self.origin.name}: {self.report.kept} kept of {self.report.tried} tried")
            results: dict[str, Tried] = {}
            async with trio.open_nursery() as nursery:
                for bug in wave:
                    nursery.start_soon(self._try, bug, baseline, results)
            for bug in wave:
                self._accept(bug, results[bug.digest], baseline)
        self.report.verdicts = dict(self.verdicts)

    def _candidates(self, baseline: Baseline) -> list[Candidate]:
        layout = find_layout(self.tree, self.origin.name, self.order.wishes)
        return find_candidates(
            self.tree,
            layout.code,
            operators=self.settings.operators,
            seed=f"{self.settings.seed}:{self.origin.sha256}",
            executed=baseline.executed,
        )

    def _wave(self, queue: deque[Candidate], width: int) -> list[Bug]:
        wave: list[Bug] = []
        for candidate in self._next(queue):
            crowded = any(self.kept_of[f] >= self.settings.per_function for f in candidate.functions)
            if crowded and len(candidate.operators) == 1:
                continue
            bug = make_bug(self.tree, candidate)
            if bug is not None and bug.name not in self.taken:
                wave.append(bug)
                self.taken.add(bug.name)
            if len(wave) >= width:
                break
        return wave

    def _next(self, queue: deque[Candidate]) -> Iterator[Candidate]:
        """A combination of two that work alone, now and then; else the next one."""
        share = self.settings.combined
        while True:
            pairs = self.report.kept * share + self.head_start >= 1 + self.kept_of["of two"]
            if pairs and len(self.singles) >= _SINGLES_MIN and (pair := self._pair()) is not None:
                yield pair
            elif queue:
                yield queue.popleft()
            else:
                return

    def _pair(self) -> Candidate | None:
        """The newest two that go together and were not tried together."""
        for at in range(len(self.singles) - 1, 0, -1):
            for other in self.singles[at - 1 :: -1]:
                pair = combined(self.singles[at], other)
                if pair is not None and self.kept_of[str(pair.edits)] == 0:
                    self.kept_of[str(pair.edits)] += 1
                    return pair
        return None

    async def _try(self, bug: Bug, baseline: Baseline, results: dict[str, Tried]) -> None:
        known = self.journal.tried(self.key).get(bug.digest)
        if known is not None:
            self.report.reused += 1
            results[bug.digest] = known
            return
        trial = await try_bug(self.bench, self.place, bug, baseline, self.rules)
        results[bug.digest] = self._tried(bug, trial, baseline)

    def _tried(self, bug: Bug, trial: Trial, baseline: Baseline) -> Tried:
        row: dict[str, Any] | None = None
        if trial.verdict == "kept":
            made = datetime.now(UTC).isoformat(timespec="seconds")
            row = row_of(self.origin, self.tree, bug, trial, baseline, image=self.settings.image, made=made)
        return Tried(
            package=self.key,
            digest=bug.digest,
            verdict=trial.verdict,
            operators=bug.candidate.operators,
            functions=bug.candidate.functions,
            seconds=trial.seconds,
            f2p=trial.f2p,
            dropped=trial.dropped,
            detail=trial.detail,
            row=row,
        )

    def _accept(self, bug: Bug, tried: Tried, baseline: Baseline) -> None:
        """Count it, and keep it where nothing like it was kept before."""
        candidate = bug.candidate
        shown = self.shown.get((candidate.functions, tried.f2p), bug.digest)
        if tried.verdict == "kept" and shown != bug.digest:
            tried = msgspec.structs.replace(tried, verdict="twin", row=None)
        self.report.tried += 1
        self.report.seconds += tried.seconds
        self.report.wavering += len(tried.dropped)
        if tried.verdict == "kept" and tried.row is not None:
            self.report.kept += 1
            self.shown[candidate.functions, tried.f2p] = bug.digest
            if len(candidate.operators) > 1:
                self.kept_of["of two"] += 1
            else:
                self.singles.append(candidate)
                self.kept_of.update(candidate.functions)
            tried.row["difficulty"].setdefault("kept_share", round(self.report.kept / self.report.tried, 3))
        else:
            self.verdicts[tried.verdict] += 1
        if bug.digest not in self.journal.tried(self.key):
            self.journal.add(tried)


async def make_package(
    bench: Bench,
    journal: Journal,
    settings: Settings,
    order: Order,
    archive: Path,
    sha256: str,
    *,
    width: int,
    tell: Callable[[str], None],
) -> PackageReport:
    """Make the tasks of one package; why there are none is part of the report."""
    try:
        origin = Origin.of(archive.name, sha256)
    except Impossible as exc:
        return PackageReport(name=archive.name, refused=exc.message)
    where = Path(await trio.to_thread.run_sync(tempfile.mkdtemp, "", "prorld-factory-"))
    try:
        try:
            tree = await trio.to_thread.run_sync(read_sdist, archive)
            place = where / "tree"
            await trio.to_thread.run_sync(write_tree, tree, place)
        except (Impossible, OSError) as exc:
            return PackageReport(name=origin.name, version=origin.version, refused=chain(exc))
        maker = _Maker(bench, journal, settings, order, origin, tree, place)
        with trio.move_on_after(settings.package_s) as scope:
            await maker.make(width, tell)
        maker.report.verdicts = dict(maker.verdicts)
        maker.report.out_of_time = scope.cancelled_caught
        return maker.report
    finally:
        with trio.move_on_after(CLEANUP_S, shield=True):
            await trio.to_thread.run_sync(partial(shutil.rmtree, where, ignore_errors=True))
