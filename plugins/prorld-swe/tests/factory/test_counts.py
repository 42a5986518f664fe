"""What is counted is what is written: no bug is tried twice, and no task is kept twice."""

from __future__ import annotations

import shutil
import time

import pytest
import trio

from prorld.testing.workshop import FakeWorkshop
from prorld_swe.factory import package, plant
from prorld_swe.factory.baseline import Baseline
from prorld_swe.factory.candidates import OPERATORS, find_candidates, make_bug
from prorld_swe.factory.journal import open_journal
from prorld_swe.factory.layout import Wishes
from prorld_swe.factory.plant import make_all, read_tasks, write_tasks
from prorld_swe.factory.settings import Order, Settings
from prorld_swe.factory.suite import SuitePlan
from prorld_swe.factory.tree import Tree, file_sha256
from prorld_swe.factory.trial import Trial

TESTS = [f"tests/test_wordy.py::test_{number}" for number in range(10)]
ALL = Settings(per_package=100, tries=1_000, combined=0.0, per_function=100)


@pytest.fixture
def tried(monkeypatch):
    """The digests of the bugs that were tried, each of which shows in a test of its own, without a sandbox."""
    digests = []

    async def measure(*_):
        await trio.lowlevel.checkpoint()
        plan = SuitePlan(tests=("tests",), args=(), python_path=(".",), limit_s=10.0)
        return Baseline(
            plan=plan, stable=TESTS, flaky=[], slow=[], unnamed=0, seen=10, suite_s=0.1, executed=None
        )  # fmt: skip

    async def try_bug(_bench, _place, bug, *_):
        await trio.lowlevel.checkpoint()
        digests.append(bug.digest)
        name = f"tests/test_wordy.py::test_{bug.digest}"
        return Trial(verdict="kept", f2p=(name,), p2p=tuple(TESTS), messages={name: "no"})

    monkeypatch.setattr(package, "measure_baseline", measure)
    monkeypatch.setattr(package, "try_bug", try_bug)
    return digests


@pytest.mark.parametrize("width", [1, 2, 40])
async def test_two_changes_that_write_the_same_program_are_one_task(kit, tmp_path, tried, width):
    """``if word`` is both an ``if not word`` without its ``not`` and one turned round."""
    tree = Tree(files={path: text.encode() for path, text in kit.FILES.items()})
    candidates = find_candidates(tree, ["wordy/__init__.py"], operators=OPERATORS, seed="", executed=None)
    different = {bug.digest for each in candidates if (bug := make_bug(tree, each)) is not None}
    assert len(different) == len(candidates) - 1

    archive = kit.sdist(tmp_path, kit.FILES)
    for _ in range(2):
        with open_journal(tmp_path / "work") as journal:
            report = await package.make_package(
                None, journal, ALL, Order(what=str(archive)), archive, file_sha256(archive), width=width, tell=str
            )  # type: ignore[arg-type]
            ids = [row["instance_id"] for row in journal.rows()]
        assert (report.refused, report.kept, report.tried) == ("", len(ids), len(different))
        assert len(set(ids)) == len(ids) == len(different)
        assert sorted(tried) == sorted(different)


async def test_a_package_that_is_named_in_two_ways_is_made_once(kit, tmp_path, tried):
    """As a file and from the index, at the same time; the second says why it gave nothing."""
    archive = kit.sdist(tmp_path, kit.FILES)
    copy = tmp_path / "index" / archive.name
    copy.parent.mkdir()
    shutil.copy(archive, copy)
    shop, output = FakeWorkshop(tmp_path, {"wordy": copy, "wordy==1.0": copy}), tmp_path / "tasks.jsonl"
    orders = [Order(what=what) for what in (str(archive), "wordy", "wordy==1.0")]
    with open_journal(tmp_path / "work") as journal:
        reports = await make_all(shop, journal, Settings(jobs=3), orders, output)
    assert sum(each.kept for each in reports) == len(read_tasks(output)) == len(tried) >= 3
    assert sorted("is made once" in each.refused for each in reports) == [False, True, True]


async def test_packages_that_end_at_once_write_one_file(kit, tmp_path, tried, monkeypatch):
    """The last list that is written is the longest, however slowly one before it is written."""
    archives = [kit.sdist(tmp_path, kit.FILES, name=name) for name in ("alpha", "beta", "gamma")]
    writes, most = [], []

    def slow(path, rows):
        writes.append(len(rows))
        most.append(len(writes))
        time.sleep(0.02 if len(rows) < 6 else 0)
        write_tasks(path, rows)
        writes.pop()

    monkeypatch.setattr(plant, "write_tasks", slow)
    output = tmp_path / "tasks.jsonl"
    with open_journal(tmp_path / "work") as journal:
        orders = [Order(what=str(each), wishes=Wishes(code=("wordy",))) for each in archives]
        reports = await make_all(FakeWorkshop(tmp_path), journal, Settings(jobs=3, per_package=2), orders, output)
    assert [each.refused for each in reports] == ["", "", ""]
    assert max(most) == 1
    assert len(read_tasks(output)) == sum(each.kept for each in reports) == 6
