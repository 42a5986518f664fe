"""Figures of an attempt that are no reward: their names, their number and what counts as one."""

from __future__ import annotations

import math
import re
from typing import Final

from prorld.errors import HandlerError

__all__ = ["METRICS_MAX", "put_measure"]

METRICS_MAX: Final = 64
CHARS_MAX: Final = 64
_NAME: Final = re.compile(r"[a-z][a-z0-9_.:-]{0,63}")


def put_measure(metrics: dict[str, float], name: str, value: float) -> None:
    """Put a figure among those of an attempt; the same name again stands for the last. Raises ``HandlerError``."""
    if _NAME.fullmatch(str(name)) is None:
        raise HandlerError(f"{str(name)[:CHARS_MAX]!a} can't be the name of a metric", code="bad_metric")
    try:
        figure = float(value)
    except (TypeError, ValueError, OverflowError):
        figure = math.nan
    if not math.isfinite(figure):
        raise HandlerError(f"the metric {name} is not a finite number", code="bad_metric")
    if name not in metrics and len(metrics) >= METRICS_MAX:
        raise HandlerError(f"an attempt has at most {METRICS_MAX} metrics", code="bad_metric")
    metrics[name] = figure
