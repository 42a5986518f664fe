"""What a training run is asked for: typed, strict, from a TOML file and from flags that win over it."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from prorld.domain.batch import Leftovers
from prorld.domain.job import AgentLimits, Sampling
from prorld.domain.policy import Mode
from prorld.errors import ConfigError
from prorld.train.shapes import Form, LearnSettings

__all__ = [
    "EvaluationSettings",
    "GroupSettings",
    "HandOverSettings",
    "RunSettings",
    "SamplingSettings",
    "TaskSettings",
    "read_settings",
    "unlike",
]

# Groups that run at once, of those of a step; as a batch with a target has it.
RUNNING_SHARE = 1.5
# That a batch keeps until they are acknowledged.
GROUPS_MAX = 1_000_000
Some = Annotated[int, Meta(ge=1, le=1_000_000)]
Temperatures = Annotated[list[Annotated[float, Meta(ge=0, le=100)]], Meta(min_length=1, max_length=8)]

# What may be changed when a run goes on: how long it is, what is looked at, how weights get to the engine.
_FREE = frozenset({"out", "steps", "stop_at", "checkpoint_every", "hand_over", "evaluation"})
_FREE_GROUPS = frozenset({"empty_max"})


class TaskSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where instances come from: a file of them, or a module that prints them (``python -m MODULE --count --seed``)."""

    handler: str | None = None
    prompts: str | None = None
    generator: str | None = None
    # More arguments for the generator.
    options: list[str] = []
    seed: int = 0


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a step is made of. ``spread`` is DAPO's dynamic sampling, ``all`` is GRPO as it was."""

    per_step: Some = 8
    samples: Annotated[int, Meta(ge=2, le=4096)] = 8
    rule: Literal["spread", "all"] = "spread"
    # A step that has tried so many prompts for each group that it wants ends with what it has.
    prompts_per_group: Some = 8
    leftovers: Leftovers = "carry"
    max_staleness: Annotated[int, Meta(ge=0, le=1_000_000)] | None = 2
    max_running: Some | None = None
    # Asynchronous: rollouts stop while so many groups wait for the trainer.
    max_ready: Some = 16
    # So many steps in a row without a group to learn from are the end.
    empty_max: Some = 1

    @property
    def running(self) -> int:
        """How many groups run at once."""
        return self.max_running or math.ceil(RUNNING_SHARE * self.per_step)


class SamplingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rollouts are sampled, and how far they may go."""

    temperature: Annotated[float, Meta(gt=0, le=100)] = 1.0
    max_tokens: Some = 512
    max_turns: Annotated[int, Meta(ge=1, le=10_000)] = 16
    max_context_tokens: Annotated[int, Meta(ge=16, le=10_000_000)] = 8192

    def sampling(self, temperature: float | None = None) -> Sampling:
        """As a batch has it."""
        return Sampling(
            temperature=self.temperature if temperature is None else temperature, max_tokens=self.max_tokens
        )

    def limits(self) -> AgentLimits:
        """As a batch has it."""
        return AgentLimits(max_turns=self.max_turns, max_context_tokens=self.max_context_tokens)


class HandOverSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How new weights get to the engines. ``directory`` is one that they can read; unset: in shared memory."""

    form: Form = "weights"
    directory: str | None = None
    # What becomes of calls that run: see docs/policies.md.
    mode: Mode = "abort"
    timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 300.0


class EvaluationSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Held-out instances: from a file, or the generator's under a seed that training never uses."""

    count: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    prompts: str | None = None
    every: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    samples: Some = 1
    temperatures: Temperatures = msgspec.field(default_factory=lambda: [0.0])


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run."""

    model: str
    out: str = "prorld-run"
    steps: Annotated[int, Meta(ge=0, le=1_000_000)] = 100
    mode: Literal["sync", "async"] = "sync"
    policy: str = "default"
    checkpoint_every: Some = 5
    # The run is over once the mean reward of a step is that high.
    stop_at: float | None = None
    tasks: TaskSettings = TaskSettings()
    groups: GroupSettings = GroupSettings()
    sampling: SamplingSettings = SamplingSettings()
    learn: LearnSettings = LearnSettings()
    hand_over: HandOverSettings = HandOverSettings()
    evaluation: EvaluationSettings = EvaluationSettings()

    @property
    def unacknowledged(self) -> int:
        """How many groups of a stream the daemon keeps: that wait for the trainer, or for its next checkpoint."""
        return self.groups.max_ready + self.checkpoint_every * self.groups.per_step


def read_settings(file: str | None, flags: Mapping[str, Any]) -> RunSettings:
    """The file's settings under those of the flags, each named as ``section.setting``. Raises ``ConfigError``."""
    found: dict[str, Any] = {}
    if file is not None:
        try:
            found = tomllib.loads(Path(file).read_text("utf-8"))
        except (OSError, ValueError) as exc:
            # What the system says names the file, too.
            raise ConfigError(f"{file} can't be read: {getattr(exc, 'strerror', None) or exc}") from exc
    for name, value in flags.items():
        *sections, last = name.split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{file}: {section} is no section")
        place[last] = value
    if "model" not in found:
        raise ConfigError(
            "name the model that is trained (--model): a directory of Hugging Face's form, or a GGUF file"
        )
    try:
        settings = msgspec.convert(found, RunSettings)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{file or 'the flags'}: {exc}") from exc
    _check(settings)
    return settings


def _check(settings: RunSettings) -> None:
    tasks, evaluation = settings.tasks, settings.evaluation
    if (tasks.prompts is None) == (tasks.generator is None):
        raise ConfigError("name the tasks: a file of instances (--prompts), or a module that prints them (--generator)")
    if (settings.hand_over.form in ("lora", "gguf-lora")) != (settings.learn.lora_rank is not None):
        raise ConfigError("--hand-over lora or gguf-lora and --lora-rank go together: an adapter is trained and loaded")
    if evaluation.every and not evaluation.count and evaluation.prompts is None:
        raise ConfigError("--eval-every needs instances: --eval-count, or --eval-prompts")
    if settings.mode == "async" and settings.unacknowledged > GROUPS_MAX:
        message = f"the daemon keeps {GROUPS_MAX} groups of a stream: --checkpoint-every times --groups is too large"
        raise ConfigError(message)


def unlike(old: Mapping[str, Any], new: RunSettings) -> list[str]:
    """The settings in which a run that goes on would not be the same run."""
    before, now = _lasting(old), _lasting(msgspec.to_builtins(new))
    return [name for name in now if before.get(name) != now[name]]


def _lasting(settings: Mapping[str, Any]) -> dict[str, Any]:
    lasting = {name: value for name, value in settings.items() if name not in _FREE}
    groups = {name: value for name, value in lasting.get("groups", {}).items() if name not in _FREE_GROUPS}
    return {**lasting, "groups": groups}
