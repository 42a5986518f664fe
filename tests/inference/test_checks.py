"""The checks of replies: what is believed, and what never is."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.domain.branch import VersionSpan
from prorld.errors import MalformedReply
from prorld.inference.checks import (
    checked_finish,
    checked_logprobs,
    checked_prompt,
    checked_sampled,
    checked_spans,
)

IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50)


@given(IDS)
def test_a_whole_reply_passes_unchanged(ids: list[int]) -> None:
    """What fits comes out as it went in."""
    logprobs = [-float(at) / 4 for at in range(len(ids))]
    assert list(checked_sampled(ids, len(ids), "x")) == ids
    assert list(checked_logprobs(logprobs, ids, "x", logprob_ids=ids)) == logprobs
    checked_prompt(ids, "x", echoed=ids, length=len(ids))


@given(IDS, st.data())
def test_one_wrong_thing_anywhere_is_refused(ids: list[int], data: st.DataObject) -> None:
    """A single bad value at any place refuses the whole reply."""
    at = data.draw(st.integers(0, len(ids) - 1))
    bad = data.draw(st.sampled_from([math.nan, math.inf, -math.inf, -9999.0, -20000.0, 0.5]))
    logprobs = [-1.0] * len(ids)
    other = [*ids[:at], ids[at] ^ 1, *ids[at + 1 :]]
    refused: list[Callable[[], object]] = [
        lambda: checked_logprobs([*logprobs[:at], bad, *logprobs[at + 1 :]], ids, "x"),
        lambda: checked_logprobs(logprobs[:-1], ids, "x"),
        lambda: checked_logprobs([*logprobs, -1.0], ids, "x"),
        lambda: checked_logprobs(logprobs, ids, "x", logprob_ids=other),
        lambda: checked_prompt(ids, "x", echoed=other),
        lambda: checked_prompt(ids, "x", echoed=ids[:-1]),
        lambda: checked_prompt(ids, "x", length=len(ids) + 1),
        lambda: checked_sampled(ids, len(ids) - 1, "x"),
        lambda: checked_sampled([*ids[:at], -1], 100, "x"),
        lambda: checked_sampled([*ids[:at], 2**31], 100, "x"),
    ]
    for check in refused:
        with pytest.raises(MalformedReply):
            check()


@pytest.mark.parametrize(("reason", "sampled"), [("stop", 1), ("length", 3), ("abort", 0), ("abort", 2)])
def test_known_ends_pass(reason: str, sampled: int) -> None:
    """The three ends are known; only an abort may come without a token."""
    assert checked_finish(reason, sampled, "x") == reason


@pytest.mark.parametrize(("reason", "sampled"), [("stop", 0), ("length", 0), (None, 1), ("error", 1), ("", 1)])
def test_unknown_ends_are_refused(reason: str | None, sampled: int) -> None:
    """Any other end is not one that a rollout can go on from."""
    with pytest.raises(MalformedReply):
        checked_finish(reason, sampled, "x")


@given(st.lists(st.integers(0, 5), max_size=8))
def test_spans_without_gaps_pass_and_lose_their_empty_ones(lengths: list[int]) -> None:
    """Spans that cover everything once are kept, empty ones dropped."""
    edges = [0]
    for length in lengths:
        edges.append(edges[-1] + length)
    spans = [VersionSpan(start=a, end=b, version=n) for n, (a, b) in enumerate(pairwise(edges))]
    kept = checked_spans(spans, edges[-1], "x")
    assert [span.end - span.start for span in kept] == [length for length in lengths if length]


@pytest.mark.parametrize("edges", [[(1, 4)], [(0, 3)], [(0, 5)], [(0, 2), (3, 4)], [(0, 3), (2, 4)], [(0, 5), (5, 4)]])
def test_spans_with_gaps_or_overlaps_are_refused(edges: list[tuple[int, int]]) -> None:
    """A token without a version, or with two, refuses the reply."""
    with pytest.raises(MalformedReply):
        checked_spans([VersionSpan(start=start, end=end) for start, end in edges], 4, "x")
