"""What a policy is shown is bounded, readable, and says how a command went."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from prorld.agents.observation import clip, describe
from prorld.sandbox.contract import CommandResult


@given(st.text(), st.integers(min_value=2, max_value=64))
def test_clip_keeps_the_bound_and_counts_what_it_drops(text: str, limit: int):
    """Head and tail are the text's own, and kept plus omitted bytes are all bytes."""
    raw = text.encode("utf-8", "replace")
    shown = clip(text, limit)
    if len(raw) <= limit:
        assert shown == raw.decode()
        return
    match = re.search(r"\n\[\.\.\. (\d+) bytes left out \.\.\.\]\n", shown)
    assert match is not None
    head, tail = shown[: match.start()].encode(), shown[match.end() :].encode()
    assert raw.startswith(head)
    assert raw.endswith(tail)
    assert len(head) + len(tail) <= limit
    assert len(head) + len(tail) + int(match[1]) == len(raw)


def test_a_cut_inside_a_character_drops_the_whole_character():
    """No replacement characters appear that were not in the text."""
    assert "�" not in clip("€" * 100, 50)


def test_a_quiet_success_says_that_there_was_no_output():
    """An empty observation would look like a fault."""
    assert describe(CommandResult(exit_code=0, output=b""), limit_s=1, session="shell") == "[no output]"


def test_a_failure_shows_output_and_exit_code():
    """The exit code follows what was printed."""
    result = CommandResult(exit_code=2, output=b"no such file\n")
    assert describe(result, limit_s=1, session="shell") == "no such file\n[exit code 2]"


def test_a_time_out_says_so_and_not_an_exit_code():
    """The code of a command that was stopped means nothing."""
    result = CommandResult(exit_code=124, output=b"half", timed_out=True)
    assert describe(result, limit_s=2.5, session="shell") == "half\n[stopped after 2.5 s; the shell is still there]"


def test_a_restart_and_omitted_bytes_are_said():
    """The policy has to know that its variables are gone and that it does not see everything."""
    result = CommandResult(exit_code=0, output=b"x", restarted=True, omitted_bytes=77)
    text = describe(result, limit_s=1, session="interpreter")
    assert "interpreter had ended and was started again" in text
    assert "77 bytes" in text


def test_what_the_sandbox_left_out_is_counted_once():
    """One number says how much is not there, whoever dropped it."""
    result = CommandResult(exit_code=0, output=b"x" * 1000, omitted_bytes=5000)
    text = describe(result, limit_s=1, session="shell", limit_bytes=100)
    assert "[... 5900 bytes left out ...]" in text
    assert text.count("left out") == 1
