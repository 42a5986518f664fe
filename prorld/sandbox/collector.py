"""Finds where a command's output starts and ends in a stream of bytes, and keeps a bounded part of it.

A session frames each exchange with a nonce: ``NUL nonce '<' NUL`` before the output, ``NUL nonce ' ' STATUS NUL`` after
it. What comes before the first mark is late output of earlier commands and is dropped. Each byte is looked at once.
"""

from __future__ import annotations

import re

import msgspec

from prorld.kit.output import BoundedOutput

__all__ = ["Collector", "EndOfCommand"]

_STATUS_BYTES_MAX = 1 << 14
_STATUS = re.compile(rb"(\d{1,3}) (.*)", re.DOTALL)


class EndOfCommand(msgspec.Struct, frozen=True, kw_only=True):
    """What the end mark says."""

    exit_code: int
    cwd: bytes


class Collector:
    """One exchange. Feed it until it hands back the end."""

    def __init__(self, nonce: bytes, output_bytes: int) -> None:
        self._start = b"\0" + nonce + b"<\0"
        self._end = b"\0" + nonce + b" "
        self._started = False
        self._status: bytearray | None = None
        self._held = b""
        self._output = BoundedOutput(output_bytes)
        self.bytes_seen = 0

    def feed(self, data: bytes) -> EndOfCommand | None:
        """Take what arrived. Bytes after the end mark are dropped."""
        self.bytes_seen += len(data)
        if self._status is None:
            data = self._feed_output(self._held + data)
        return None if self._status is None else self._feed_status(data)

    def _feed_output(self, data: bytes) -> bytes:
        """Sort what came before the end mark; returns what came after it."""
        if not self._started:
            before, mark, after = data.partition(self._start)
            if not mark:
                self._held = before[-(len(self._start) - 1) :]
                return b""
            self._started, data = True, after
        before, mark, after = data.partition(self._end)
        if mark:
            self._output.feed(before)
            self._held, self._status = b"", bytearray()
            return after
        # The beginning of a mark may be at the end of this piece; held back, it is never output by mistake.
        keep = len(before) - (len(self._end) - 1)
        cut = before.find(b"\0", max(0, keep))
        cut = len(before) if cut < 0 else cut
        self._output.feed(before[:cut])
        self._held = before[cut:]
        return b""

    def _feed_status(self, data: bytes) -> EndOfCommand | None:
        assert self._status is not None
        before, mark, _ = data.partition(b"\0")
        self._status += before[: _STATUS_BYTES_MAX - len(self._status)]
        if not mark:
            return None
        said = _STATUS.fullmatch(bytes(self._status))
        # Only something inside that knows the nonce can say anything else; it gets what it asked for.
        return (
            EndOfCommand(exit_code=255, cwd=b"") if said is None else EndOfCommand(exit_code=int(said[1]), cwd=said[2])
        )

    @property
    def started(self) -> bool:
        """Whether the start mark has come."""
        return self._started

    @property
    def output(self) -> bytes:
        """The output so far, bounded."""
        return self._output.value()

    @property
    def omitted_bytes(self) -> int:
        """How much of it was dropped."""
        return self._output.omitted_bytes
