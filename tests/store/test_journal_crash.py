"""Processes that are killed in the midst of commits, and disks that are really full or really fail."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

import pytest

ROOT = Path(__file__).parents[2]
COMMITTER = ["-m", "tests.store.committer"]
ROUNDS = 30
WITHIN_S = 60.0
LIMIT_MAX = 1 << 40

pytestmark = pytest.mark.slow


class Told:
    """What a process said that the journal had told it."""

    def __init__(self) -> None:
        self.accepted: set[int] = set()
        self.ended: set[int] = set()
        self.refused: dict[int, str] = {}

    def hear(self, lines: list[str]) -> None:
        for line in lines:
            match line.split():
                case ["accepted", serial]:
                    self.accepted.add(int(serial))
                case ["ended", serial]:
                    self.ended.add(int(serial))
                case ["refused", serial, why]:
                    self.refused[int(serial)] = why
                case ["ready", _, _]:
                    pass
                case _:
                    # The last line of a process that was killed may be cut off.
                    assert line is lines[-1], line


@contextmanager
def committer(directory: Path, first: int, *, tokens: int = 64, limit: int | None = None) -> Iterator[subprocess.Popen]:
    """The process, ready to commit."""
    process = subprocess.Popen(
        [sys.executable, *COMMITTER, str(directory), str(first), str(tokens)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    watchdog = Timer(WITHIN_S, process.kill)
    watchdog.start()
    try:
        if limit is not None:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, LIMIT_MAX))
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready")
        yield process
    finally:
        watchdog.cancel()
        process.kill()
        process.wait(WITHIN_S)
        if process.stdout is not None:
            process.stdout.close()


def states(path: Path) -> dict[int, str]:
    """The jobs that are in the file, and whether all of each is."""
    db = sqlite3.connect(path)
    try:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        bodies = {serial for (serial,) in db.execute("SELECT serial FROM bodies")}
        found = dict(db.execute("SELECT serial, state FROM jobs"))
        assert {serial for serial, state in found.items() if state == "done"} == bodies
        return found
    finally:
        db.close()


def check(path: Path, told: Told) -> dict[int, str]:
    found = states(path)
    assert told.accepted <= found.keys()
    assert {serial for serial in told.ended if found[serial] != "done"} == set()
    return found


def test_what_a_killed_process_was_told_is_there(tmp_path: Path) -> None:
    """Thirty times over the same file, at random instants."""
    dice, told = random.Random(11), Told()
    for turn in range(ROUNDS):
        with committer(tmp_path, 1 + turn * 1_000_000) as process:
            time.sleep(dice.uniform(0.0, 0.15))
            process.send_signal(signal.SIGKILL)
            assert process.stdout is not None
            told.hear(process.stdout.read().splitlines())
        check(tmp_path / "journal.sqlite", told)
    assert len(told.ended) > ROUNDS * 5


def test_a_disk_that_fails_loses_nothing_and_recovers(tmp_path: Path) -> None:
    """Writes beyond a size fail with an I/O error, until the limit is lifted under the running process."""
    told = Told()
    with committer(tmp_path, 1, tokens=2000, limit=3 << 20) as process:
        said = _read_until(process, "refused", 20)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (LIMIT_MAX, LIMIT_MAX))
        said += _read_until(process, "ended", 200)
        process.send_signal(signal.SIGKILL)
        assert process.stdout is not None
        said += process.stdout.read().splitlines()
    told.hear(said)
    found = check(tmp_path / "journal.sqlite", told)
    assert told.refused
    assert not told.refused.keys() & found.keys()


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare")
def test_a_full_disk_loses_nothing_and_recovers(tmp_path: Path) -> None:
    """A file system of eight megabytes with ballast; when it is full the ballast goes."""
    script = (
        f"mount -t tmpfs -o size=8m none {tmp_path} && head -c 3000000 /dev/zero > {tmp_path}/ballast || exit 77;"
        f" {sys.executable} -m tests.store.committer {tmp_path} 1 2000 & read go; rm {tmp_path}/ballast;"
        f" read end; kill -9 $!; wait; cp {tmp_path}/journal* {tmp_path}/../"
    )
    process = subprocess.Popen(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    watchdog = Timer(WITHIN_S, lambda: os.killpg(process.pid, signal.SIGKILL))
    watchdog.start()
    try:
        if not (first := process.stdout.readline()).startswith("ready"):
            pytest.skip(f"no file system in a namespace of our own: {first}")
        said = _read_until(process, "refused", 20)
        _say(process)
        said += _read_until(process, "ended", 5)
        said += _read_until(process, "refused", 5)
        _say(process)
        said += process.stdout.read().splitlines()
        assert process.wait(WITHIN_S) == 0
    finally:
        watchdog.cancel()
        process.stdin.close()
        process.stdout.close()
        process.kill()
        process.wait(WITHIN_S)
    told = Told()
    told.hear(said)
    found = check(tmp_path.parent / "journal.sqlite", told)
    # Of the last refusals nothing could be taken back before the end, so they may be there; of the first ones none is.
    assert not set(list(told.refused)[:10]) & found.keys()
    assert any("full" in why for why in told.refused.values())


def _say(process: subprocess.Popen) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def _read_until(process: subprocess.Popen, word: str, times: int) -> list[str]:
    """Lines until so many began with a word."""
    lines: list[str] = []
    while sum(line.startswith(word) for line in lines) < times:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"the process has ended: {lines[-5:]}"
        lines.append(line.rstrip("\n"))
    return lines
