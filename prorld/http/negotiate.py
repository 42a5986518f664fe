"""What a client takes: its ``Accept`` and ``Accept-Encoding`` read as RFC 9110 has them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

__all__ = ["EVENT_STREAM", "JSON", "MSGPACK", "preferred", "takes_zstd"]

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
EVENT_STREAM: Final = "text/event-stream"

# Longer headers come from nobody who negotiates.
_ENTRIES_MAX: Final = 32
_QUALITY = re.compile(r"0(\.\d{0,3})?|1(\.0{0,3})?")


def preferred(accept: str | None, offers: Sequence[str]) -> str:
    """The offer that the client likes best; the first of equals, and the first where it likes none.

    A client that names nothing we have still gets an answer: one that it may not read says more than none.
    """
    if not accept:
        return offers[0]
    entries = list(_entries(accept))
    rated = [(_rating(offer, entries), -place) for place, offer in enumerate(offers)]
    return offers[-max(rated)[1]]


def takes_zstd(accept_encoding: str | None) -> bool:
    """Whether the client names zstd. A ``*`` is no such wish: many send it and can't read zstd."""
    return any(name == "zstd" and quality > 0 for name, quality in _entries(accept_encoding or ""))


def _rating(offer: str, entries: Sequence[tuple[str, float]]) -> float:
    """The quality of the most specific range that an offer is in."""
    kind = offer.partition("/")[0]
    found = dict(reversed(entries))
    for name in (offer, f"{kind}/*", "*/*"):
        if name in found:
            return found[name]
    return 0.0


def _entries(header: str) -> Iterator[tuple[str, float]]:
    for entry in header.split(",", _ENTRIES_MAX)[:_ENTRIES_MAX]:
        name, *parameters = (part.strip().lower() for part in entry.split(";"))
        quality = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip() == "q":
                quality = float(value) if _QUALITY.fullmatch(value.strip()) else 0.0
        if name:
            yield name, quality
