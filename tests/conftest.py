"""What holds for all tests: fast ones run first, so that a mistake shows early; no example is judged by its time."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

settings.register_profile("prorld", deadline=None)
settings.load_profile("prorld")

# A shell starts what runs in its background with Ctrl-C ignored, and children inherit that; some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests go last; otherwise the order stays."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
