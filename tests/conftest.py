"""What holds for all tests: the fast ones run first, so that a mistake shows early."""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests go last; otherwise the order stays."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
