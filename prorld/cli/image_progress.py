"""Where making an image stands: one moving line on a terminal, a plain line for each step elsewhere."""

from __future__ import annotations

import time
from typing import TextIO

from prorld.cli.output import clean, seconds, width

__all__ = ["StepLines", "sized"]

_BAR = 24
_REDRAW_S = 0.1
_CLEAR = "\r\x1b[K"


class StepLines:
    """Progress on a stream, standard error as a rule. ``advance`` may come from another thread: it only adds up."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._what = ""
        self._said = ""
        self._total: int | None = None
        self._done = 0
        self._began = self._drawn = time.monotonic()

    def step(self, what: str, *, total_bytes: int | None = None) -> None:
        """A new piece of work begins; what came before it is done."""
        self.close()
        self._what, self._said, self._total, self._done = what, "", total_bytes, 0
        self._began = time.monotonic()
        if self._live:
            self._draw()
        else:
            self._write(clean(what) + (f" ({sized(total_bytes)})" if total_bytes else "") + "\n")

    def advance(self, done_bytes: int) -> None:
        """So much more of it is done."""
        self._done += done_bytes
        self._redraw()

    def said(self, line: str) -> None:
        """A line of a program that does the work."""
        self._said = line
        self._redraw()

    def close(self) -> None:
        """The piece of work is over; its line stays with the time that it took."""
        if self._what and self._live:
            took = seconds(time.monotonic() - self._began)
            self._write(f"{_CLEAR}{clean(self._what)} ({took})\n")
        self._what = ""

    def _redraw(self) -> None:
        if self._live and self._what and time.monotonic() >= self._drawn + _REDRAW_S:
            self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if self._total:
            filled = min(_BAR, round(_BAR * self._done / self._total))
            shown = (
                f"[{'█' * filled}{'·' * (_BAR - filled)}] {clean(self._what)} {sized(self._done)}/{sized(self._total)}"
            )
        else:
            shown = f"{clean(self._what)}{f': {clean(self._said)}' if self._said else ' ...'}"
        self._write(_CLEAR + shown.replace("\n", " ")[: width() - 1])

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def sized(count: int) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
