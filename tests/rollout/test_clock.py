"""The wall's clock as records have it."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from prorld.rollout.clock import SystemClock


def test_an_instant_is_now_in_utc_with_milliseconds():
    """Each is RFC 3339, none is older than the one before, and all lie between two looks at the system's clock."""
    clock = SystemClock()
    began = datetime.now(UTC) - timedelta(milliseconds=1)
    said = [clock.wall()]
    while datetime.now(UTC) - began < timedelta(milliseconds=6):
        said.append(clock.wall())
    ended = datetime.now(UTC)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", text) for text in said)
    assert said == sorted(said)
    assert len(set(said)) > 1
    assert began <= datetime.fromisoformat(said[0]) <= datetime.fromisoformat(said[-1]) <= ended
