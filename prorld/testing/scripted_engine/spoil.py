"""What a fault makes of a reply, whatever the format that it is written in."""

from __future__ import annotations

from typing import Any

import msgspec

from prorld.testing.scripted_engine.engine import Call, Sampled
from prorld.testing.scripted_engine.script import FaultKind, scripted_logprob

__all__ = ["encoded", "prompt_length", "prompt_of", "sampled_of", "scores_of", "spans_of"]

# Stands for what JSON writers of an engine may write and msgspec's can't.
_PLACEHOLDER = -123456.5
_WRITTEN: dict[FaultKind | None, bytes] = {"nan": b"NaN", "infinite": b"-1e999"}


def sampled_of(call: Call, sampled: Sampled, fault: FaultKind | None) -> tuple[list[int], list[float]]:
    """The ids and their log-probabilities."""
    ids = sampled.ids * (call.max_tokens + 1) if fault == "too_many" else sampled.ids
    before = len(call.prompt)
    return ids, _values([scripted_logprob(token, before + at) for at, token in enumerate(ids)], fault)


def scores_of(ids: list[int], fault: FaultKind | None) -> list[float]:
    """The log-probabilities of all tokens of a prompt but the first."""
    return _values([scripted_logprob(token, at) for at, token in enumerate(ids)][1:], fault)


def _values(values: list[float], fault: FaultKind | None) -> list[float]:
    if fault == "lengths":
        return values[:-1]
    if fault == "sentinel":
        return [*values[:-1], -9999.0]
    if fault in _WRITTEN:
        return [*values[:-1], _PLACEHOLDER]
    return values


def spans_of(sampled: Sampled, fault: FaultKind | None) -> list[dict[str, Any]]:
    """The labels of the weights by token."""
    shift = 1 if fault == "spans" else 0
    return [{"version": label, "start": start + shift, "end": end} for label, start, end in sampled.spans]


def prompt_of(prompt: list[int], fault: FaultKind | None) -> list[int]:
    """The prompt as it is echoed."""
    return [*prompt[:-1], prompt[-1] + 1] if fault == "prompt_ids" else prompt


def prompt_length(prompt: list[int], fault: FaultKind | None) -> int:
    """The prompt's length as it is counted."""
    return len(prompt) + (fault == "prompt_length")


def encoded(reply: dict[str, Any], fault: FaultKind | None) -> bytes:
    """The reply as it goes over the wire."""
    body = msgspec.json.encode(reply)
    written = _WRITTEN.get(fault)
    return body if written is None else body.replace(msgspec.json.encode(_PLACEHOLDER), written)
