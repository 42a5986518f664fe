"""How errors are told."""

from __future__ import annotations

from prorld.errors import ProrldError, chain


def caused(message: str, cause: BaseException) -> ProrldError:
    error = ProrldError(message)
    error.__cause__ = cause
    return error


def test_a_cause_in_the_same_words_is_said_once():
    """As where an error is raised again out of a group; one in other words is told, and so is what lies below."""
    lowest = ValueError("no file")
    again = caused("the engine did not start", caused("the engine did not start", lowest))
    assert chain(caused("not loaded", again)) == "not loaded: the engine did not start: ValueError: no file"
