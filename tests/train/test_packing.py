"""Packs: what is computed at once is what each row would be by itself, and nothing is computed twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.train.errors import WrongRow
from prorld.train.packing import Pack, Strand, pack


@st.composite
def strands(draw) -> list[Strand]:
    """Rows over few tokens, so that many begin alike and some are the same."""
    made = []
    for _ in range(draw(st.integers(1, 8))):
        ids = draw(st.lists(st.integers(0, 2), min_size=2, max_size=10))
        trained = sorted(draw(st.sets(st.integers(1, len(ids) - 1), min_size=1)))
        made.append(
            Strand(
                ids=ids,
                trained=trained,
                logprobs=[-float(place) for place in trained],
                advantage=draw(st.sampled_from([-1.0, 0.5])),
                weight=draw(st.sampled_from([0.25, 1.0])),
                temperature=draw(st.sampled_from([1.0, 0.7])),
            )
        )
    return made


def seen_from(made: Pack, place: int) -> list[int]:
    """The places whose tokens the one at ``place`` may attend to."""
    return [other for other in range(len(made.ids)) if other <= place < made.ends[other]]


def uses(made: Pack):
    """Each trained token as the model meets it: what is before it, itself, and what the loss knows of it."""
    for place, *known in zip(made.uses, made.logprobs, made.advantages, made.weights, strict=True):
        before = tuple(made.ids[other] for other in seen_from(made, made.sources[place]))
        yield (made.temperature, before, made.tokens[place], *known)


def wanted(given: list[Strand]):
    """The same, read from the rows."""
    for strand in given:
        for place, logprob in zip(strand.trained, strand.logprobs, strict=True):
            before = tuple(strand.ids[:place])
            yield (strand.temperature, before, strand.ids[place], logprob, strand.advantage, strand.weight)


@given(strands(), st.integers(9, 40), st.booleans())
def test_a_pack_shows_each_token_what_its_row_showed_it(given, tokens_max, share):
    """However rows are packed and split, each trained token is met once, after the tokens before it and no others."""
    packs = list(pack(given, tokens_max=tokens_max, share=share))
    assert sorted(use for made in packs for use in uses(made)) == sorted(wanted(given))


@given(strands(), st.integers(9, 40))
def test_positions_count_what_is_seen(given, tokens_max):
    """A token's position is how many tokens of its row are before it."""
    for made in pack(given, tokens_max=tokens_max):
        assert made.depths == [len(seen_from(made, place)) - 1 for place in range(len(made.ids))]


@given(strands(), st.integers(9, 40), st.booleans())
def test_no_pack_is_longer_than_allowed(given, tokens_max, share):
    """The bound holds for every pack, and no split makes one that is empty."""
    sizes = [len(made.ids) for made in pack(given, tokens_max=tokens_max, share=share)]
    assert all(0 < size <= tokens_max for size in sizes)


@given(strands())
def test_nothing_is_computed_twice_where_there_is_room(given):
    """Unsplit, a pack has one token for each distinct beginning of rows at one temperature, and one prediction each."""
    packs = list(pack(given, tokens_max=1000))
    beginnings = {
        (strand.temperature, *strand.ids[:end]) for strand in given for end in range(1, strand.trained[-1] + 1)
    }
    assert sum(len(made.ids) for made in packs) == len(beginnings)
    predicted = {(temperature, before, token) for temperature, before, token, *_ in wanted(given)}
    assert sum(len(made.tokens) for made in packs) == len(predicted)


@given(strands())
def test_a_row_by_itself_needs_no_mask(given):
    """Unshared packs say so, and packs of several rows that part don't."""
    assert all(made.is_one_strand for made in pack(given, tokens_max=40, share=False))
    parting = [Strand(ids=[1, token, 0], trained=[2], logprobs=[-1.0], advantage=1, weight=1) for token in (0, 2)]
    assert [made.is_one_strand for made in pack(parting, tokens_max=40)] == [False]


def test_a_row_that_is_too_long_is_refused():
    """The bound on memory is kept, and nobody learns less than they think; the last token is no input."""
    strand = Strand(ids=[1, 2, 3, 4, 5], trained=[3], logprobs=[-1.0], advantage=1, weight=1)
    assert [len(made.ids) for made in pack([strand], tokens_max=3)] == [3]
    with pytest.raises(WrongRow, match="tokens_max, 2"):
        list(pack([strand], tokens_max=2))
