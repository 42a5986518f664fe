"""The whole of it in real sandboxes: a package made into tasks, killed and gone on with; packages that do harm."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trio

from prorld.errors import BadRequest, Conflict, SandboxError
from prorld_swe import command
from prorld_swe.factory.plant import read_tasks
from prorld_swe.factory.tree import file_sha256

pytestmark = pytest.mark.slow

QUICK = ("--times", "2", "--load", "1", "--limit-s", "40")


def _args(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    command.add_arguments(parser)
    return parser.parse_args(words)


async def _make(kit, place: Path, *words: str) -> tuple[int, dict, list[dict]]:
    shop = kit.Shop(place)
    output = place / "tasks.jsonl"
    code = await command.run(_args("make", *words, "-o", str(output), "--json", *QUICK), shop)
    return code, json.loads(shop.said[-1]), read_tasks(output)


async def test_a_package_becomes_tasks_and_the_same_command_makes_no_other(kit, tmp_path):
    """With real lists of tests; the gold patch gives the package back; a second run has nothing left to do."""
    path = kit.sdist(tmp_path, kit.FILES)
    code, summary, rows = await _make(kit, tmp_path, str(path), "--per-package", "3", "--jobs", "2", "--seed", "3")
    assert (code, summary["kept"], summary["tasks"]) == (0, len(rows), len(rows))
    # Bugs are tried in pairs here, and both of the last pair may be good.
    assert len(rows) in (3, 4)
    for row in rows:
        assert row["sdist"] == {
            "package": "wordy", "version": "1.0", "filename": "wordy-1.0.tar.gz", "sha256": file_sha256(path),
        }  # fmt: skip
        assert 1 <= len(row["FAIL_TO_PASS"]) <= 3
        assert len(row["FAIL_TO_PASS"]) + len(row["PASS_TO_PASS"]) == 10
        assert row["hidden_files"] == row["test_files"] == ["tests/test_wordy.py"]
        repository = tmp_path / row["instance_id"]
        (repository / "wordy").mkdir(parents=True)
        (repository / "wordy/__init__.py").write_text(kit.CODE)
        for patch in (row["bug_patch"], row["patch"]):
            assert (repository / "wordy/__init__.py").read_text() == kit.CODE or patch == row["patch"]
            await trio.run_process(["git", "apply", "-"], cwd=repository, stdin=patch.encode())
        assert (repository / "wordy/__init__.py").read_text() == kit.CODE
    before = (tmp_path / "tasks.jsonl.work/journal.jsonl").read_bytes()
    _, again, same = await _make(kit, tmp_path, str(path), "--per-package", "3", "--jobs", "2", "--seed", "3")
    assert same == rows
    assert again["packages"][0]["reused"] == summary["tried"]
    assert (tmp_path / "tasks.jsonl.work/journal.jsonl").read_bytes() == before


@contextmanager
def _started(argv, place):
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=dict(os.environ, PRORLD_PACKAGES=str(place)))
        try:
            yield process
        finally:
            process.kill()
            process.wait(20)


async def test_a_killed_command_goes_on(kit, tmp_path):
    """Nothing is made twice, and what was found out is not asked again."""
    path = kit.sdist(tmp_path, kit.FILES)
    output, journal = tmp_path / "tasks.jsonl", tmp_path / "tasks.jsonl.work/journal.jsonl"
    argv = [sys.executable, "-m", "prorld.cli", "swe", "make", str(path), "-o", str(output), *QUICK]
    argv += ["--per-package", "3", "--seed", "3", "--state-dir", str(tmp_path / "state")]
    with _started(argv, tmp_path) as process:
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and process.poll() is None:
            if journal.exists() and b'"kind":"trial"' in journal.read_bytes():
                break
            await trio.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        assert process.wait(20) == -signal.SIGKILL, (tmp_path / "log").read_text()
    left = journal.read_bytes()
    journal.write_bytes(left + b'{"kind":"trial","pack')
    _, summary, rows = await _make(kit, tmp_path, str(path), "--per-package", "3", "--seed", "3")
    assert journal.read_bytes().startswith(left)
    assert summary["packages"][0]["reused"] == left.count(b'"kind":"trial"') >= 1
    digests = [json.loads(line)["digest"] for line in journal.read_bytes().splitlines() if b'"kind":"trial"' in line]
    assert len(digests) == len(set(digests)) == summary["tried"]
    assert len({row["bug_patch"] for row in rows}) == len(rows) == 3


async def test_tests_that_waver_are_not_relied_on(kit, tmp_path):
    """Those that fail now and then, that need another before them, and that take long."""
    wavering = kit.TESTS + (
        "\n\nimport os, time\nSEEN = []\n\n\n"
        "def test_first():\n    SEEN.append(1)\n\n\ndef test_needs_first():\n    assert SEEN\n"
        "\n\ndef test_now_and_then():\n    assert os.urandom(1)[0] < 128 or SEEN == 2\n\n\n"
        "def test_slow():\n    time.sleep(1.2)\n"
    )
    path = kit.sdist(tmp_path, {**kit.FILES, "tests/test_wordy.py": wavering})
    _, summary, rows = await _make(
        kit,
        tmp_path,
        str(path),
        "--per-package",
        "1",
        "--slow-s",
        "1",
        "--times",
        # One that wavers passes, or fails, in all of so many runs once in thousands of tries.
        "14",
        "--operators",
        "compare,constant",
    )
    assert summary["packages"][0]["flaky"] >= 1
    for row in rows:
        named = {test.rpartition("::")[2] for test in (*row["FAIL_TO_PASS"], *row["PASS_TO_PASS"])}
        assert not named & {"test_needs_first", "test_now_and_then", "test_slow"}
        assert "tests/test_wordy.py::test_slow" in row["pytest_args"]


HARM = {
    "endless": ("import time\n\n\ndef test_a():\n    while True:\n        time.sleep(1)\n", "do not end in time"),
    "loud": (
        "def test_a(capsys):\n    with capsys.disabled():\n        print('x' * (4 << 20))\n",
        "import none of wordy",
    ),
    "dead": ("import os\n\n\ndef test_a():\n    os._exit(0)\n", "can't be run"),
    "deaf": ("import os, signal\n\n\ndef test_a():\n    os.kill(os.getpid(), signal.SIGKILL)\n", "can't be run"),
    "greedy": ("def test_a():\n    x = [bytearray(1 << 28) for _ in range(64)]\n", ""),
    "foreign": ("import json\n\n\ndef test_a():\n    assert json.dumps(1) == '1'\n", "import none of wordy"),
    "none": ("x = 1\n", "can't be run"),
}


@pytest.mark.parametrize("harm", HARM)
async def test_a_package_that_does_harm_is_refused(kit, tmp_path, harm):
    """In time, with the reason, and without harm to the package beside it."""
    tests, why = HARM[harm]
    path = kit.sdist(tmp_path, {**kit.FILES, "tests/test_wordy.py": tests}, name=harm)
    code, summary, rows = await _make(kit, tmp_path, str(path), "--code", "wordy", "--limit-s", "8")
    assert (code, rows) == (1, [])
    assert why in summary["packages"][0]["refused"]


async def test_nothing_of_a_package_runs_on_this_host(kit, tmp_path):
    """Neither what builds it, nor its tests."""
    mark = tmp_path / "mark"
    harm = f"open({str(mark)!r}, 'w').write('x')\n"
    files = {**kit.FILES, "setup.py": harm, "conftest.py": f"try:\n    {harm}except OSError:\n    pass\n"}
    _, summary, _ = await _make(
        kit, tmp_path, str(kit.sdist(tmp_path, files)), "--per-package", "1", "--operators", "compare"
    )
    assert summary["packages"][0]["tests"] == 10
    assert not mark.exists()


async def test_a_package_that_is_imported_from_elsewhere_is_refused(kit, tmp_path):
    """It would be another one's bugs that tests find."""
    tests = "import msgspec\n\n\ndef test_a():\n    assert msgspec.json.encode(1) == b'1'\n"
    files = {
        "msgspec.py": "def f():\n    pass\n",
        "tests/test_a.py": f"import sys\nsys.path[:] = [each for each in sys.path if 'testbed' not in each]\n{tests}",
    }
    path = kit.sdist(tmp_path, files, name="msgspec")
    code, summary, _ = await _make(kit, tmp_path, str(path))
    assert (code, "and not from the tree" in summary["packages"][0]["refused"]) == (1, True)


