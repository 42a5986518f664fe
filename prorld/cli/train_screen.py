"""What a training run shows: a line for each step, on a terminal one that moves and a curve, too; JSON for scripts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from prorld.cli.moving_line import MovingLine
from prorld.cli.output import note, width
from prorld.train.curves import can_draw, draw, plot_lines
from prorld.train.records import EndRecord, EvalRecord, StartRecord, StepRecord

if TYPE_CHECKING:
    from prorld.train.records import Metrics, Record
    from prorld.train.run_config import RunSettings

__all__ = ["Screen", "screen_of"]

PLOT_WIDTH_MAX = 60
PLOT_HEIGHT = 8


@contextmanager
def screen_of(settings: RunSettings, *, as_json: bool) -> Iterator[Screen]:
    """A screen for the length of a block; the line that moves is gone after it."""
    screen = Screen(settings, as_json=as_json)
    try:
        yield screen
    finally:
        screen.clear()


class Screen:
    """Writes what the loop tells it."""

    def __init__(self, settings: RunSettings, *, as_json: bool) -> None:
        self._settings, self._as_json = settings, as_json
        self._is_live = sys.stderr.isatty() and not as_json
        self._line = MovingLine(sys.stderr)
        self._drawn = 0
        self._picture = Path(settings.out) / "curve.png" if can_draw() else None
        if self._picture is None:
            note("no curve.png will be drawn: matplotlib is not installed")

    def say(self, words: str) -> None:
        """What is going on, on the line that moves; a log gets none of it."""
        if self._is_live:
            # What begins right after something else is told, too: a step may last a minute.
            self._line.clear()
            self._line.show(words)

    def warn(self, words: str) -> None:
        """A line that stays, on standard error."""
        if not self._as_json:
            self._rub_out()
        note(words)

    def clear(self) -> None:
        """Leave a clean line."""
        if not self._as_json:
            self._line.clear()

    def show(self, record: Record, metrics: Metrics) -> None:
        """One more record."""
        if self._as_json:
            sys.stdout.write(msgspec.json.encode(record).decode() + "\n")
            sys.stdout.flush()
        elif isinstance(record, EndRecord):
            self._rub_out()
            self._plot(metrics)
            self._drawn = 0
            self._line.stay(words_of(record, self._settings))
        else:
            self._rub_out()
            self._line.stay(words_of(record, self._settings))
            self._plot(metrics)
        if self._picture is not None and not isinstance(record, StartRecord):
            draw(metrics, self._picture, f"{Path(self._settings.out).name}: {Path(self._settings.model).name}")

    def _rub_out(self) -> None:
        """Take the curve away, so that it stays below the lines."""
        self._line.clear()
        if self._drawn:
            sys.stderr.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0

    def _plot(self, metrics: Metrics) -> None:
        if not self._is_live:
            return
        values = [step.reward for step in metrics.steps]
        known = [value for value in values if value is not None]
        if len(known) < 2:
            return
        low, high = min(0.0, *known), max(1.0, *known)
        wide = max(10, min(PLOT_WIDTH_MAX, width() - 12))
        for line in plot_lines(values, width=wide, height=PLOT_HEIGHT, low=low, high=high):
            self._line.stay(line)
            self._drawn += 1


def words_of(record: Record, settings: RunSettings) -> str:
    """A record on one line."""
    match record:
        case StartRecord():
            where = f"goes on after step {record.step}" if record.step else f"begins as version {record.base_version}"
            return f"run {record.run_id} {where}"
        case EvalRecord():
            shown = "-" if record.reward is None else f"{record.reward:.3f}"
            return (
                f"held out after step {record.step}, temperature {record.temperature:g}: reward {shown} "
                f"of {record.samples} rollouts in {record.seconds:.0f} s"
            )
        case EndRecord():
            pace = "" if record.steps_per_hour is None else f", {record.steps_per_hour:.0f} steps an hour"
            return f"{record.why} after {record.step} steps in {record.seconds:.0f} s{pace}"
        case StepRecord():
            return _step_words(record, settings)


def _step_words(record: StepRecord, settings: RunSettings) -> str:
    reward = "-" if record.reward is None else f"{record.reward:.3f}"
    figures = record.figures
    learnt = (
        "" if figures is None else f" loss {figures.loss:+.4f} gap {figures.gap:.4f} norm {figures.gradient_norm:.2f}"
    )
    stale = f" staleness {record.staleness:.1f}" if record.staleness_max else ""
    return (
        f"{record.step:4d}/{settings.steps} reward {reward} groups {record.groups}/{record.groups_seen}{learnt}{stale} "
        f"rollouts {record.rollout_s:.1f} s train {record.train_s:.1f} s "
        f"hand-over {record.hand_over_s + record.update_s:.1f} s"
    )
