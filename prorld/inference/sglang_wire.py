"""The parts of SGLang's wire format that are looked at. What is not declared here is skipped while decoding."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from prorld.errors import MalformedReply

__all__ = [
    "DONE",
    "GENERATED",
    "LOADS",
    "MODEL_INFO",
    "SERVER_INFO",
    "Generated",
    "ModelInfo",
    "RankLoad",
    "ServerInfo",
    "TokenLogprob",
    "logprobs_of",
    "scores_of",
]

# The log-probability, the token, and its text where it was asked for. The first one of a prompt has no value.
TokenLogprob = tuple[float | None, int, str | None]


class _Finish(msgspec.Struct, frozen=True):
    type: str
    matched: int | str | None = None


class _Span(msgspec.Struct, frozen=True):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct, frozen=True):
    id: str | None = None
    finish_reason: _Finish | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    weight_version: str | None = None
    weight_versions: list[_Span] | None = None
    output_token_logprobs: list[TokenLogprob] | None = None
    input_token_logprobs: list[TokenLogprob] | None = None


class Generated(msgspec.Struct, frozen=True):
    """``POST /generate``."""

    meta_info: _Meta
    output_ids: list[int] | None = None


class ModelInfo(msgspec.Struct, frozen=True):
    """``GET /model_info``. A server that names its weights can be told another name."""

    model_path: str | None = None
    weight_version: str | None = None


class ServerInfo(msgspec.Struct, frozen=True):
    """``GET /server_info``: what it was started with."""

    version: str = ""
    max_total_num_tokens: int | None = None
    enable_lora: bool | None = None
    enable_priority_scheduling: bool | None = None
    schedule_low_priority_values_first: bool | None = None
    enable_deterministic_inference: bool | None = None


class RankLoad(msgspec.Struct, frozen=True):
    """One rank of ``GET /v1/loads``."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    token_usage: float | None = None


class _Loads(msgspec.Struct, frozen=True):
    loads: list[RankLoad]


class _Done(msgspec.Struct, frozen=True):
    success: bool = True
    message: str = ""


GENERATED = msgspec.json.Decoder(Generated)
MODEL_INFO = msgspec.json.Decoder(ModelInfo)
SERVER_INFO = msgspec.json.Decoder(ServerInfo)
LOADS = msgspec.json.Decoder(_Loads)
DONE = msgspec.json.Decoder(_Done)


def logprobs_of(said: Sequence[TokenLogprob], where: str) -> list[float]:
    """The values, all of which must be there."""
    values = [value for value, _, _ in said if value is not None]
    if len(values) != len(said):
        raise MalformedReply(f"{where}: a token without a log-probability")
    return values


def scores_of(said: Sequence[TokenLogprob] | None, ids: Sequence[int], where: str) -> list[float]:
    """The values of these last ids of a prompt. What comes before them is there to be computed from."""
    tail = (said or [])[-len(ids) :]
    if [token for _, token, _ in tail] != list(ids):
        raise MalformedReply(f"{where}: the scores are not those of the tokens that were sent")
    return logprobs_of(tail, where)
