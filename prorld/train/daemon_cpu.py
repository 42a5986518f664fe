"""CPU seconds of the daemon, where it runs on this machine: itself and its warden, and nothing that they started.

Engines, sandboxes and graders' processes are other people's work: they are left out, whoever their parent is.
"""

from __future__ import annotations

import os
from pathlib import Path

from prorld.client.errors import ClientError
from prorld.client.find import parse_address, read_endpoint

__all__ = ["DaemonCpu"]

_WARDEN = b"prorld.sandbox.warden"


class DaemonCpu:
    """What was used since it was asked the last time."""

    def __init__(self, state_dir: Path, address: str, proc: Path = Path("/proc")) -> None:
        self._state_dir, self._address, self._proc = state_dir, address, proc
        self._before: dict[tuple[int, str], float] = self._now() or {}

    def since(self) -> float | None:
        """Seconds; ``None`` where the daemon is not of this state directory, or not of this machine."""
        now = self._now()
        if now is None:
            return None
        used = sum(seconds - self._before.get(process, 0.0) for process, seconds in now.items())
        self._before = now
        return used

    def _now(self) -> dict[tuple[int, str], float] | None:
        try:
            endpoint = read_endpoint(self._state_dir)
            if str(parse_address(endpoint.address)) != self._address:
                return None
            daemon = self._usage(endpoint.pid)
            # Of each thread: a child's parent is the thread that started it.
            lists = [*(self._proc / str(endpoint.pid) / "task").glob("*/children")]
        except (ClientError, OSError):
            return None
        found = dict([daemon])
        for file in lists:
            try:
                for child in map(int, file.read_text().split()):
                    if _WARDEN in (self._proc / str(child) / "cmdline").read_bytes():
                        found.update([self._usage(child)])
            except OSError:
                # The thread or the child ended meanwhile.
                continue
        return found

    def _usage(self, pid: int) -> tuple[tuple[int, str], float]:
        """By pid and start time: another process may get the same number."""
        fields = (self._proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return (pid, fields[19]), ticks / os.sysconf("SC_CLK_TCK")
