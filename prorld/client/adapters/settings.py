"""What the configuration of a trainer says to an adapter. It is checked before anything is asked of a daemon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from prorld.client.errors import ClientError
from prorld.domain.job import AgentLimits, Sampling, StageTimeouts
from prorld.wire.jobs import Name
from prorld.wire.ops import SetBackend

__all__ = ["BAD_SETTINGS", "RUN_PATTERN", "AdapterSettings", "InformativeRule", "plain", "sampling_of", "settings_from"]

T = TypeVar("T")

BAD_SETTINGS = "bad_settings"
# It begins the ids of batches, and leaves room for the step and a digest.
RUN_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,63}(?![\s\S])"

Seconds = Annotated[float, Meta(gt=0, le=7 * 86400)]
InformativeRule = Literal["all", "spread"]


class AdapterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of an adapter's settings; every one may be left out.

    ``run`` names a training run: with it, rollouts that a killed trainer asked for are found again. ``sampling`` goes
    over what the trainer says. ``branches`` says what stands for a rollout with several branches, where the trainer has
    room for more than one row. ``engines`` are ``KIND=URL``; left out, they are the trainer's own where the adapter can
    find them, else those that the daemon has. ``rollouts_s`` is how long a batch may bring nothing before an adapter
    gives up, ``away_s`` how long the daemon may be gone, ``update_s`` how long an update of weights may take.
    """

    address: str | None = None
    token: str | None = None
    state_dir: str | None = None
    run: Annotated[str, Meta(pattern=RUN_PATTERN)] | None = None
    policy: Name = "default"
    handler: Name | None = None
    instance_key: Annotated[str, Meta(min_length=1)] = "instance"
    sampling: dict[str, Any] = {}
    agent: AgentLimits = AgentLimits()
    timeouts: StageTimeouts = StageTimeouts()
    informative: InformativeRule = "all"
    branches: Literal["last", "all"] = "last"
    max_attempts: Annotated[int, Meta(ge=1, le=10)] = 2
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    engines: list[Annotated[str, Meta(min_length=3, max_length=2048)]] = []
    model: str | None = None
    rollouts_s: Seconds = 4 * 3600.0
    away_s: Seconds = 600.0
    update_s: Seconds = 1800.0

    def __post_init__(self) -> None:
        for engine in self.engines:
            if "=" not in engine:
                raise ValueError(f"an engine is KIND=URL, and not {engine!r}")
        sampling_of(self.sampling)

    def backends(self) -> list[SetBackend]:
        """The engines as the daemon is told of them."""
        said = [engine.partition("=") for engine in self.engines]
        fields = [{"kind": kind, "url": url, "model": self.model} for kind, _, url in said]
        return converted(fields, list[SetBackend], "engines")


def settings_from(said: AdapterSettings | Mapping[str, Any] | None, **more: Any) -> AdapterSettings:
    """Settings as they stand in a configuration, of whatever mapping type. Raises ``ClientError`` ``bad_settings``."""
    if isinstance(said, AdapterSettings):
        said = msgspec.structs.asdict(said)
    fields = {**(said or {}), **{name: value for name, value in more.items() if value is not None}}
    return converted(plain(fields), AdapterSettings, "settings")


def sampling_of(*said: Mapping[str, Any]) -> Sampling:
    """How to sample, by the trainer's parameters and the settings; later ones win, and ``None`` says nothing."""
    fields = {name: value for one in said for name, value in plain(one).items() if value is not None}
    try:
        return msgspec.convert(fields, Sampling)
    except msgspec.ValidationError as exc:
        raise ValueError(f"sampling: {exc}") from exc


def converted(value: Any, kind: type[T], what: str) -> T:
    """The value as that type; what is wrong with it is told with the place where it stands."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as exc:
        raise ClientError(f"{what} of the adapter: {exc}", code=BAD_SETTINGS) from exc


def plain(value: Any) -> Any:
    """Numbers, texts, lists and dicts of what a trainer carries: arrays and scalars of numpy, mappings of any kind."""
    try:
        return msgspec.to_builtins(value, enc_hook=_plainer, str_keys=True)
    except (TypeError, ValueError, RecursionError) as exc:
        raise ClientError(f"not plain data: {exc}", code=BAD_SETTINGS) from exc


def _plainer(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): item for name, item in value.items()}
    if isinstance(value, Sequence):
        return list(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is no plain data")