async def test_one_bad_package_does_not_stop_the_others(kit, tmp_path):
    """Its line says what is wrong."""
    bad = tmp_path / "bad-1.0.tar.gz"
    bad.write_bytes(b"no archive")
    good = kit.sdist(tmp_path, kit.FILES)
    code, summary, rows = await _make(kit, tmp_path, str(bad), "absent==1", str(good), "--per-package", "1")
    reports = {each["name"]: each for each in summary["packages"]}
    assert (code, len(rows), reports["wordy"]["kept"]) == (0, 1, 1)
    assert "can't be read" in reports["bad"]["refused"]
    assert "no package absent==1" in reports["absent==1"]["refused"]


class _Scarce:
    """A runtime that has only so many sandboxes in it."""

    def __init__(self, inner, left):
        self._inner = inner
        self._left = left

    async def run(self, spec, *, sandbox_id, job_id, task_status):
        self._left -= 1
        if self._left < 0:
            raise SandboxError("there are no more", retryable=False)
        await self._inner.run(spec, sandbox_id=sandbox_id, job_id=job_id, task_status=task_status)


@pytest.mark.parametrize("left", [0, 6])
async def test_sandboxes_that_can_not_be_had_are_told_and_the_work_is_kept(kit, tmp_path, left):
    """Before the first run, or while bugs are tried; then the same command goes on."""
    path, output = kit.sdist(tmp_path, kit.FILES), tmp_path / "tasks.jsonl"
    shop = kit.Shop(tmp_path)
    real = shop.runtime

    @asynccontextmanager
    async def scarce():
        async with real() as runtime:
            yield _Scarce(runtime, left)

    shop.runtime = scarce
    words = ("make", str(path), "-o", str(output), "--json", *QUICK, "--jobs", "2", "--per-package", "2")
    assert await command.run(_args(*words), shop) == 1
    report = json.loads(shop.said[-1])["packages"][0]
    assert "there are no more" in report["refused"]
    kept = (tmp_path / "tasks.jsonl.work/journal.jsonl").read_bytes()
    assert (b'"kind":"baseline"' in kept) == (left == 6)


