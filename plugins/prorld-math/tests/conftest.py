"""Real sandboxes for the tests of this plugin."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from prorld.sandbox.runtime import Runtime
from prorld.testing.real_sandboxes import real_sandboxes


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    """Of bubblewrap."""
    async with real_sandboxes() as opened:
        yield opened
