"""Which text of an answer is the solution."""

from __future__ import annotations

import pytest

from prorld_code.answer import code_block, odd_words


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nrather\n```python\nx = 2\n```\ndone", "x = 2\n"),
        ("```py\nx = 1\n```\n```\noutput\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```cpp\nint x;\n```", None),
        ("```cpp\nint x;\n```\n```Python3\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1", "x = 1"),
        ("```python\r\nx = 1\r\n```", "x = 1\n"),
        ('````python\ny = """\n```\n"""\n````', 'y = """\n```\n"""\n'),
        ("~~~python\nx = 1\n~~~", "x = 1\n"),
        ("```python title=a\nx = 1\n```", "x = 1\n"),
        ("no code", None),
        ("x = 1", None),
        ("`x = 1`", None),
        ("", None),
        ("```python\n```", ""),
        ("```" * 5000, ""),
        ("```" + "a" * 500_000 + "`", None),
        ("```" + " " * 500_000 + "`", None),
        ("``` `\n" * 100_000, None),
    ],
)
def test_the_last_block_counts(said: str, code: str | None):
    """Of those in Python; one without a language where none is; the rest where it is not closed."""
    assert code_block(said) == code


def test_odd_words_are_named():
    """For whoever reads the record; they cost nothing."""
    assert odd_words("import os\nos._exit(0)\nopen('/proc/1/mem')") == ["os._exit", "/proc/"]
    assert odd_words("print(1)") == []
