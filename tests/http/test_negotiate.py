"""What a client takes is read as its headers say it."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies

from prorld.http.negotiate import EVENT_STREAM, JSON, MSGPACK, preferred, takes_zstd

OFFERS = (JSON, MSGPACK, EVENT_STREAM)


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        (None, JSON),
        ("", JSON),
        ("*/*", JSON),
        ("text/html", JSON),
        ("application/msgpack", MSGPACK),
        ("APPLICATION/MSGPACK", MSGPACK),
        ("application/json, application/msgpack", JSON),
        ("application/json;q=0.5, application/msgpack;q=0.9", MSGPACK),
        ("application/json;q=0.9, application/msgpack;q=0.5", JSON),
        ("application/msgpack;q=0, */*", JSON),
        ("application/json;q=0, */*;q=0.1", MSGPACK),
        ("application/*;q=0.2, text/event-stream;q=0.3", EVENT_STREAM),
        ("text/*", EVENT_STREAM),
        ("application/msgpack;q=2", JSON),
        ("application/msgpack;q=x", JSON),
        ("application/msgpack ; q=0.001", MSGPACK),
        (";;;,,,", JSON),
    ],
)
def test_the_best_liked_offer_is_taken(accept, chosen):
    """Higher quality first, the more specific range decides, equals go to JSON."""
    assert preferred(accept, OFFERS) == chosen


@pytest.mark.parametrize(
    ("header", "takes"),
    [
        (None, False),
        ("zstd", True),
        ("gzip, ZSTD;q=0.1", True),
        ("zstd;q=0", False),
        ("zstd;q=0.000", False),
        ("gzip, br", False),
        ("*", False),
        ("zstdx", False),
    ],
)
def test_zstd_is_used_where_it_is_named(header, takes):
    """By name and not by a star; a quality of 0 is a refusal."""
    assert takes_zstd(header) is takes


@given(strategies.text(max_size=200))
def test_no_header_is_too_odd(header):
    """Whatever it says there is an answer."""
    assert preferred(header, OFFERS) in OFFERS
    assert takes_zstd(header) in (True, False)
