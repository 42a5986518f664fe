"""vLLM's requests as a scripted engine reads them, and its replies. Unknown fields are dropped, as there."""

from __future__ import annotations

from typing import Any

import msgspec

from prorld.testing.scripted_engine.engine import Call, Sampled
from prorld.testing.scripted_engine.script import FaultKind
from prorld.testing.scripted_engine.spoil import encoded, prompt_length, prompt_of, sampled_of, scores_of, spans_of

__all__ = ["CompletionRequest", "GenerateRequest", "completion_reply", "generate_reply"]

_MAX_TOKENS_OF_COMPLETIONS = 16


class _SamplingParams(msgspec.Struct, frozen=True):
    max_tokens: int | None = None
    stop_token_ids: list[int] = []
    logprobs: int | None = None
    seed: int | None = None


class GenerateRequest(msgspec.Struct, frozen=True):
    """``POST /inference/v1/generate``."""

    token_ids: list[int]
    sampling_params: _SamplingParams = _SamplingParams()
    model: str | None = None
    request_id: str = ""
    cache_salt: str | None = None

    def call(self, name: str, session: str, room: int) -> Call:
        """What it asks of the engine."""
        params = self.sampling_params
        return Call(
            name=f"generate-tokens-{name}",
            prompt=self.token_ids,
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            stop_token_ids=params.stop_token_ids,
            session=session,
            seed=name if params.seed is None else str(params.seed),
            salt=self.cache_salt,
        )


class CompletionRequest(msgspec.Struct, frozen=True):
    """``POST /v1/completions`` with a token prompt."""

    prompt: list[int]
    model: str | None = None
    request_id: str = ""
    max_tokens: int | None = None
    stop_token_ids: list[int] = []
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: list[int] = []
    seed: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool = False
    return_weight_versions: bool = False

    def call(self, name: str, session: str) -> Call:
        """What it asks of the engine."""
        return Call(
            name=f"cmpl-{name}-0",
            prompt=self.prompt,
            max_tokens=_MAX_TOKENS_OF_COMPLETIONS if self.max_tokens is None else self.max_tokens,
            stop_token_ids=self.stop_token_ids,
            session=session,
            seed=name if self.seed is None else str(self.seed),
            salt=self.cache_salt,
            forced=self.allowed_token_ids,
        )


def generate_reply(call: Call, sampled: Sampled, model: str, fault: FaultKind | None) -> bytes:
    """The reply of the token endpoint, spoilt by ``fault``."""
    ids, logprobs = sampled_of(call, sampled, fault)
    said_of = [(token + 1) for token in ids] if fault == "other_ids" else ids
    content = [
        {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
        for token, logprob in zip(said_of, logprobs, strict=False)
    ]
    choice = {
        "index": 0,
        "finish_reason": sampled.finish,
        "stop_reason": sampled.stop_reason,
        "token_ids": None if fault == "no_ids" else ids,
        "weight_versions": spans_of(sampled, fault),
        "logprobs": {"content": content},
        "routed_experts": None,
    }
    reply = {
        "request_id": call.name,
        "model": model,
        "usage": _usage(call, sampled, fault),
        "prompt_token_ids": prompt_of(call.prompt, fault),
        "output_mode": "tokens",
        "choices": [choice],
    }
    return encoded(reply, fault)


def completion_reply(
    call: Call,
    sampled: Sampled,
    model: str,
    fault: FaultKind | None,
    *,
    with_ids: bool,
    with_spans: bool,
    scored: bool,
) -> bytes:
    """The reply of the text endpoint to a token prompt, spoilt by ``fault``."""
    ids, logprobs = sampled_of(call, sampled, fault)
    choice: dict[str, Any] = {
        "index": 0,
        "text": "",
        "finish_reason": sampled.finish,
        "stop_reason": sampled.stop_reason,
        "logprobs": {"tokens": [f"token_id:{token}" for token in ids], "token_logprobs": logprobs},
    }
    if scored:
        choice["prompt_logprobs"] = _prompt_logprobs(call.prompt, fault)
    if with_ids:
        choice |= {"token_ids": None if fault == "no_ids" else ids, "prompt_token_ids": prompt_of(call.prompt, fault)}
    if with_spans:
        choice["weight_versions"] = spans_of(sampled, fault)
    return encoded({"id": call.name, "model": model, "choices": [choice], "usage": _usage(call, sampled, fault)}, fault)


def _usage(call: Call, sampled: Sampled, fault: FaultKind | None) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_length(call.prompt, fault),
        "completion_tokens": len(sampled.ids),
        "total_tokens": len(call.prompt) + len(sampled.ids),
        "prompt_tokens_details": {"cached_tokens": sampled.cached},
    }


def _prompt_logprobs(prompt: list[int], fault: FaultKind | None) -> list[dict[int, dict[str, Any]] | None]:
    said_of = [token + 1 for token in prompt] if fault == "other_ids" else prompt
    scored = zip(said_of[1:], scores_of(prompt, fault), strict=False)
    return [None, *({token: {"logprob": value, "rank": 1, "decoded_token": ""}} for token, value in scored)]
