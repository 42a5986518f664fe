"""docs/metrics.md holds what ``GET /metrics`` gives: names, types, labels and meanings, no more and no less."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase

from prorld.metrics import NAMES, EngineSeries, Metrics

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def rows() -> list[tuple[str, str, tuple[str, ...], str]]:
    """The table of our own metrics."""
    found = re.findall(r"^\| `(prorld_[a-z_]+)` \| ([a-z]+) \| (.*?) ?\| (.*) \|$", PAGE, re.MULTILINE)
    return [(name, kind, tuple(re.findall(r"`([a-z]+)`", labels)), meaning) for name, kind, labels, meaning in found]


def test_the_page_is_what_is_counted() -> None:
    """Every metric has its row, in the order of the code, and there is no other row."""
    registry = Metrics()._registry
    counted: dict[str, tuple[str, tuple[str, ...]]] = {}
    for collector in registry._collector_to_names:
        if isinstance(collector, MetricWrapperBase):
            suffix = "_total" if collector._type == "counter" else ""
            counted[collector._name + suffix] = (str(collector._type), tuple(collector._labelnames))
        elif isinstance(collector, EngineSeries):
            for family in collector.collect():
                suffix = "_total" if family.type == "counter" else ""
                counted[family.name + suffix] = (family.type, tuple(family._labelnames))
    assert set(counted) == set(NAMES)
    assert rows() == [(name, *counted[name], meaning) for name, meaning in NAMES.items()]


def test_what_the_page_asks_prometheus_exists() -> None:
    """Every name in an example is one that is given."""
    examples = "".join(re.findall(r"```promql\n(.*?)```", PAGE, re.DOTALL))
    named = {re.sub(r"_(bucket|count|sum)$", "", name) for name in re.findall(r"\bprorld_[a-z_]+", examples)}
    assert len(named) >= 5
    assert named <= set(NAMES)
