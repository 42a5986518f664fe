"""The parts of llama.cpp's wire format that are looked at, and the pure repair of what it leaves out.

The server keeps a token's log-probability only when the text so far ends in whole UTF-8 characters. All other tokens
come back as ids without one: few in English, half of them in Chinese or emoji. ``align`` says for which tokens a
log-probability is there beyond doubt; the client asks for the rest again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from prorld.domain.job import Sampling

__all__ = ["COMPLETION", "MODELS", "TOKENS", "Completion", "ModelCard", "TokenProb", "align", "processed_logprob"]


class _TopProb(msgspec.Struct, frozen=True):
    id: int
    logprob: float | None = None


class TokenProb(msgspec.Struct, frozen=True):
    """One sampled token: ``logprob`` of the model's own distribution, or ``prob`` of the one that samplers left."""

    id: int
    logprob: float | None = None
    prob: float | None = None
    top_logprobs: list[_TopProb] = []

    @property
    def value(self) -> float:
        """Its log-probability, whichever way it was given."""
        if self.logprob is not None:
            return self.logprob
        return math.log(self.prob) if self.prob is not None and self.prob > 0 else -math.inf


class _Timings(msgspec.Struct, frozen=True):
    cache_n: int | None = None


class Completion(msgspec.Struct, frozen=True):
    """``POST /completion`` with a token prompt."""

    tokens: list[int]
    stop_type: str
    tokens_evaluated: int
    completion_probabilities: list[TokenProb] = []
    timings: _Timings = _Timings()


class _ModelMeta(msgspec.Struct, frozen=True):
    n_ctx: int | None = None
    n_vocab: int | None = None


class ModelCard(msgspec.Struct, frozen=True):
    """One entry of ``GET /v1/models``; ``n_ctx`` is the context of one slot."""

    id: str
    meta: _ModelMeta | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[ModelCard]


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[int]


COMPLETION = msgspec.json.Decoder(Completion)
MODELS = msgspec.json.Decoder(_Models)
TOKENS = msgspec.json.Decoder(_Tokens)


def align(tokens: Sequence[int], known: Sequence[int]) -> list[int | None] | None:
    """For each token the index of its entry in ``known``, a subsequence of ``tokens``; ``None`` where it is uncertain.

    Entries are placed as early and as late as they can be; where the two agree there is no other way. The whole answer
    is ``None`` when ``known`` is no subsequence at all.
    """
    earliest = _place(tokens, known)
    mirrored = _place(tokens[::-1], known[::-1])
    if earliest is None or mirrored is None:
        return None
    latest = [len(tokens) - 1 - position for position in reversed(mirrored)]
    found: list[int | None] = [None] * len(tokens)
    for entry, (early, late) in enumerate(zip(earliest, latest, strict=True)):
        if early == late:
            found[early] = entry
    return found


def _place(tokens: Sequence[int], known: Sequence[int]) -> list[int] | None:
    positions: list[int] = []
    for position, token in enumerate(tokens):
        if len(positions) < len(known) and known[len(positions)] == token:
            positions.append(position)
    return positions if len(positions) == len(known) else None


def processed_logprob(raw: Mapping[int, float], token: int, sampling: Sampling) -> float:
    """The log-probability of ``token`` after the samplers, from the log-probabilities of the whole vocabulary.

    Same order as the samplers are asked for: temperature, min-p, top-k, top-p.
    """
    scaled = sorted(((value / sampling.temperature, key) for key, value in raw.items()), reverse=True)
    best = scaled[0][0]
    if sampling.min_p > 0:
        scaled = [pair for pair in scaled if pair[0] - best >= math.log(sampling.min_p)]
    if sampling.top_k > 0:
        scaled = scaled[: sampling.top_k]
    weights = [math.exp(value - best) for value, _ in scaled]
    if sampling.top_p < 1:
        weights = weights[: _nucleus(weights, sampling.top_p)]
        scaled = scaled[: len(weights)]
    mine = next((value for value, key in scaled if key == token), -math.inf)
    return mine - best - math.log(math.fsum(weights))


def _nucleus(weights: Sequence[float], top_p: float) -> int:
    """How many of the largest weights it takes to hold the share ``top_p``."""
    wanted = top_p * math.fsum(weights)
    held = 0.0
    for count, weight in enumerate(weights, 1):
        held += weight
        if held >= wanted:
            return count
    return len(weights)
