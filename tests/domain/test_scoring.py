"""What is compared with what: every sampled token once, and each difference where it is."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.domain.branch import Branch, VersionSpan
from prorld.domain.calls import CallParams, CallRecord
from prorld.domain.scoring import Gap, Piece, Section, Tolerance, compare, drifts, plan
from prorld.domain.versions import PolicyVersion

ONE = PolicyVersion(0, 1)

CALLS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=1, max_size=3),  # spans: version, tokens
        st.booleans(),  # exact
        st.sampled_from(["raw", "processed", "none"]),
        st.integers(0, 4),  # tokens of the observation after it
    ),
    max_size=6,
)


def built(turns) -> tuple[Branch, list[CallRecord]]:
    """A branch of these calls."""
    branch, calls = Branch(), []
    branch.append_given([1, 2, 3], "prompt")
    for n, (runs, exact, mode, seen) in enumerate(turns):
        spans, at = [], 0
        for version, tokens in runs:
            spans.append(VersionSpan(start=at, end=at + tokens, version=version))
            at += tokens
        calls.append(
            CallRecord(
                n=n,
                turn=n,
                branch=0,
                backend="b-1",
                policy_versions=spans,
                prompt_len=len(branch),
                sampled_len=at,
                finish_reason="stop",
                latency_s=0.0,
                exact=exact,
                params=CallParams(logprobs_mode=mode, temperature=0.5),
            )
        )
        branch.append_sampled(range(at), [-1.0] * at, spans, calls=[n], message=None, finish_reason="stop")
        branch.append_given([9] * seen, "observation")
    return branch, calls


@given(CALLS)
def test_every_sampled_token_is_compared_or_named(turns):
    """Exactly one of the two; what is compared was sampled by that version and that call."""
    branch, calls = built(turns)
    sections, skipped = plan([branch], calls)
    seen: set[int] = set()
    for section in sections:
        for piece in section.pieces:
            here = set(range(piece.start, piece.end))
            assert not here & seen
            seen |= here
            assert all(branch.mask[at] for at in here)
            assert calls[piece.call].exact
            assert calls[piece.call].params.logprobs_mode == "raw"
            assert section.version is not None
            assert all(
                span.version == section.version.version
                for span in branch.versions
                if any(span.start <= at < span.end for at in here)
            )
    assert len(seen) + sum(one.tokens for one in skipped) == branch.sampled
    assert len({section.version for section in sections}) == len(sections)


@given(st.lists(st.floats(-8, 0, width=32), min_size=4, max_size=4))
def test_differences_are_those_of_the_pieces_alone(scored):
    """Mean, largest and worst are of the sampled tokens; what lies between them does not count."""
    branch = Branch()
    branch.append_given([1], "prompt")
    spans = [VersionSpan(start=0, end=1, version=1)]
    branch.append_sampled([5], [-1.0], spans, calls=[0], message=None, finish_reason="stop")
    branch.append_given([6, 6], "observation")
    branch.append_sampled([7], [-2.0], spans, calls=[1], message=None, finish_reason="stop")
    section = Section(branch=0, version=ONE, pieces=(Piece(1, 2, 0), Piece(4, 5, 1)))
    gap = compare(branch, section, array("f", scored))
    apart = [abs(-1.0 - scored[0]), abs(-2.0 - scored[3])]
    assert (gap.tokens, gap.mean, gap.max) == (2, sum(apart) / 2, max(apart))
    assert gap.worst is not None
    assert gap.worst.index == (1 if apart[0] >= apart[1] else 4)
    assert gap.worst.call == (0 if gap.worst.index == 1 else 1)
    early = compare(branch, section, array("f", scored[:2]))
    assert (early.tokens, early.max) == (1, apart[0])
    assert compare(branch, section, array("f")).worst is None


def test_gaps_add_up():
    """Tokens and sums; the worst of both."""
    branch, _ = built([([(1, 4)], True, "raw", 0)])
    small = compare(branch, Section(branch=0, version=ONE, pieces=(Piece(3, 5, 0),)), array("f", [-1.5, -1.0]))
    large = compare(branch, Section(branch=0, version=ONE, pieces=(Piece(5, 7, 0),)), array("f", [-1.0, -4.0]))
    both = Gap()
    both.add(small)
    both.add(Gap())
    both.add(large)
    assert (both.tokens, both.mean, both.max) == (4, 3.5 / 4, 3.0)
    assert both.worst == large.worst


@pytest.mark.parametrize(
    ("mean", "largest", "found"), [(0.5, 3.0, False), (0.49, 3.0, True), (0.5, 2.9, True), (0.0, 0.0, True)]
)
def test_either_tolerance_finds_a_drift(mean, largest, found):
    """At the bound is still within it."""
    branch, _ = built([([(1, 6)], True, "raw", 0)])
    scored = array("f", [-1.0, -1.0, -1.0, -1.0, -1.0, -4.0])
    gap = compare(branch, Section(branch=0, version=ONE, pieces=(Piece(3, 9, 0),)), scored)
    assert drifts(gap, Tolerance(mean=mean, max=largest)) is found
    assert not drifts(Gap(), Tolerance(mean=0.0, max=0.0))
