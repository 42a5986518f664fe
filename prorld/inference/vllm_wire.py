"""The parts of vLLM's wire format that are looked at. What is not declared here is skipped while decoding."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from prorld.domain.branch import VersionSpan, labelled
from prorld.errors import MalformedReply

__all__ = [
    "ACKNOWLEDGED",
    "COMPLETION",
    "GENERATE",
    "SCORED",
    "VERSION",
    "WEIGHT_INFO",
    "Answer",
    "CompletionReply",
    "GenerateReply",
    "PromptLogprobs",
    "WeightSpan",
    "answer_of_completion",
    "answer_of_generate",
    "may_be_cpu_build",
    "version_spans",
]


T = TypeVar("T")


class WeightSpan(msgspec.Struct, frozen=True):
    """Output tokens ``[start, end)`` and the label of the weights that made them."""

    version: str
    start: int
    end: int


class _CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    """Token counts of a call."""

    prompt_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens found in the prefix cache; only servers started to tell do so."""
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class _LogprobEntry(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class _GenerateLogprobs(msgspec.Struct, frozen=True):
    content: list[_LogprobEntry] | None = None


class _GenerateChoice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _GenerateLogprobs | None = None
    weight_versions: list[WeightSpan] | None = None


class GenerateReply(msgspec.Struct, frozen=True):
    """``POST /inference/v1/generate``."""

    choices: list[_GenerateChoice]
    request_id: str | None = None
    prompt_token_ids: list[int] | None = None
    usage: _Usage = _Usage()


class _CompletionLogprobs(msgspec.Struct, frozen=True):
    token_logprobs: list[float]


class _CompletionChoice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _CompletionLogprobs | None = None
    weight_versions: list[WeightSpan] | None = None


class CompletionReply(msgspec.Struct, frozen=True):
    """``POST /v1/completions`` with a token prompt and ``return_token_ids``."""

    choices: list[_CompletionChoice]
    id: str | None = None
    usage: _Usage = _Usage()


class _PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float


# For each token of a prompt; the first one has none.
PromptLogprobs = list[dict[int, _PromptLogprob] | None]


class _ScoredChoice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    logprobs: _CompletionLogprobs | None = None


class _Scored(msgspec.Struct, frozen=True):
    """``POST /v1/completions`` with ``prompt_logprobs``."""

    choices: list[_ScoredChoice]
    usage: _Usage = _Usage()


class _WeightInfo(msgspec.Struct, frozen=True):
    weight_version: str | None = None


class _Version(msgspec.Struct, frozen=True):
    version: str = ""


class _Acknowledged(msgspec.Struct, frozen=True):
    success: bool = True


GENERATE = msgspec.json.Decoder(GenerateReply)
COMPLETION = msgspec.json.Decoder(CompletionReply)
WEIGHT_INFO = msgspec.json.Decoder(_WeightInfo)
VERSION = msgspec.json.Decoder(_Version)
SCORED = msgspec.json.Decoder(_Scored)
ACKNOWLEDGED = msgspec.json.Decoder(_Acknowledged)


_CACHE = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
# What CPU builds say of their cache: blocks that no default elsewhere makes so large, or a size given in bytes.
_CACHE_OF_CPU = re.compile(r'(?:^|,)(?:block_size="128"|kv_cache_memory_bytes="\d+"|cpu_kvcache_space_bytes="\d+")')


def may_be_cpu_build(build: str, metrics: str) -> bool:
    """Whether a server may run on a CPU. Not every CPU build says so in its version, so the metrics are looked at, too.

    A server whose metrics say nothing of its cache may be one.
    """
    found = _CACHE.search(metrics)
    return "cpu" in build or found is None or _CACHE_OF_CPU.search(found[1]) is not None


def version_spans(spans: list[WeightSpan]) -> tuple[list[VersionSpan], bool]:
    """The spans as policy versions, and whether every label could be read as one."""
    made = [labelled(span.version, span.start, span.end) for span in spans]
    return made, all(span.version is not None for span in made)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What either endpoint said, not yet judged. ``logprob_ids`` and ``prompt_ids`` only where it said them."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None
    stop_reason: int | str | None
    spans: list[WeightSpan] | None
    cached_tokens: int | None
    engine_request_id: str | None
    prompt_ids: list[int] | None
    prompt_length: int | None
    logprob_ids: list[int] | None


def answer_of_generate(reply: GenerateReply, where: str) -> Answer:
    """The one choice of a generate reply."""
    choice = _only(reply.choices, where)
    entries = (choice.logprobs.content if choice.logprobs else None) or []
    return Answer(
        token_ids=choice.token_ids or [],
        logprobs=[entry.logprob for entry in entries],
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        spans=choice.weight_versions,
        cached_tokens=reply.usage.cached_tokens,
        engine_request_id=reply.request_id,
        prompt_ids=reply.prompt_token_ids,
        prompt_length=reply.usage.prompt_tokens,
        logprob_ids=[entry.token_id for entry in entries],
    )


def answer_of_completion(reply: CompletionReply, where: str) -> Answer:
    """The one choice of a completion that was asked for with a token prompt."""
    choice = _only(reply.choices, where)
    if choice.token_ids is None:
        too_old = choice.prompt_token_ids is None
        raise MalformedReply(
            f"{where}: no token ids came back{'; the server is too old' * too_old}", retryable=not too_old
        )
    return Answer(
        token_ids=choice.token_ids,
        logprobs=choice.logprobs.token_logprobs if choice.logprobs else [],
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        spans=choice.weight_versions,
        cached_tokens=reply.usage.cached_tokens,
        engine_request_id=reply.id,
        prompt_ids=choice.prompt_token_ids,
        prompt_length=reply.usage.prompt_tokens,
        logprob_ids=None,
    )


def _only(choices: Sequence[T], where: str) -> T:
    if len(choices) != 1:
        raise MalformedReply(f"{where}: {len(choices)} choices")
    return choices[0]
