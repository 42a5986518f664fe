"""The curve of a run: a few lines for a terminal, and a PNG. No display is needed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from prorld.train.records import Metrics, StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["can_draw", "draw", "plot_lines"]

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800


def plot_lines(values: Sequence[float | None], *, width: int, height: int, low: float, high: float) -> list[str]:
    """The values from left to right in dots of braille, with the scale beside them; a gap where there is none."""
    columns, rows = 2 * width, 4 * height
    cells = [[_BLANK] * width for _ in range(height)]
    for column in range(columns):
        # Several steps share a dot where there are more of them than dots.
        first = column * len(values) // columns
        last = max((column + 1) * len(values) // columns, first + 1)
        here = [value for value in values[first:last] if value is not None]
        if not here:
            continue
        share = (sum(here) / len(here) - low) / (high - low)
        row = rows - 1 - round(min(max(share, 0.0), 1.0) * (rows - 1))
        cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
    scale = [f"{high:6.2f}", *("      " for _ in range(height - 2)), f"{low:6.2f}"]
    return [f"{mark} |{''.join(map(chr, line))}" for mark, line in zip(scale, cells, strict=True)]


def can_draw() -> bool:
    """Whether there is something to draw with."""
    return find_spec("matplotlib") is not None


def draw(metrics: Metrics, path: Path, title: str) -> None:
    """Reward, gap and where the time goes, as they are now; whoever looks sees the old picture or the new one."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - of the extra, and a second to import
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415 - as above

    figure = Figure(figsize=(9, 9), layout="constrained")
    reward, gap, seconds = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1.5))
    figure.suptitle(title)
    _rewards(reward, metrics)
    trained = [(step.step, step.figures.gap) for step in metrics.steps if step.figures is not None]
    gap.plot([at for at, _ in trained], [value for _, value in trained], color="tab:red")
    gap.set_ylabel("gap (nats)")
    gap.set_ylim(bottom=0)
    _seconds(seconds, metrics.steps)
    seconds.xaxis.set_major_locator(MaxNLocator(integer=True))
    new = path.with_suffix(".new.png")
    figure.savefig(new, dpi=110)
    new.replace(path)


def _rewards(axes: Axes, metrics: Metrics) -> None:
    seen = [(step.step, step.reward) for step in metrics.steps if step.reward is not None]
    axes.plot([at for at, _ in seen], [value for _, value in seen], marker=".", label="training, all rollouts")
    for temperature in sorted({item.temperature for item in metrics.evaluations}):
        held = [item for item in metrics.evaluations if item.temperature == temperature and item.reward is not None]
        label = f"held out, temperature {temperature:g}"
        axes.plot([item.step for item in held], [item.reward or 0.0 for item in held], marker="o", ls="--", label=label)
    axes.set_ylabel("mean reward")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right")


def _seconds(axes: Axes, steps: Sequence[StepRecord]) -> None:
    at = [step.step for step in steps]
    parts = {
        "rollouts": [step.rollout_s for step in steps],
        "training": [step.train_s for step in steps],
        "checkpoint": [step.checkpoint_s for step in steps],
        "hand-over": [step.hand_over_s + step.update_s for step in steps],
    }
    below = [0.0] * len(at)
    for name, values in parts.items():
        axes.bar(at, values, bottom=below, label=name)
        below = [under + value for under, value in zip(below, values, strict=True)]
    axes.set_ylabel("seconds")
    axes.set_xlabel("step")
    if at:
        axes.legend(loc="upper right")
