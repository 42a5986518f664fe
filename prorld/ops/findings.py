"""What a check of the doctor finds."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Finding", "fail", "fine", "warn"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One check. ``fail`` keeps the daemon from doing its work, ``warn`` does not."""

    name: str
    state: Literal["ok", "warn", "fail"]
    message: str
    cure: str | None = None


def fine(name: str, message: str) -> Finding:
    """Nothing is missing."""
    return Finding(name=name, state="ok", message=message)


def warn(name: str, message: str, cure: str) -> Finding:
    """Something is missing that the daemon can do without."""
    return Finding(name=name, state="warn", message=message, cure=cure)


def fail(name: str, message: str, cure: str) -> Finding:
    """Something is missing that the daemon needs."""
    return Finding(name=name, state="fail", message=message, cure=cure)
