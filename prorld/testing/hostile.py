"""What a policy may say and a client may send, at its worst: answers for graders, instances with something wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["HOSTILE_ANSWERS", "spoilt"]

HOSTILE_ANSWERS: Mapping[str, str] = {
    "nothing": "",
    "blanks": " \t\r\n\u00a0\u2003",
    "control characters": "\x00\x07\x1b[2J\x7f\u202e",
    "a lone surrogate": "\ud800",
    "a very long line": "a" * 200_000,
    "a number of 10,000 digits": "9" * 10_000,
    "a huge exponent": "9**9**9**9",
    "no number": "nan",
    "infinity": "-1e999",
    "deep brackets": "[" * 5000 + "(" * 5000,
    "unclosed braces": "\\boxed{" * 2000,
    "broken JSON": '{"answer": [1, 2, {"x": ',
    "deep JSON": '{"a":' * 2000 + "1" + "}" * 2000,
    "code that exits": "__import__('os')._exit(0)",
    "a broken tool call": '<tool_call>{"name": 7}</tool_call>',
    "markup": "</think><answer><answer></answer>" * 500,
    "a pattern that explodes": "(a+)+$" + "a" * 4000 + "!",
    "digits of another script": "\u0664\u0662 \u00bd \u2460",
}

_WRONG: tuple[object, ...] = (None, "", "\x00", [], {}, 0, -1, 10**30, True)


def spoilt(instance: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The instance with one field missing, or wrong in every way, and the words for it."""
    yield "nothing in it", {}
    for field in instance:
        yield f"no {field}", {name: value for name, value in instance.items() if name != field}
        for wrong in _WRONG:
            yield f"{field} = {wrong!r}", {**instance, field: wrong}
