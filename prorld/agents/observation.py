"""What a tool shows the policy: bounded text, and what became of a command said in words.

What happened is kept beside the text as data (``ToolFacts``), for the handler and for those who watch; the policy reads
the text alone. Nothing here runs anything. A sandbox's own trouble never becomes an observation; it is a
``SandboxError`` elsewhere.
"""

from __future__ import annotations

from typing import Any

import msgspec

from prorld.sandbox.contract import CommandResult

__all__ = [
    "OBSERVATION_BYTES",
    "Observation",
    "ToolFacts",
    "also_omitted",
    "clip",
    "clip_chars",
    "clipped_bytes",
    "command_facts",
    "describe",
    "observe",
    "refusal",
]

# A few thousand tokens: enough for a traceback or a listing, and a small part of any context.
OBSERVATION_BYTES = 16 << 10


class ToolFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one call of a tool did, as data. Never shown to the policy.

    ``output_bytes`` is all that there was to show and ``omitted_bytes`` how much of it the policy can't see: of longer
    output the head and the tail are kept. ``refused`` is a short code where the tool did not do what it was asked for.
    """

    exit_code: int | None = None
    duration_s: float = 0.0
    output_bytes: int = 0
    omitted_bytes: int = 0
    timed_out: bool = False
    restarted: bool = False
    refused: str = ""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one tool call. ``finished`` ends the episode and makes ``text`` the answer.

    ``data`` is for the handler's ``evaluate``, ``facts`` for whoever watches; neither is ever shown to the policy.
    """

    text: str
    finished: bool = False
    data: dict[str, Any] = {}
    facts: ToolFacts = ToolFacts()


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


def clip_chars(text: str, limit_chars: int, *, omitted_bytes: int = 0) -> str:
    """The text itself, or its head and tail around a note of how many characters are left out between them.

    ``omitted_bytes`` were already left out of its middle; where that is cut out as well, the note says so.
    """
    if len(text) <= limit_chars:
        return text
    half = limit_chars // 2
    note = f"{len(text) - 2 * half} characters{also_omitted(omitted_bytes)} left out"
    return f"{text[:half]}\n[... {note} ...]\n{text[len(text) - half :]}"


def also_omitted(omitted_bytes: int) -> str:
    """Words for what was left out before anybody could count its characters."""
    return f" and {omitted_bytes} bytes more" if omitted_bytes else ""


def clipped_bytes(text: str, limit_chars: int) -> int:
    """How many bytes ``clip_chars`` leaves out."""
    half = limit_chars // 2
    return len(text[half : len(text) - half].encode()) if len(text) > limit_chars else 0


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


def command_facts(result: CommandResult, shown_bytes: int) -> ToolFacts:
    """The facts of a command of whose kept output so many bytes are shown."""
    kept = len(result.output)
    return ToolFacts(
        exit_code=result.exit_code,
        duration_s=result.duration_s,
        output_bytes=kept + result.omitted_bytes,
        omitted_bytes=result.omitted_bytes + max(0, kept - shown_bytes),
        timed_out=result.timed_out,
        restarted=result.restarted,
    )


def observe(result: CommandResult, *, limit_s: float, session: str) -> Observation:
    """A command in words and as data."""
    shown = min(len(result.output), OBSERVATION_BYTES)
    return Observation(
        text=describe(result, limit_s=limit_s, session=session), facts=command_facts(result, shown_bytes=shown)
    )


def refusal(text: str, code: str) -> Observation:
    """A call that did nothing, and why."""
    return Observation(text=text, facts=ToolFacts(refused=code))
