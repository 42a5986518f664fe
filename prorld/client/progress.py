"""How far a batch is, in one line on stderr: for a person at a terminal, or whoever asks for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from prorld.client.caller import LONG_POLL_S
from prorld.wire.batches import BatchRecord

__all__ = ["Progress", "progress_of"]

# How often the line changes on a terminal, and how often there is another one where it can't.
LIVE_S = 2.0
PLAIN_S = 10.0
WIDTH = 79

_CLEAR = "\r\x1b[K"


class Progress:
    """A line that is drawn again; without a stream, nothing."""

    def __init__(self, batch_id: str, stream: TextIO | None) -> None:
        self._name = "".join(char if char.isprintable() else "?" for char in batch_id)
        self._stream = stream
        self._is_live = stream is not None and stream.isatty()
        self._began = time.monotonic()
        self._due = self._began
        self._is_shown = False

    @property
    def is_due(self) -> bool:
        """Whether it is time for another line."""
        return self._stream is not None and time.monotonic() >= self._due

    @property
    def look_s(self) -> float:
        """How long nothing may come before another look."""
        if self._stream is None:
            return LONG_POLL_S
        return LIVE_S if self._is_live else PLAIN_S

    def show(self, record: BatchRecord) -> None:
        """What is known of the batch now."""
        if self._stream is None:
            return
        seconds = time.monotonic() - self._began
        text = f"{self._name}: {_words(record)}, {int(seconds // 60)}:{int(seconds % 60):02d}"
        self._write(_CLEAR + text[:WIDTH] if self._is_live else text + "\n")
        self._is_shown = self._is_live
        self._due = time.monotonic() + self.look_s

    def clear(self) -> None:
        """Make room for what the caller may print."""
        if self._is_shown:
            self._write(_CLEAR)
            self._is_shown = False

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            # A terminal that was closed is no reason to stop training.
            self._stream = None


@contextmanager
def progress_of(batch_id: str, *, wanted: bool | None) -> Iterator[Progress]:
    """A line for as long as this is open. ``None``: where stderr is a terminal."""
    stream = sys.stderr if wanted or (wanted is None and sys.stderr is not None and sys.stderr.isatty()) else None
    progress = Progress(batch_id, stream)
    try:
        yield progress
    finally:
        progress.clear()


def _words(record: BatchRecord) -> str:
    counts = record.groups
    target = "" if record.target_groups is None else f" of {record.target_groups}"
    words = [f"{counts.informative}{target} groups", f"{counts.running} running"]
    words += [f"{counts.uninformative} filtered"] if counts.uninformative else []
    words += [f"{counts.failed} failed"] if counts.failed else []
    return ", ".join(words)
