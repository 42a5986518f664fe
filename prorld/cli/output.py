"""What commands print: tables, colours, JSON, numbers. Text of models and sandboxes can never steer the terminal."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

# Set by wrappers under which `prorld` is not on the PATH.
PROGRAM_VARIABLE = "PRORLD_PROGRAM"

# Bidirectional overrides reorder a line for its reader; controls may rewrite it or the title bar.
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_SGR = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
    "cyan": "36",
}


def program() -> str:
    """How the caller started the command line; what is printed to be typed begins with it."""
    return clean(os.environ.get(PROGRAM_VARIABLE) or "prorld")


def typed(text: str) -> str:
    """Text with every command in backquotes as the caller has to type it."""
    return re.sub(r"`prorld(?= [a-z])", lambda _: f"`{program()}", text)


def count(n: int, noun: str) -> str:
    """``1 job``, ``2 jobs``."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def clean(text: str) -> str:
    """Untrusted text with everything that would steer a terminal made visible; newlines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(_clean_char(char) for char in text.replace("\r\n", "\n"))


def _clean_char(char: str) -> str:
    if char in "\n\t":
        return char
    code = ord(char)
    if code < 0x20 or 0x7F <= code < 0xA0:
        return f"\\x{code:02x}"
    if char in _BIDI or 0xD800 <= code < 0xE000:
        return f"\\u{code:04x}"
    return char


class Style:
    """Colours where they are wanted: on a terminal, unless NO_COLOR is set."""

    def __init__(self, *, on: bool) -> None:
        self.on = on

    def __call__(self, text: str, *names: str) -> str:
        """The text in these colours."""
        if not self.on or not names or not text:
            return text
        return f"\x1b[{';'.join(_SGR[name] for name in names)}m{text}\x1b[0m"


def style_for(stream: TextIO, environ: Mapping[str, str] | None = None) -> Style:
    """The style for a stream (https://no-color.org)."""
    env = os.environ if environ is None else environ
    return Style(on=stream.isatty() and not env.get("NO_COLOR") and env.get("TERM") != "dumb")


def width() -> int:
    """Columns to write into."""
    return max(40, min(shutil.get_terminal_size((100, 24)).columns, 160))


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[str] = frozenset()) -> list[str]:
    """Aligned lines, the headers first; columns named in ``right`` are numbers. Cells are cleaned."""
    cells = [[clean(cell).replace("\n", " ") for cell in row] for row in rows]
    widths = [max([len(head), *(len(row[i]) for row in cells)]) for i, head in enumerate(headers)]
    lines = []
    for row in ([*headers], *cells):
        padded = [
            cell.rjust(size) if head in right else cell.ljust(size)
            for cell, size, head in zip(row, widths, headers, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def seconds(value: float) -> str:
    """A duration for people."""
    if value < 100:
        return f"{value:.1f} s" if value >= 1 or value == 0 else f"{value * 1000:.0f} ms"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m"


def number(value: float | None) -> str:
    """A reward; ``-`` where there is none."""
    return "-" if value is None else f"{value:.4g}"


def say(*lines: str) -> None:
    """Lines on stdout, at once: what runs on after them may be read by a program that waits for a line."""
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


def note(*lines: str) -> None:
    """Lines on stderr, for a person who watches."""
    for line in lines:
        sys.stderr.write(line + "\n")
    sys.stderr.flush()


def say_json(value: Any, *, pretty: bool = True) -> None:
    """A value as JSON on stdout."""
    import msgspec

    text = msgspec.json.encode(value)
    sys.stdout.write((msgspec.json.format(text, indent=2) if pretty else text).decode() + "\n")
