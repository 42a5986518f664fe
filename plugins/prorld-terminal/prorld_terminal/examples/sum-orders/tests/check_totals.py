"""What has to be true of the totals."""

from __future__ import annotations

import json
from pathlib import Path

TOTALS = Path("/app/totals.json")


def test_totals_are_an_object() -> None:
    """Names and whole numbers."""
    totals = json.loads(TOTALS.read_text())
    assert all(isinstance(name, str) and type(value) is int for name, value in totals.items())


def test_totals_are_right() -> None:
    """Of every customer."""
    assert json.loads(TOTALS.read_text()) == {"north": 4640, "south": 2745, "west": 0}


def test_orders_are_untouched() -> None:
    """The input is still what it was."""
    assert len(json.loads(Path("/app/orders.json").read_text())) == 5
