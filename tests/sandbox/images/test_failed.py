"""What Apptainer said last becomes one line with a code, and with the cure where it is known."""

from __future__ import annotations

import pytest

from prorld.sandbox.images.apptainer import failed


@pytest.mark.parametrize(
    ("action", "said", "code", "words"),
    [
        (
            "build",
            ["FATAL:   newuidmap was not found in PATH (/bin), required"],
            "image_build_failed",
            "package uidmap",
        ),
        ("build", ["ModuleNotFoundError: No module named 'spython'"], "no_apptainer", "`./just init`"),
        ("pull", ["INFO: begun", "FATAL:   no such host", "more"], "image_pull_failed", "pull env: no such host"),
        ("unpack", [], "image_broken", "it said nothing"),
    ],
)
def test_what_apptainer_said(action: str, said: list[str], code: str, words: str) -> None:
    """All of it is kept for a program to read."""
    error = failed(action, "env", said)
    assert error.stable_code == code
    assert words in error.message
    assert error.details == {"said": said}
