"""The log's outlet: lines in order, writers that never wait, and a loss that is told."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorld.kit.outlet import Outlet, outlet

DEADLINE_S = 30.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe: where to read, where to write."""
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue  # the test closed it


class Reading:
    """Reads a pipe to its end in a thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._found: list[bytes] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while piece := os.read(self._fd, 1 << 16):
            self._found.append(piece)

    def lines(self) -> list[str]:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        return b"".join(self._found).decode().splitlines()


def test_lines_come_out_in_order_and_the_last_ones_too(pipe: tuple[int, int]) -> None:
    """More than a pipe holds, from several threads; the descriptor stays open."""
    reading = Reading(pipe[0])
    with outlet(pipe[1]) as out:
        threads = [threading.Thread(target=lambda n=n: [out.write(f"{n} {i}\n") for i in range(5000)]) for n in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
    os.close(pipe[1])
    found = reading.lines()
    assert [line for line in found if line.startswith("0 ")] == [f"0 {i}" for i in range(5000)]
    assert [line for line in found if line.startswith("1 ")] == [f"1 {i}" for i in range(5000)]


def test_a_reader_that_stalls_keeps_nobody_and_is_told_what_it_missed(pipe: tuple[int, int]) -> None:
    """Nobody reads while a hundred times the bound is written. What is kept is bounded, and each gap is counted."""
    out = Outlet(pipe[1], bytes_max=200_000)
    written = 20_000
    for n in range(written):
        out.write(f"{n:0999}\n")
    assert out.lost > 0
    reading = Reading(pipe[0])
    while out.lost:
        # As soon as there is room again the gap is told, and then the line.
        written += 1
        out.write("after\n")
    out.close(DEADLINE_S)
    os.close(pipe[1])
    found = reading.lines()
    gaps = [json.loads(text) for text in found if "log.lost" in text]
    kept = [text for text in found if "log.lost" not in text]
    assert sum(told["lines"] for told in gaps) + len(kept) == written
    # What there was room for, in the pipe as well.
    assert len(kept) < 1000
    assert found[-1] == "after"
    assert kept[:-1] == sorted(kept[:-1])
    assert {told["level"] for told in gaps} == {"error"}


def test_an_end_with_a_stalled_reader_is_bounded(pipe: tuple[int, int]) -> None:
    """Nobody reads to the last: closing returns all the same."""
    out = Outlet(pipe[1])
    out.write("x" * 1_000_000 + "\n")
    out.close(0.05)
    out.write("too late\n")
    assert out.lost == 1


def test_a_reader_that_is_gone_costs_lines_alone(pipe: tuple[int, int]) -> None:
    """A broken pipe raises nothing where somebody logs."""
    os.close(pipe[0])
    with outlet(pipe[1]) as out:
        for _ in range(1000):
            out.write("line\n")
    assert out.lost > 0


def test_a_descriptor_that_does_not_block_loses_nothing(pipe: tuple[int, int]) -> None:
    """Whoever shares it may have made it so."""
    os.set_blocking(pipe[1], False)
    with outlet(pipe[1]) as out:
        out.write("x" * 500_000 + "\n")
        reading = Reading(pipe[0])
        out.close(DEADLINE_S)
    os.close(pipe[1])
    assert [len(line) for line in reading.lines()] == [500_000]


def test_odd_texts_are_written_as_they_can_be(tmp_path: Path) -> None:
    """A lone surrogate is no reason to lose a line."""
    with (tmp_path / "log").open("wb") as file, outlet(file.fileno()) as out:
        assert not out.isatty()
        out.write("a\ud800ä\n")
    assert (tmp_path / "log").read_text("utf-8") == "a\\ud800ä\n"
