"""What must hold for a reply before a single token of it is believed. Pure; every refusal is ``MalformedReply``.

Engines drop unknown fields without a word, clamp missing log-probabilities to a sentinel, change prompts. So nothing
is taken on trust that can be looked at in the answer.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import get_args

from prorld.domain.branch import VersionSpan
from prorld.domain.calls import FinishReason
from prorld.errors import ContextOverflow, MalformedReply
from prorld.inference.contract import Generation

__all__ = [
    "check_generation",
    "check_scorable",
    "checked_finish",
    "checked_logprobs",
    "checked_prompt",
    "checked_sampled",
    "checked_spans",
    "checked_token_ids",
]

# What engines write for a log-probability that is missing or not a number.
LOGPROB_SENTINEL = -9999.0
# Rounding of an engine; a probability is at most one.
LOGPROB_MAX = 1e-3

# Ids are kept in packed signed arrays of this many bits.
TOKEN_ID_MAX = 2**31 - 1

_FINISH_REASONS: frozenset[str] = frozenset(get_args(FinishReason))


def checked_token_ids(ids: Sequence[int], where: str) -> array[int]:
    """The ids as a packed array."""
    # By the extremes, which costs a tenth of a look at each; a reply has thousands of tokens.
    if ids and not (min(ids) >= 0 and max(ids) <= TOKEN_ID_MAX):
        wrong = next(token for token in ids if not 0 <= token <= TOKEN_ID_MAX)
        raise MalformedReply(f"{where}: {wrong} is no token id")
    return array("i", ids)


def checked_sampled(ids: Sequence[int], max_tokens: int, where: str) -> array[int]:
    """The sampled ids; no more of them than were asked for."""
    if len(ids) > max_tokens:
        raise MalformedReply(f"{where}: {len(ids)} tokens for a limit of {max_tokens}")
    return checked_token_ids(ids, where)


def checked_logprobs(
    logprobs: Sequence[float], ids: Sequence[int], where: str, *, logprob_ids: Sequence[int] | None = None
) -> array[float]:
    """One finite log-probability per sampled id; ``logprob_ids`` are the ids the engine gave them for, if it says."""
    if len(logprobs) != len(ids):
        raise MalformedReply(f"{where}: {len(ids)} tokens but {len(logprobs)} log-probabilities")
    if logprob_ids is not None and list(logprob_ids) != list(ids):
        raise MalformedReply(f"{where}: the log-probabilities are of other tokens than those sampled")
    if not _all_plausible(logprobs):
        _refuse_logprobs(logprobs, where)
    return array("f", logprobs)


def _all_plausible(logprobs: Sequence[float]) -> bool:
    """Whether no value can be wrong. The sum is finite only where every value is: between the bounds none overflows."""
    if not logprobs:
        return True
    return math.isfinite(sum(logprobs)) and min(logprobs) > LOGPROB_SENTINEL and max(logprobs) <= LOGPROB_MAX


def _refuse_logprobs(logprobs: Sequence[float], where: str) -> None:
    """Say which value is wrong."""
    for position, value in enumerate(logprobs):
        if not math.isfinite(value) or value <= LOGPROB_SENTINEL:
            raise MalformedReply(f"{where}: log-probability {value} at {position} is no evidence of sampling")
        if value > LOGPROB_MAX:
            raise MalformedReply(f"{where}: log-probability {value} at {position} is above zero")


def checked_finish(reason: str | None, sampled: int, where: str) -> FinishReason:
    """A known reason that fits what came: only an abort may end a call without a token."""
    if reason not in _FINISH_REASONS:
        raise MalformedReply(f"{where}: finish reason {reason!r}")
    if sampled == 0 and reason != "abort":
        raise MalformedReply(f"{where}: finished by {reason!r} without a single token")
    return "stop" if reason == "stop" else "length" if reason == "length" else "abort"


def checked_prompt(
    sent: Sequence[int], where: str, *, echoed: Sequence[int] | None = None, length: int | None = None
) -> None:
    """The engine saw the very prompt that was sent, as far as it tells: by its ids, else by their number."""
    if echoed is not None and list(echoed) != list(sent):
        raise MalformedReply(f"{where}: the engine sampled from another prompt than the one sent")
    if length is not None and length != len(sent):
        raise MalformedReply(f"{where}: the engine counts {length} prompt tokens, {len(sent)} were sent")


def checked_spans(spans: Sequence[VersionSpan], sampled: int, where: str) -> tuple[VersionSpan, ...]:
    """Spans in order that cover every sampled token once; empty ones are left out."""
    covered = 0
    for span in spans:
        if span.start != covered or span.end < span.start:
            raise MalformedReply(f"{where}: version spans leave a gap or overlap at {covered}")
        covered = span.end
    if covered != sampled:
        raise MalformedReply(f"{where}: version spans cover {covered} of {sampled} tokens")
    return tuple(span for span in spans if span.end > span.start)


def check_generation(generation: Generation, limit: int) -> None:
    """Clients check their engine's replies; this holds for any client."""
    where = "the reply"
    sampled = checked_sampled(generation.token_ids, limit, where)
    checked_logprobs(generation.logprobs, sampled, where)
    checked_finish(generation.finish, len(sampled), where)
    checked_spans(generation.versions, len(sampled), where)


def check_scorable(sent: int, start: int, context: int, url: str) -> None:
    """What may be asked to be scored: tokens that have one before them, in a context that holds them all."""
    if not 1 <= start <= sent:
        raise ValueError(f"a score starts between 1 and {sent}, not at {start}")
    if sent > context:
        raise ContextOverflow(f"{sent} tokens, the context of {url} holds {context}")
