"""What the kernel says of a process, the handler of the bench, and requests that are wrong on purpose."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prorld.bench.handler import BenchHandler
from prorld.bench.holds import malformed_requests
from prorld.bench.procfs import usage
from prorld.handlers.registry import discover
from prorld.testing.fake_sandbox import FakeRuntime
from prorld.testing.jobs import run_handler


def test_usage_grows_with_what_a_process_does():
    """CPU, memory and descriptors of a process are those of that process."""
    before = usage(os.getpid())
    held = bytearray(os.urandom(1 << 20)) * 64
    with Path(os.devnull).open("rb"):
        assert usage(os.getpid()).fds == before.fds + 1
    while usage(os.getpid()).cpu_s == before.cpu_s:
        sum(held[:100_000])
    assert usage(os.getpid()).rss_bytes > before.rss_bytes + (32 << 20)


def test_usage_reads_names_with_brackets(tmp_path):
    """A process may be called anything; its fields begin behind the last bracket."""
    place = tmp_path / "7"
    (place / "fd").mkdir(parents=True)
    ticks = os.sysconf("SC_CLK_TCK")
    (place / "stat").write_text(f"7 (a) b) (c) S {' '.join(['0'] * 10)} {3 * ticks} {ticks} 0 0")
    (place / "statm").write_text("100 10 0")
    found = usage(7, tmp_path)
    assert (found.cpu_s, found.queued_s, found.fds) == (4.0, 0.0, 0)
    assert found.rss_bytes == 10 * os.sysconf("SC_PAGE_SIZE")


def test_a_daemon_has_the_handler_of_the_bench_only_where_it_is_named():
    """It comes without a distribution, and never by itself."""
    assert discover(["bench"]).get("bench").name == "bench"
    assert "bench" not in [entry.name for entry in discover().entries()]


@pytest.mark.parametrize("turns", [1, 3])
async def test_the_handler_takes_so_many_turns_and_times_them(turns):
    """One turn goes the usual way; of several each has its seconds among the parts of the reward."""
    instance = {"prompt": "Go on.", "turns": turns}
    run = await run_handler(BenchHandler(), instance, turns=["yes"] * turns, runtime=FakeRuntime())
    assert run.grade.reward == 1.0
    assert len(run.grade.parts) == (turns if turns > 1 else 0)
    assert all(seconds >= 0 for seconds in run.grade.parts.values())


def test_malformed_requests_repeat_and_differ():
    """The same seed gives the same requests, and many kinds of them."""
    some = malformed_requests(200, "token")
    assert some == malformed_requests(200, "token")
    assert len({data for data, _ in some}) >= 12
