"""The collector finds the marks wherever the stream is cut, and its memory is bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prorld.sandbox.collector import Collector, EndOfCommand

NONCE = b"0123456789abcdef"
pieces = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from(
            [b"\0", b"\0" + NONCE, b"\0" + NONCE[:7], b"\0" + NONCE + b"<", b"\0\0", NONCE + b" ", b" 0 /\0"]
        ),
    ),
    max_size=20,
).map(b"".join)


@given(noise=pieces, output=pieces, cuts=st.lists(st.integers(1, 50), max_size=60), code=st.integers(0, 255))
def test_any_cut(noise: bytes, output: bytes, cuts: list[int], code: int) -> None:
    """The output is what stands between the first start mark and the next end mark, however it arrives in pieces."""
    start, end = b"\0" + NONCE + b"<\0", b"\0" + NONCE + b" "
    if start in noise + start[:-1] or end in output + end[:-1]:
        return
    stream = noise + start + output + end + b"%d /a b\0late" % code
    collector = Collector(NONCE, 1 << 20)
    found = None
    for cut in [*cuts, len(stream)]:
        piece, stream = stream[:cut], stream[cut:]
        if found is None:
            found = collector.feed(piece)
    assert found == EndOfCommand(exit_code=code, cwd=b"/a b")
    assert collector.output == output


@given(st.binary(max_size=300))
def test_nothing_without_a_nonce(data: bytes) -> None:
    """Whatever is sent without the nonce ends nothing."""
    collector = Collector(b"\xff" * 32, 64)
    assert collector.feed(data) is None
    assert collector.output == b""


def test_bounded() -> None:
    """Of a long output the head and the tail are kept, and the rest is counted."""
    collector = Collector(NONCE, 10)
    collector.feed(b"\0" + NONCE + b"<\0")
    for _ in range(1000):
        collector.feed(b"0123456789")
    assert collector.feed(b"\0" + NONCE + b" 0 /\0") == EndOfCommand(exit_code=0, cwd=b"/")
    assert collector.omitted_bytes == 9990
    assert collector.output.startswith(b"01234\n[")
    assert collector.output.endswith(b"]\n56789")


def test_malformed_status() -> None:
    """A status that is none ends the exchange all the same: only who knows the nonce could have sent it."""
    collector = Collector(NONCE, 10)
    assert collector.feed(b"\0" + NONCE + b"<\0\0" + NONCE + b" nonsense\0") == EndOfCommand(exit_code=255, cwd=b"")


def test_endless_status_is_bounded() -> None:
    """A status without an end takes no memory."""
    collector = Collector(NONCE, 10)
    collector.feed(b"\0" + NONCE + b"<\0\0" + NONCE + b" 0 ")
    for _ in range(100):
        assert collector.feed(b"x" * 10_000) is None
    end = collector.feed(b"\0")
    assert end is not None
    assert len(end.cwd) < 1 << 14
