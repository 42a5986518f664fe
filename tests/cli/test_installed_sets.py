"""The sets of the plugins of this repository: all can be loaded, and their converters and handlers are there."""

from __future__ import annotations

import pytest

from prorld.cli.data_sets import Known, converter, known_sets
from prorld.handlers.registry import discover

SETS = known_sets()


def test_none_is_broken():
    """And each plugin that is graded by a handler here has some."""
    assert [known.error for known in SETS if known.error is not None] == []
    assert {known.data.handler for known in SETS if known.data} >= {"math", "choice", "stem", "code", "swe"}


@pytest.mark.parametrize("known", SETS, ids=lambda known: known.name)
def test_a_set_names_what_there_is(known: Known):
    """Its converter, its handler, and for what is fetched the archive's hash."""
    assert known.data is not None
    assert callable(converter(known))
    if known.data.handler is not None:
        assert discover([known.data.handler]).get(known.data.handler).name == known.data.handler
    assert known.data.source is None or known.data.source.sha256 is not None
