"""The repair of what llama.cpp leaves out of its replies."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from prorld.domain.job import Sampling
from prorld.inference.llamacpp_wire import align, processed_logprob

TOKENS = st.lists(st.integers(0, 3), max_size=30)


@given(TOKENS, st.data())
def test_an_entry_is_placed_only_where_it_must_be(tokens: list[int], data: st.DataObject) -> None:
    """Whatever was left out, an entry that is placed stands at its own token, never at a like one."""
    kept = [data.draw(st.booleans()) for _ in tokens]
    known = [token for token, keep in zip(tokens, kept, strict=True) if keep]
    placed = align(tokens, known)
    assert placed is not None
    truth: dict[int, int] = {}
    for position, keep in enumerate(kept):
        if keep:
            truth[position] = len(truth)
    assert all(truth[position] == entry for position, entry in enumerate(placed) if entry is not None)


@given(TOKENS)
def test_a_complete_reply_is_placed_completely(tokens: list[int]) -> None:
    """Nothing is asked for again when nothing is missing."""
    assert align(tokens, tokens) == list(range(len(tokens)))


@given(TOKENS, TOKENS)
def test_entries_of_other_tokens_are_refused(tokens: list[int], known: list[int]) -> None:
    """The answer is None exactly when the entries are no subsequence of the tokens."""
    rest = iter(tokens)
    is_subsequence = all(any(token == wanted for token in rest) for wanted in known)
    assert (align(tokens, known) is not None) == is_subsequence


# Numbers so small that a temperature makes 0 of them are ties, not an order.
LOGITS = st.lists(st.floats(-20, 0, allow_subnormal=False), min_size=2, max_size=30, unique=True)


@given(
    LOGITS,
    st.floats(0.1, 3.0),
    st.floats(0.05, 1.0),
    st.integers(-1, 10),
    st.floats(0.0, 0.9),
)
def test_processed_logprobs_are_a_distribution_over_what_is_left(
    raw: list[float], temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    """What the samplers leave sums to one, in the order of the model, and the best token is always left."""
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    values = {token: processed_logprob(dict(enumerate(raw)), token, sampling) for token in range(len(raw))}
    left = {token: value for token, value in values.items() if value > -math.inf}
    assert math.isclose(sum(math.exp(value) for value in left.values()), 1.0, rel_tol=1e-9)
    assert max(range(len(raw)), key=raw.__getitem__) in left
    assert top_k <= 0 or len(left) <= top_k
    by_model = sorted(left, key=lambda token: raw[token])
    assert all(left[a] <= left[b] for a, b in pairwise(by_model))


def test_untouched_sampling_gives_the_model_back() -> None:
    """At temperature one with nothing cut off, processed and raw are the same."""
    raw = {0: math.log(0.5), 1: math.log(0.3), 2: math.log(0.2)}
    for token, value in raw.items():
        assert math.isclose(processed_logprob(raw, token, Sampling()), value)
