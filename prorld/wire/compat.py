"""The bodies of the original ProRL Agent server, as its trainers write and read them.

Its names are kept, also where ours are others. What a trainer sends beyond them is accepted and left alone.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from prorld.domain.outcome import StopReason

__all__ = [
    "Address",
    "CancelProcess",
    "CompatMessage",
    "CompatStatus",
    "CompatTiming",
    "CompatToolCall",
    "CriticalError",
    "ProcessRequest",
    "ProcessResult",
    "Word",
]

# Longer than what the data sets name, and short enough for every line of a log.
JobName = Annotated[str, Meta(min_length=1, max_length=512)]

CriticalError = Literal["init", "run", "eval", "timeout", "cancelled"]


class ProcessRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /process``."""

    instance: dict[str, Any]
    sampling_params: dict[str, Any] | None = None
    job_id: JobName | None = None


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /add_llm_server``."""

    address: Annotated[str, Meta(pattern=r"^https?://[^\s/@?#]+(/[^\s@?#]*)?(?![\s\S])", max_length=2048)]


class CancelProcess(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /cancel``."""

    job_id: JobName


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """What the routes that change something answer."""

    status: str


class CompatStatus(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /status``: the jobs of this surface, by the stage they wait for or are in.

    ``detail`` is there only while an engine that was named does not serve, and says why.
    """

    status: Literal["running"] = "running"
    pending_jobs: int = 0
    init_queue: int = 0
    run_queue: int = 0
    eval_queue: int = 0
    active_init: int = 0
    active_run: int = 0
    active_eval: int = 0
    total: int = 0
    detail: str | UnsetType = UNSET


class CompatToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the policy wrote."""

    name: str
    arguments: dict[str, Any]


class CompatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message and the ids that it takes up in the branch, those of the template around it included.

    ``input_ids`` and ``logprobs`` are of what the policy sampled and empty elsewhere; ``logprobs`` are then as many as
    ``token_ids``.
    """

    role: str
    content: str
    token_ids: list[int]
    input_ids: list[int] = []
    logprobs: list[float] = []
    tool_calls: list[CompatToolCall] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_call_id: str | UnsetType = UNSET


class CompatTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. ``others_time`` was spent in queues and counts for nothing; ``counted_elapsed`` is the rest."""

    init_time: float
    run_time: float
    eval_time: float
    others_time: float
    counted_elapsed: float
    timeout_triggered: bool


class ProcessResult(msgspec.Struct, frozen=True, kw_only=True):
    """What ``POST /process`` answers. ``messages`` is empty where nothing was graded: such a rollout is no success.

    ``prorld_job_id`` is the job's id on the other listener, ``job_id`` the one that the trainer gave it.
    """

    instance_id: Any
    trajectory_id: Any
    job_id: str
    prorld_job_id: str
    resolved: bool
    success: bool
    finish: bool
    error: str | None
    critical_error: CriticalError | None
    filter: bool
    reward: float | None
    stop_reason: StopReason | None
    messages: list[CompatMessage]
    tools: list[dict[str, Any]]
    git_patch: str | None
    timing: CompatTiming
    ignored: list[str] = []
    noted: dict[str, str] = {}
