"""One engine call, as it is recorded in a trajectory."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from prorld.domain.branch import VersionSpan

FinishReason = Literal["stop", "length", "abort"]


class CallParams(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters that were really used, and which distribution the log-probabilities are of."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    penalties: dict[str, float] = {}
    logprobs_mode: Literal["raw", "processed", "none"] = "raw"
    seed: int | None = None
    ignored: list[str] = []


class CallRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request to an engine. A turn that was interrupted and went on has several with the same ``turn``."""

    n: int
    turn: int
    branch: int
    backend: str
    policy_versions: list[VersionSpan]
    prompt_len: int
    sampled_len: int
    finish_reason: FinishReason
    latency_s: float
    cached_prefix_len: int | None = None
    exact: bool = True
    params: CallParams = CallParams()
    engine_request_id: str | None = None
    metadata: dict[str, Any] = {}
