"""Tables, numbers, and text that can't steer a terminal."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.cli.output import Style, clean, number, seconds, style_for, table


@given(st.text())
def test_cleaned_text_can_not_steer_a_terminal(text):
    """No control character but newline and tab survives, and no bidirectional override."""
    shown = clean(text)
    assert not any((ord(char) < 0x20 and char not in "\n\t") or 0x7F <= ord(char) < 0xA0 for char in shown)
    assert not set(shown) & set("\u202a\u202e\u2066\u200f")
    shown.encode()


@given(st.text(alphabet="abc äß漢\n\t"))
def test_honest_text_stays_as_it_is(text):
    """Letters of any script, newlines and tabs are not touched."""
    assert clean(text) == text


def test_escapes_are_made_visible():
    """A reader sees what was there."""
    assert clean("a\x1b[31mb\x00\r\nc\u202ed") == "a\\x1b[31mb\\x00\nc\\u202ed"


def test_a_table_is_aligned():
    """Text to the left, numbers to the right, no trailing blanks, newlines in cells flattened."""
    lines = table(("NAME", "N"), [["a", "1"], ["long\nname", "1000"]], right=frozenset({"N"}))
    assert lines == ["NAME          N", "a             1", "long name  1000"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.0 s"), (0.0123, "12 ms"), (1.26, "1.3 s"), (99.94, "99.9 s"), (125, "2m05s"), (7260, "2h01m")],
)
def test_durations(value, text):
    """Durations read well at every scale."""
    assert seconds(value) == text


def test_rewards():
    """A missing reward is no zero."""
    assert (number(None), number(0.0), number(1 / 3)) == ("-", "0", "0.3333")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colour_only_where_it_is_wanted():
    """A terminal gets colour; a pipe, NO_COLOR and a dumb terminal get none."""
    assert style_for(Terminal(), {}).on
    assert not style_for(Terminal(), {"NO_COLOR": "1"}).on
    assert not style_for(Terminal(), {"TERM": "dumb"}).on
    assert not style_for(io.StringIO(), {}).on
    assert Style(on=True)("x", "bold", "red") == "\x1b[1;31mx\x1b[0m"
    assert Style(on=False)("x", "bold") == "x"
