"""What adapters are tested on: a real daemon, a scripted engine, and instances of the handler ``calc``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from prorld.testing.scripted_engine.script import Fault, Script, ScriptedPlay
from tests.daemon.support import Started, daemon, scripted_engine

# Whether a rollout of these is right is decided by lot, for each of a group's samples by itself. The wrong one is the
# longer one, or a loss over tokens would be nothing at the first look.
RIGHT_OR_WRONG = Script(turns=["ANSWER: 42", "ANSWER: 4300000"], pick="lot")

needs_calc = pytest.mark.skipif(
    "calc" not in {point.name for point in entry_points(group="prorld.handlers")}, reason="prorld-calc is not installed"
)


def sums(count: int, first: int = 0) -> list[dict[str, object]]:
    """Different questions with the same answer, which half of the scripted turns give."""
    return [{"question": f"What is {n} plus {42 - n}?", "answer": 42} for n in range(first, first + count)]


def talkative(*, broken: str | None = None) -> Script:
    """One says it at once, one uses the calculator first; the engine fails whatever ``broken`` stands in."""
    plays = [
        ScriptedPlay(match="What is 1 plus 41?", turns=["CALC: 1 + 41", "ANSWER: 42"]),
        ScriptedPlay(match="What is 2 plus 40?", turns=["ANSWER: 42"]),
    ]
    faults = [] if broken is None else [Fault(kind="garbage", count=None, session=broken)]
    return Script(pick="play", plays=plays, faults=faults)


@contextmanager
def world(place: Path, script: Script = RIGHT_OR_WRONG, *, settings: str = "") -> Iterator[tuple[Started, str]]:
    """A daemon on a scripted engine, and the engine's address."""
    with scripted_engine(place, script) as engine, daemon(place, engine, settings=settings, talkative=True) as here:
        yield here, engine
