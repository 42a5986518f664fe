"""What an old trainer asks, as one of our jobs. Pure: it looks at nothing but the request and the settings."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from prorld.domain.ids import is_client_id
from prorld.domain.job import AgentLimits, Sampling, StageTimeouts
from prorld.wire.codec import convert
from prorld.wire.compat import ProcessRequest
from prorld.wire.jobs import COLLECTION_VERBS, SubmitJob

__all__ = ["DEFAULT_SOURCE", "Asked", "Mark", "SamplingParams", "asked_of", "budget", "mark_of", "usable_id"]

DEFAULT_SOURCE: Final = "swebench"
# Under this name of its metadata a job remembers what its trainer called it.
MARK: Final = "compat"
# The context is what bounds a rollout there; tokens of several turns together are no limit of their own.
SAMPLED_TOKENS_MIN: Final = AgentLimits().max_sampled_tokens


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The names that are known; ``None`` stands for what was left out."""

    model: Annotated[str, Meta(max_length=2048)] | None = None
    api_key: Any = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    max_iterations: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    token_level_generation: bool | None = None
    custom_tokenizer: Annotated[str, Meta(max_length=4096)] | None = None
    max_model_len: Annotated[int, Meta(ge=16, le=10_000_000)] | None = None
    enable_thinking: bool | None = None
    ensure_thinking_end_properly: bool | None = None
    strict_loop_detector: bool | None = None


class Extras(msgspec.Struct, frozen=True, kw_only=True):
    """What the original knows nothing of and we do: taken where it fits, and else ignored as any other key."""

    top_k: Annotated[int, Meta(ge=-1, le=1_000_000)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop: Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=16)] | None = None


# What is known and changes nothing, where it was asked for, and why.
_NOTES: Final[dict[str, tuple[object, str]]] = {
    "api_key": (None, "keys of engines are configured in the daemon (engine_keys), never taken from a request"),
    "ensure_thinking_end_properly": (False, "a turn is kept as it was sampled"),
    "strict_loop_detector": (False, "signs of looping are counted in the job's metrics"),
    "token_level_generation": (True, "tokens and log-probabilities are given always"),
}


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What a job's metadata says of the trainer that asked. ``body`` is a digest of the instance and the sampling."""

    job_id: str
    body: str
    total_s: float
    ignored: list[str] = []
    noted: dict[str, str] = {}


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was understood; ``job`` still lacks its id. ``tokenizer`` is where the trainer says it lies."""

    job: SubmitJob
    mark: Mark
    tokenizer: str | None
    model: str | None


def asked_of(request: ProcessRequest, name: str, *, policy: str, total_s: float) -> Asked:
    """The job behind a request; ``BadRequest`` names the parameter that does not fit."""
    given = request.sampling_params or {}
    known = frozenset(SamplingParams.__struct_fields__)
    params = convert(
        {key: value for key, value in given.items() if key in known}, SamplingParams, what="sampling_params"
    )
    extras, taken = _extras(given)
    instance = dict(request.instance)
    if instance.get("data_source") is None:
        instance["data_source"] = DEFAULT_SOURCE
    # A key of an engine is no business of the journal's, so what was sent is hashed without it.
    body = msgspec.json.encode([instance, {**given, "api_key": None}], order="deterministic")
    mark = Mark(
        job_id=name,
        body=hashlib.sha256(body).hexdigest(),
        total_s=total_s,
        ignored=sorted(str(key)[:128] for key in given if key not in known and key not in taken),
        noted={
            key: words
            for key, (usual, words) in _NOTES.items()
            if (value := getattr(params, key)) is not None and value != usual
        },
    )
    job = SubmitJob(
        instance=instance,
        policy=policy,
        sampling=_sampling(params, extras),
        agent=_limits(params),
        timeouts=budget(total_s),
        metadata={MARK: msgspec.to_builtins(mark)},
    )
    model = params.model.removeprefix("hosted_vllm/") if params.model is not None else None
    return Asked(job=job, mark=mark, tokenizer=params.custom_tokenizer, model=model)


def budget(total_s: float) -> StageTimeouts:
    """One budget over all stages: each of them may use it up, so that the total is what ends a job."""
    each = total_s + 1.0
    return StageTimeouts(init_s=each, run_s=each, eval_s=each, total_s=total_s)


def mark_of(metadata: dict[str, Any]) -> Mark | None:
    """What a job's metadata says, where the job is one of these."""
    try:
        return msgspec.convert(metadata.get(MARK), Mark)
    except msgspec.ValidationError:
        return None


def usable_id(name: str) -> bool:
    """Whether a job can have the name that the trainer gave it as its id."""
    return is_client_id(name) and name not in COLLECTION_VERBS


def _extras(given: Mapping[str, Any]) -> tuple[Extras, frozenset[str]]:
    """Those that fit, and their names."""
    fitting: dict[str, Any] = {}
    for name in Extras.__struct_fields__:
        if given.get(name) is not None:
            with suppress(msgspec.ValidationError):
                msgspec.convert({name: given[name]}, Extras)
                fitting[name] = given[name]
    return msgspec.convert(fitting, Extras), frozenset(fitting)


def _sampling(params: SamplingParams, extras: Extras) -> Sampling:
    usual = Sampling()
    thinking = {} if params.enable_thinking is None else {"enable_thinking": params.enable_thinking}
    return Sampling(
        temperature=usual.temperature if params.temperature is None else params.temperature,
        top_p=usual.top_p if params.top_p is None else params.top_p,
        top_k=usual.top_k if extras.top_k is None else extras.top_k,
        min_p=usual.min_p if extras.min_p is None else extras.min_p,
        max_tokens=params.max_output_tokens or usual.max_tokens,
        seed=extras.seed,
        stop=extras.stop or [],
        chat_template_kwargs=thinking,
    )


def _limits(params: SamplingParams) -> AgentLimits:
    usual = AgentLimits()
    context = params.max_model_len or usual.max_context_tokens
    return AgentLimits(
        max_turns=params.max_iterations or usual.max_turns,
        max_context_tokens=context,
        max_sampled_tokens=max(SAMPLED_TOKENS_MIN, context),
    )
