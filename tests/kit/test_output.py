"""Bounded output keeps the ends and counts the middle."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prorld.kit.output import BoundedOutput


@given(st.lists(st.binary(max_size=40), max_size=40), st.integers(min_value=0, max_value=60))
def test_head_and_tail_are_kept_whatever_the_pieces(pieces: list[bytes], bytes_max: int):
    """However the output is cut into pieces: all of it, or both ends and the number between."""
    output = BoundedOutput(bytes_max)
    for piece in pieces:
        output.feed(piece)
    whole = b"".join(pieces)
    assert output.omitted_bytes == max(0, len(whole) - bytes_max)
    if len(whole) <= bytes_max:
        assert output.value() == whole
    else:
        head = bytes_max // 2
        mark = b"\n[... %d bytes omitted ...]\n" % output.omitted_bytes
        assert output.value() == whole[:head] + mark + whole[len(whole) - (bytes_max - head) :]


def test_memory_is_bounded():
    """What is held never exceeds one and a half times the bound and a piece."""
    output = BoundedOutput(1000)
    for _ in range(10_000):
        output.feed(b"x" * 100)
        assert len(output._head) + len(output._tail) <= 1500
