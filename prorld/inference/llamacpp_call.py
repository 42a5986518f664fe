"""One call to llama.cpp as it grows step by step, and what each step asks for. Pure."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from prorld.domain.branch import VersionSpan
from prorld.domain.calls import FinishReason
from prorld.domain.versions import PolicyVersion
from prorld.errors import MalformedReply
from prorld.inference.contract import GenerationRequest

__all__ = ["SteppedCall", "forcing", "ignored_of", "logprobs_mode_of", "payload_of", "stopped_by_itself"]

# Added to the logit of a token that is to be sampled for certain; it does not change what is said of the distribution.
_FORCING_BIAS = 10_000.0

# The order is part of what is sampled: the truncations see the tempered distribution.
_SAMPLERS = ("temperature", "min_p", "top_k", "top_p")

_OFF: dict[str, Any] = {
    "dynatemp_range": 0.0,
    "typical_p": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "mirostat": 0,
    "ignore_eos": False,
}


class SteppedCall:
    """One generation and what came of it so far."""

    def __init__(self, request: GenerationRequest, budget: int) -> None:
        self.request = request
        self.budget = budget
        self.ids = array("i")
        self.logprobs = array("f")
        self.finish: FinishReason | None = None
        self.stop_reason: int | None = None
        self.cached: int | None = None
        self.steps = 0
        self.spans: list[VersionSpan] = []
        self.spans_exact = True

    @property
    def prompt(self) -> list[int]:
        """What the next step goes on from."""
        return [*self.request.token_ids, *self.ids]

    def grow(self, ids: array[int], logprobs: array[float], version: PolicyVersion, *, at_end: bool) -> None:
        """Take over a step's tokens up to the first stop token; ``at_end`` when the engine stopped by itself."""
        start = len(self.ids)
        stops = self.request.stop_token_ids
        cut = next((position for position, token in enumerate(ids) if token in stops), None)
        kept = len(ids) if cut is None else cut + 1
        self.ids.extend(ids[:kept])
        self.logprobs.extend(logprobs[:kept])
        if cut is not None or at_end:
            self.finish = "stop"
            self.stop_reason = self.ids[-1]
        elif len(self.ids) >= self.budget:
            self.finish = "length"
        self._note(start, version)

    def _note(self, start: int, version: PolicyVersion) -> None:
        last = self.spans[-1] if self.spans else None
        if last is not None and (last.epoch, last.version) == (version.epoch, version.version):
            self.spans[-1] = msgspec.structs.replace(last, end=len(self.ids))
        else:
            span = VersionSpan(start=start, end=len(self.ids), epoch=version.epoch, version=version.version)
            self.spans.append(span)


def forcing(before: Sequence[int], token: int) -> dict[str, Any]:
    """A call that samples this token for certain."""
    return {
        **_OFF,
        "prompt": list(before),
        "n_predict": 1,
        "return_tokens": True,
        "cache_prompt": True,
        "temperature": 0.0,
        "logit_bias": [[token, _FORCING_BIAS]],
    }


def logprobs_mode_of(request: GenerationRequest) -> Literal["raw", "processed"]:
    """Greedy and untouched sampling are described by the model's own distribution, all else by what samplers left."""
    sampling = request.sampling
    untouched = sampling.temperature == 1 and sampling.top_p >= 1 and sampling.top_k <= 0 and sampling.min_p <= 0
    return "raw" if untouched or sampling.temperature == 0 else "processed"


def ignored_of(request: GenerationRequest) -> tuple[str, ...]:
    """What the server can't take."""
    # A stop string makes the server drop the ids of the tokens that hold it.
    asked = (("stop", request.sampling.stop), ("salt", request.salt), ("priority", request.priority))
    return tuple(name for name, value in asked if value)


def payload_of(request: GenerationRequest, prompt: list[int], step: int) -> dict[str, Any]:
    """One step of a call, but for how many tokens it may have."""
    sampling = request.sampling
    payload: dict[str, Any] = {
        **_OFF,
        "prompt": prompt,
        "samplers": _SAMPLERS,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p,
        "n_probs": 1,
        "post_sampling_probs": logprobs_mode_of(request) == "processed",
        "return_tokens": True,
        "cache_prompt": True,
    }
    if request.seed is not None:
        payload["seed"] = _seed_of_step(request.seed, step)
    return payload


def _seed_of_step(seed: int, step: int) -> int:
    # Neighbouring seeds must not share steps. The largest 32-bit seed means "random" to the server.
    digest = hashlib.blake2b(f"{seed}|{step}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % (2**32 - 1)


def stopped_by_itself(stop_type: str, sampled: int, wanted: int, where: str) -> bool:
    """Whether the engine ended the call, not its limit."""
    if stop_type == "eos":
        return True
    if stop_type != "limit":
        raise MalformedReply(f"{where}: stopped by {stop_type!r}")
    if sampled < wanted:
        raise MalformedReply(f"{where}: {sampled} of {wanted} tokens, and no word why")
    return False
