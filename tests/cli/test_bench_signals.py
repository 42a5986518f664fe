"""A bench that is told to end takes what it started along."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import pytest

from prorld.cli import bench
from prorld.kit.process import run_group

MINUTE = 60


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_what_was_started_first(number, tmp_path):
    """The child has put its pid down; nobody has it when the bench is over."""
    file = tmp_path / "pid"
    lines = ["import os, pathlib, time", f"pathlib.Path({str(file)!r}).write_text(str(os.getpid()))"]
    # The parent is told once there is something to end.
    lines += [f"os.kill({os.getpid()}, {int(number)})", f"time.sleep({MINUTE})"]

    async def measure(_plan: None, _tell: Callable[[str], None]) -> None:
        await run_group([sys.executable, "-c", "\n".join(lines)], env=os.environ)

    with pytest.raises(KeyboardInterrupt):
        bench._measured(measure, None)
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)