async def test_tasks_of_another_journal_are_not_written_over(kit, tmp_path):
    """They may be all that is left of it."""
    output = tmp_path / "tasks.jsonl"
    output.write_text('{"instance_id": "other"}\n')
    with pytest.raises(Conflict, match="1 tasks"):
        await command.run(_args("make", "a", "-o", str(output)), kit.Shop(tmp_path))
    assert output.read_text() == '{"instance_id": "other"}\n'


@pytest.mark.parametrize(
    "words",
    [
        ("make", "a"), ("make", "-o", "x"), ("make", "a>1", "-o", "x"), ("make", "a", "-o", "x", "--operators", "no"),
        ("make", "a", "-o", "x", "--tests", "/etc"), ("make", "a", "-o", "x", "--combined", "2"), ("fetch",),
        ("make", "--from", "/nonexistent", "-o", "x"), ("stats", "/nonexistent"),
    ],
)  # fmt: skip
async def test_a_command_that_makes_no_sense_is_refused(kit, tmp_path, words):
    """Before anything is written."""
    with pytest.raises(BadRequest):
        await command.run(_args(*words), kit.Shop(tmp_path))


async def test_fetch_asks_for_each_package_by_hash_and_stats_count(kit, tmp_path):
    """Each once; what is not there is told, and the others are brought."""
    path = tmp_path / "tasks.jsonl"
    rows = [
        {"instance_id": name, "repo": "pypi/a", "sdist": {"package": name[0], "version": "1", "sha256": name[0] * 64},
         "difficulty": {"operator": "flag", "f2p": at + 1, "hint": "module"}}
        for at, name in enumerate(("a1", "a2", "b1"))
    ]  # fmt: skip
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    shop = kit.Shop(tmp_path, {"a==1": path})
    assert await command.run(_args("fetch", str(path)), shop) == 1
    assert shop.asked == [("a==1", "a" * 64), ("b==1", "b" * 64)]
    assert shop.said == ["1 of 2 packages are there"]
    assert "b==1" in shop.warned[0]
    assert await command.run(_args("fetch", "a==1"), shop) == 0
    assert shop.asked[-1] == ("a==1", None)
    assert await command.run(_args("stats", str(path), "--json"), shop) == 0
    stats = json.loads(shop.said[-1])
    assert (stats["tasks"], stats["operators"], stats["f2p"]["most"]) == (3, {"flag": 3}, 3.0)
    assert await command.run(_args("stats", str(path)), shop) == 0
    assert "3 tasks of 1 packages" in shop.said
