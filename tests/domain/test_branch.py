"""Branches: they only grow, and only what was sampled has mask 1."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.domain.branch import Branch, VersionSpan
from prorld.domain.messages import user
from prorld.wire.trajectory import branch_of, packed_branch

IDS = st.lists(st.integers(0, 50_000), max_size=12)
STEPS = st.lists(st.tuples(st.booleans(), IDS, st.integers(0, 3)), max_size=20)


def sample(branch: Branch, ids: list[int], version: int) -> None:
    """Append as if one call had sampled ``ids``."""
    spans = [VersionSpan(start=0, end=len(ids), version=version)] if ids else []
    branch.append_sampled(ids, [-0.5] * len(ids), spans, calls=[0], message=None, finish_reason="stop")


@given(STEPS)
def test_a_branch_grows_and_its_books_agree(steps: list[tuple[bool, list[int], int]]) -> None:
    """Lengths agree, the mask is 1 exactly on sampled tokens, segments and versions cover the branch without gaps."""
    branch = Branch()
    expected: list[int] = []
    mask: list[int] = []
    for sampled, ids, version in steps:
        before = branch.ids.tolist()
        if sampled:
            sample(branch, ids, version)
        else:
            branch.append_given(ids, "observation", user("x"))
        expected += ids
        mask += [int(sampled)] * len(ids)
        assert branch.ids.tolist()[: len(before)] == before
    assert branch.ids.tolist() == expected
    assert list(branch.mask) == mask
    assert len(branch.logprobs) == len(branch) == len(expected)
    assert branch.sampled == sum(mask)
    assert all(value == 0.0 for value, bit in zip(branch.logprobs, mask, strict=True) if not bit)
    for spans in (branch.segments, branch.versions):
        at = 0
        for span in spans:
            assert span.start == at
            at = span.end
        assert at == len(branch) or not spans


def test_log_probabilities_are_kept_bit_for_bit() -> None:
    """What a float32 can hold comes out as it went in."""
    values = array("f", [-1.8095355, -0.1, -7.25e-05])
    branch = Branch()
    spans = [VersionSpan(start=0, end=3, version=1)]
    branch.append_sampled([1, 2, 3], values, spans, calls=[0], message=None, finish_reason="stop")
    assert branch.logprobs.tobytes() == values.tobytes()


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [VersionSpan(start=0, end=1)],
        [VersionSpan(start=0, end=1), VersionSpan(start=2, end=3)],
        [VersionSpan(start=0, end=4)],
    ],
)
def test_versions_that_do_not_cover_the_tokens_are_refused(spans: list[VersionSpan]) -> None:
    """Every sampled token knows its version, or it is not taken."""
    with pytest.raises(AssertionError, match="version spans"):
        Branch().append_sampled([1, 2, 3], [0, 0, 0], spans, calls=[0], message=None, finish_reason="stop")


def test_lengths_that_differ_are_refused_and_nothing_was_taken() -> None:
    """A log-probability too few leaves the branch as it was."""
    branch = Branch()
    with pytest.raises(AssertionError, match="log-probabilities"):
        branch.append_sampled([1, 2], [0.0], [], calls=[0], message=None, finish_reason="stop")
    assert len(branch) == 0


def test_sampled_tokens_have_one_door() -> None:
    """Nothing that was given can claim to be sampled."""
    with pytest.raises(AssertionError, match="append_sampled"):
        Branch().append_given([1], "sampled")


def test_a_branch_that_was_written_down_is_the_same_branch() -> None:
    """Columns, segments and versions come back as they were, and columns that don't fit together are refused."""
    branch = Branch(2, parent=0, fork_at=3, reason="compaction")
    branch.append_given([1, 2, 3], "prompt")
    spans = [VersionSpan(start=0, end=2, version=7)]
    branch.append_sampled([4, 5], [-0.5, -0.25], spans, calls=[0], message=None, finish_reason="stop")
    packed = packed_branch(branch)
    again = branch_of(packed)
    assert packed_branch(again) == packed
    assert (again.sampled, again.index, again.parent, again.fork_at) == (2, 2, 0, 3)
    with pytest.raises(ValueError, match="log-probabilities"):
        branch_of(msgspec.structs.replace(packed, mask=packed.mask[1:]))
