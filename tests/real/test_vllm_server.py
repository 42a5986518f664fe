"""Nothing of a server stays behind: not after its block, not after its own end, not after ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.real.vllm_server import guarded, has_group

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WITHIN_S = 20.0
STUBBORN = "trap '' TERM; sleep 1000 & sleep 1000"
HOLDER = f"""
import os, sys, time
from tests.real.vllm_server import guarded
with guarded(["sh", "-c", {STUBBORN!r}], dict(os.environ), 2) as process:
    print(process.pid, flush=True)
    time.sleep(1000)
"""


def gone(pid: int) -> bool:
    """Whether the group goes within the bound."""
    until = time.monotonic() + WITHIN_S
    while has_group(pid) and time.monotonic() < until:
        time.sleep(0.01)
    return not has_group(pid)


def test_the_group_goes_with_the_block() -> None:
    """Leaving the block ends the server and what it started, though they ask for no more than a signal."""
    with guarded(["sh", "-c", "sleep 1000 & sleep 1000"], dict(os.environ), 2) as process:
        assert has_group(process.pid)
    assert not has_group(process.pid)


def test_the_group_goes_with_the_server() -> None:
    """A server that ends by itself leaves nothing running, and its end is seen."""
    with guarded(["sh", "-c", "sleep 1000 & exit 3"], dict(os.environ), 2) as process:
        assert process.wait(WITHIN_S) == -signal.SIGKILL
        assert gone(process.pid)


def test_the_group_goes_with_the_tests() -> None:
    """Whoever held the server is killed and could do nothing about it; the server goes all the same."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert holder.stdout is not None
    with holder, holder.stdout:
        pid = int(holder.stdout.readline())
        assert has_group(pid)
        holder.kill()
    assert gone(pid)
