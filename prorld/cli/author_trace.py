"""Where an exception came from, for the author of a plugin: their frames whole, those of prorld and trio counted."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path

import prorld
from prorld.cli.output import clean

FRAMES_MAX = 40
CHAIN_MAX = 8


def author_lines(error: BaseException) -> Iterator[str]:
    """The traceback of an exception and of what caused it, the cause first."""
    for n, link in enumerate(_chain(error)):
        if n:
            yield "which led to:"
        yield from _one(link)


def _chain(error: BaseException) -> list[BaseException]:
    """From the first cause to what came out; a group stands for its first exception."""
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and len(links) < CHAIN_MAX:
        if isinstance(link, BaseExceptionGroup):
            link = link.exceptions[0]
            continue
        links.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return links[::-1]


def _one(error: BaseException) -> Iterator[str]:
    frames = traceback.extract_tb(error.__traceback__)
    hidden = 0
    for frame in frames[-FRAMES_MAX:]:
        if _is_ours(frame.filename):
            hidden += 1
            continue
        if hidden:
            yield _hidden(hidden)
            hidden = 0
        yield f'  File "{clean(frame.filename)}", line {frame.lineno}, in {clean(frame.name)}'
        if frame.line:
            yield f"    {clean(frame.line)}"
    if hidden:
        yield _hidden(hidden)
    for line in "".join(traceback.format_exception_only(error)).splitlines():
        yield clean(line)


def _hidden(count: int) -> str:
    return f"  ... {count} frame{'' if count == 1 else 's'} of prorld"


def _is_ours(filename: str) -> bool:
    path = Path(filename)
    own = Path(prorld.__file__).parent
    return path.is_relative_to(own) or {"trio", "outcome"} & set(path.parts[-4:-1]) != set()
