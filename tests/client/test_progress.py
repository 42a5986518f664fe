"""The line on stderr: for a person at a terminal, or when asked for; otherwise not a byte, and not a call more."""

from __future__ import annotations

import io

import pytest

from prorld.client import progress as client_progress
from tests.client.serving import serving
from tests.client.test_batches import group, page, record
from tests.client.ways import WAYS, run

pytestmark = pytest.mark.parametrize("way", WAYS)


class Terminal(io.StringIO):
    """A stderr that is one."""

    def isatty(self):
        return True


async def read(client):
    return [found.seq async for found in client.groups("b", after=0)]


def counts(done):
    groups = {"informative": done, "running": 3, "uninformative": 2, "failed": 1}
    return (200, record(groups=groups))


def told(way, monkeypatch, stream, answers, **options):
    monkeypatch.setattr("sys.stderr", stream)
    with serving(*answers) as (address, script):
        assert run(way, read, address, **options) == [1, 2]
    return stream.getvalue(), [path for _, path, *_ in script.asked]


def test_a_script_hears_nothing(way, monkeypatch):
    """Nor is anything asked for the line."""
    answers = [page(group(1)), page(group(2), is_over=True)]
    text, asked = told(way, monkeypatch, io.StringIO(), answers)
    assert text == ""
    assert len(asked) == 2
    text, _ = told(way, monkeypatch, Terminal(), answers, progress=False)
    assert text == ""


def test_a_person_sees_how_far_it_is(way, monkeypatch):
    """One line, drawn again, and taken away before a group is handed out and at the end."""
    monkeypatch.setattr(client_progress, "LIVE_S", 0.0)
    answers = [counts(0), page(), counts(1), page(group(1)), counts(2), page(group(2), is_over=True)]
    text, asked = told(way, monkeypatch, Terminal(), answers)
    lines = [line for line in text.split("\r\x1b[K") if line]
    expected = [f"b: {n} of 4 groups, 3 running, 2 filtered, 1 failed" for n in range(3)]
    assert [line.rpartition(", ")[0] for line in lines] == expected
    assert text.endswith("\r\x1b[K")
    assert "\n" not in text
    assert len(asked) == 6


def test_whoever_asks_gets_lines_without_a_terminal(way, monkeypatch):
    """One at once, and another now and then; no control characters, not even those of a name."""
    answers = [counts(0), page(group(1)), page(group(2), is_over=True)]
    text, _ = told(way, monkeypatch, io.StringIO(), answers, progress=True)
    assert text.rpartition(", ")[0] == "b: 0 of 4 groups, 3 running, 2 filtered, 1 failed"
    assert text.count("\n") == 1
    assert "\x1b" not in client_progress.Progress("a\x1b[2Jb", None)._name


def test_a_terminal_that_was_closed_stops_nothing(way, monkeypatch):
    """The line ends, the groups go on."""

    class Closed(Terminal):
        def write(self, text):
            raise OSError("gone")

    answers = [counts(0), page(group(1)), page(group(2), is_over=True)]
    text, _ = told(way, monkeypatch, Closed(), answers)
    assert text == ""
