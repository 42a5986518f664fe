"""Where the answer stands in what a policy has said."""

from __future__ import annotations

from typing import Literal

__all__ = ["extracted"]

_OPEN, _CLOSE = "<answer>", "</answer>"


def extracted(said: str, mode: Literal["tags", "tags-or-last-line", "all"]) -> str | None:
    """The last answer in tags; by ``mode`` the last line where there are none, or all that was said."""
    if mode == "all":
        return said.strip() or None
    end = said.rfind(_CLOSE)
    begin = said.rfind(_OPEN, 0, end) if end >= 0 else -1
    if begin >= 0:
        return said[begin + len(_OPEN) : end].strip() or None
    if mode == "tags":
        return None
    lines = said.strip().splitlines()
    return lines[-1].strip() or None if lines else None
