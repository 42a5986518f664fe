"""Captured output with a bound: the first part and the last part are kept, what is between is counted.

It owns bytes and never decodes them.
"""

from __future__ import annotations

__all__ = ["BoundedOutput"]


class BoundedOutput:
    """Takes any number of bytes and keeps at most ``bytes_max``, half of them from the start."""

    def __init__(self, bytes_max: int) -> None:
        assert bytes_max >= 0, bytes_max
        self._head_max = bytes_max // 2
        self._tail_max = bytes_max - self._head_max
        self._head = bytearray()
        self._tail = bytearray()
        self._seen = 0

    def feed(self, data: bytes | bytearray) -> None:
        """Take a piece of output."""
        self._seen += len(data)
        room = self._head_max - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        # Trimmed at twice its size and not at each piece, so that many small pieces don't move the tail many times.
        if len(self._tail) > 2 * self._tail_max:
            self._trim()

    @property
    def omitted_bytes(self) -> int:
        """How many bytes were dropped from the middle."""
        return max(0, self._seen - self._head_max - self._tail_max)

    def value(self) -> bytes:
        """What was kept. Where something is missing, a line in brackets says how much."""
        self._trim()
        if not self.omitted_bytes:
            return bytes(self._head + self._tail)
        return b"%b\n[... %d bytes omitted ...]\n%b" % (bytes(self._head), self.omitted_bytes, bytes(self._tail))

    def _trim(self) -> None:
        del self._tail[: max(0, len(self._tail) - self._tail_max)]
