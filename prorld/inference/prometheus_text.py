"""Reads single figures out of an engine's Prometheus page. Pure, and deaf to everything it does not look for."""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["metric_values"]

VALUE_MAX = 1e18


def metric_values(page: str, names: Iterable[str]) -> dict[str, list[float]]:
    """The values of each named metric over all its label sets, in the order of the page."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for line in page.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in found:
            value = _number(line.rpartition("}")[2] if "{" in line else line[len(name) :])
            if value is not None:
                found[name].append(value)
    return found


def _number(text: str) -> float | None:
    words = text.split()
    if not words:
        return None
    try:
        value = float(words[0])
    except ValueError:
        return None
    # What is beyond this is no count of anything, and several of them would not add up to a number.
    return value if math.isfinite(value) and abs(value) <= VALUE_MAX else None
