"""How far something is, in one line."""

from __future__ import annotations

import time
from typing import TextIO

from prorld.cli.output import clean, width

__all__ = ["MovingLine"]

# How often a line moves on a terminal, and how often a plain one is written where there is none.
REDRAW_S = 0.1
PLAIN_S = 10.0

_CLEAR = "\r\x1b[K"


class MovingLine:
    """One line that moves on a terminal; elsewhere the first one, then one now and then."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._every_s = REDRAW_S if self._live else PLAIN_S
        self._due = float("-inf")
        self._shown = False

    def show(self, line: str) -> None:
        """The newest line; it is left out where the last one was just written."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + self._every_s
        text = clean(line).replace("\n", " ")
        self._write(_CLEAR + text[: width() - 1] if self._live else text + "\n")
        self._shown = self._live

    def stay(self, line: str) -> None:
        """A line that stays."""
        self.clear()
        self._write(clean(line).replace("\n", " ") + "\n")

    def clear(self) -> None:
        """Make room for what comes next."""
        if self._shown:
            self._write(_CLEAR)
            self._shown, self._due = False, float("-inf")

    def close(self) -> None:
        """As ``clear``."""
        self.clear()

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
