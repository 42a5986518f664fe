"""What a tool shows the policy: bounded text, and what became of a command said in words.

Nothing here runs anything. A sandbox's own trouble never becomes an observation; it is a ``SandboxError`` elsewhere.
"""

from __future__ import annotations

from typing import Any

import msgspec

from prorld.sandbox.contract import CommandResult

__all__ = ["OBSERVATION_BYTES", "Observation", "clip", "describe"]

# A few thousand tokens: enough for a traceback or a listing, and a small part of any context.
OBSERVATION_BYTES = 16 << 10


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one tool call. ``finished`` ends the episode and makes ``text`` the answer.

    ``data`` is for the handler's ``evaluate`` and is never shown to the policy.
    """

    text: str
    finished: bool = False
    data: dict[str, Any] = {}


def clip(text: str, limit_bytes: int = OBSERVATION_BYTES, *, omitted_bytes: int = 0) -> str:
    """The text itself, or its head and tail with the number of bytes left out between them.

    ``omitted_bytes`` were already left out of its middle and are counted in.
    """
    raw = text.encode("utf-8", "replace")
    if len(raw) <= limit_bytes:
        return raw.decode("utf-8")
    # A cut inside a character drops the broken piece, so the count is taken from what really stays.
    head = raw[: limit_bytes // 2].decode("utf-8", "ignore")
    tail = raw[len(raw) - limit_bytes // 2 :].decode("utf-8", "ignore")
    omitted = len(raw) - len(head.encode()) - len(tail.encode()) + omitted_bytes
    return f"{head}\n[... {omitted} bytes left out ...]\n{tail}"


def describe(result: CommandResult, *, limit_s: float, session: str, limit_bytes: int = OBSERVATION_BYTES) -> str:
    """What a command printed, followed by one line for each thing the policy has to know about how it went."""
    text = result.text.rstrip("\n")
    body = clip(text, limit_bytes, omitted_bytes=result.omitted_bytes)
    notes: list[str] = []
    if result.omitted_bytes and body == text:
        notes.append(f"[the output was too long: {result.omitted_bytes} bytes of it were left out]")
    if result.timed_out:
        notes.append(f"[stopped after {limit_s:g} s; the {session} is still there]")
    if result.restarted:
        notes.append(f"[the {session} had ended and was started again; what was set in it is gone]")
    if result.exit_code != 0 and not result.timed_out:
        notes.append(f"[exit code {result.exit_code}]")
    if not body:
        notes.insert(0, "[no output]")
    return "\n".join([body, *notes] if body else notes)
