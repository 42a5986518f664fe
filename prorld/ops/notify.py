"""What the service manager hears from the daemon: systemd's notification protocol, over one datagram socket.

Without a manager every verb does nothing. It never decides what is said, and a manager that does not listen stops
nobody. What a manager told this process through the environment is taken out of it, so that no child inherits it.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress

import structlog
import trio
from structlog.typing import FilteringBoundLogger

__all__ = ["VARIABLES", "Notifier"]

log: FilteringBoundLogger = structlog.get_logger("prorld.ops")

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
# A manager reads its socket at once; one that does not is too busy to care.
SEND_S = 1.0
STATUS_CHARACTERS_MAX = 200


class Notifier:
    """The way to the service manager of this process, where there is one."""

    def __init__(self, address: str | None = None, *, watchdog_s: float | None = None) -> None:
        self._address = address
        self._is_lost = False
        self.watchdog_s = watchdog_s

    @classmethod
    def from_environment(cls, env: MutableMapping[str, str]) -> Notifier:
        """Read what the manager told, and take it out of ``env``."""
        told = {name: value for name in VARIABLES if (value := env.pop(name, None))}
        return cls(told.get("NOTIFY_SOCKET"), watchdog_s=_watchdog_s(told))

    @property
    def is_heard(self) -> bool:
        """Whether there is a manager."""
        return self._address is not None

    async def ready(self, status: str) -> None:
        """Started, or done with a reload."""
        await self._send("READY=1", _status(status))

    async def reloading(self) -> None:
        """A reload begins; ``ready`` ends it."""
        await self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    async def stopping(self, status: str) -> None:
        """The end has begun."""
        await self._send("STOPPING=1", _status(status))

    async def beat(self, status: str, *, alive: bool, extend_s: float | None = None) -> None:
        """What the daemon does now; ``alive`` feeds the watchdog, ``extend_s`` asks for so much more time to stop."""
        lines = [_status(status)]
        if alive and self.watchdog_s is not None:
            lines.append("WATCHDOG=1")
        if extend_s is not None:
            lines.append(f"EXTEND_TIMEOUT_USEC={math.ceil(extend_s * 1e6)}")
        await self._send(*lines)

    async def _send(self, *lines: str) -> None:
        if self._address is None:
            return
        # The protocol's sign for an abstract address is @, the kernel's is a zero byte.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        sent = False
        with suppress(OSError), trio.move_on_after(SEND_S), trio.socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            await to.sendto("\n".join(lines).encode(), address)
            sent = True
        if not sent and not self._is_lost:
            log.warning("manager.lost", address=self._address)
        self._is_lost = not sent


def _watchdog_s(told: Mapping[str, str]) -> float | None:
    pid, period = told.get("WATCHDOG_PID", ""), told.get("WATCHDOG_USEC", "")
    if not period.isdecimal() or int(period) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(period) / 1e6


def _status(text: str) -> str:
    return f"STATUS={' '.join(text.split())[:STATUS_CHARACTERS_MAX]}"
