"""TRL: a ``rollout_func`` for ``GRPOTrainer``, with rollouts that a daemon makes.

    instances = [{"question": "What is 2 plus 3?", "answer": 5}, ...]
    rollouts = ProrldRollouts(handler="calc", weights="/dev/shm/weights")
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, rollout_func=rollouts,
        train_dataset=Dataset.from_list(prompts(instances)), ...,
    )

What TRL calls a prompt is the instance itself, as JSON: the daemon's handler makes the messages and the tokens of it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from prorld.client.adapters.engines import publish, use_engines
from prorld.client.adapters.rollouts import Rollout, Rollouts, instance_from, prompts_of
from prorld.client.adapters.settings import BAD_SETTINGS, AdapterSettings, sampling_of, settings_from
from prorld.client.errors import ClientError
from prorld.export.trl import rollout

__all__ = ["ProrldRollouts", "prompts", "reward", "save_weights"]

HandOver = Callable[[Any, Path], Path]


class _Trainer(Protocol):
    """What is looked at of a ``GRPOTrainer``."""

    args: Any
    state: Any
    accelerator: Any
    model: Any
    processing_class: Any


def prompts(instances: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Rows of a data set for ``GRPOTrainer``: each prompt is an instance as JSON."""
    return [{"prompt": msgspec.json.encode(dict(one), order="sorted").decode()} for one in instances]


def reward(
    completions: Sequence[Any], env_reward: Sequence[float | None] | None = None, **_: Any
) -> list[float | None]:
    """The reward function to give to ``GRPOTrainer``: what the daemon's grader said, ``None`` where it said nothing.

    TRL leaves ``None`` out of the group's mean and spread, and such a row has no advantage.
    """
    return [None] * len(completions) if env_reward is None else [*env_reward]


class ProrldRollouts:
    """``rollout_func=ProrldRollouts(...)``. Settings are those of ``AdapterSettings``, by name.

    ``weights`` is a directory that the engines can see: before each new step the trainer's weights are written there
    and loaded by them (``how="reload"``; with ``"lora"`` the adapter). Without it the policy stays as it is.
    ``hand_over`` writes them in another way; ``instance_of`` makes an instance of a prompt that is none.
    """

    def __init__(
        self,
        settings: AdapterSettings | Mapping[str, Any] | None = None,
        *,
        weights: str | Path | None = None,
        how: Literal["reload", "lora"] = "reload",
        hand_over: HandOver | None = None,
        instance_of: Callable[[Any], Mapping[str, Any]] | None = None,
        **more: Any,
    ) -> None:
        self._settings = settings_from(settings, **more)
        if self._settings.branches != "last":
            raise ClientError("TRL has one row for a rollout: branches must be 'last'", code=BAD_SETTINGS)
        if weights is not None and not Path(weights).is_absolute():
            raise ClientError(f"weights must be an absolute path, and not {str(weights)!r}", code=BAD_SETTINGS)
        self._rollouts = Rollouts(self._settings)
        self._weights = None if weights is None else Path(weights)
        self._how: Literal["reload", "lora"] = how
        self._hand_over = hand_over or save_weights
        self._instance_of = instance_of
        self._step: int | None = None
        self._written: Path | None = None

    def close(self) -> None:
        """Acknowledge what was handed out last. For the end of training."""
        self._rollouts.close()

    def __call__(self, asked: Sequence[Any], trainer: _Trainer) -> dict[str, list[Any]]:
        """One rollout for each prompt, in their order. Equal neighbours are one group: TRL repeats prompts itself."""
        is_eval = not trainer.model.training
        self._prepare(trainer)
        instances = [self._instance(prompt, place) for place, prompt in enumerate(asked)]
        step = f"{'eval' if is_eval else 'step'}{trainer.state.global_step}-p{trainer.accelerator.process_index}"
        sampling = sampling_of(_said(trainer.args), self._settings.sampling)
        groups = self._rollouts.collect(step, prompts_of(instances), sampling, is_eval=is_eval)
        return _columns([one for group in groups for one in group.rollouts], _filler(trainer.processing_class))

    def _instance(self, prompt: Any, place: int) -> dict[str, Any]:
        made = prompt if self._instance_of is None else self._instance_of(prompt)
        return instance_from(made, f"prompt {place}")

    def _prepare(self, trainer: _Trainer) -> None:
        """Engines, and the weights of this step in them, once for all processes."""
        if trainer.state.global_step == self._step:
            return
        client, settings = self._rollouts.client, self._settings
        if trainer.accelerator.is_main_process:
            self._rollouts.engines = settings.backends()
            use_engines(client, settings.policy, self._rollouts.engines)
        if self._weights is not None:
            path = self._hand_over(trainer, self._weights / f"step-{trainer.state.global_step}")
            if trainer.accelerator.is_main_process:
                publish(client, settings, self._how, path)
                self._forget(path)
        trainer.accelerator.wait_for_everyone()
        self._step = trainer.state.global_step

    def _forget(self, path: Path) -> None:
        """The weights before these: no engine will be told to load them again."""
        if self._written is not None and self._written != path:
            shutil.rmtree(self._written, ignore_errors=True)
        self._written = path


def save_weights(trainer: _Trainer, directory: Path) -> Path:
    """The trainer's weights as a directory that an engine loads: the whole model, or the adapter of a PEFT model.

    The head is written as a tensor of its own. Where it is tied to the embeddings, CPU builds of vLLM keep a copy of it
    that a reload does not reach, and go on with the old head without a word.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    state = trainer.accelerator.get_state_dict(trainer.model)
    if not trainer.accelerator.is_main_process:
        return directory
    if hasattr(model, "peft_config"):
        model.save_pretrained(directory, state_dict=state)
        return directory
    tied = model.config.tie_word_embeddings
    model.config.tie_word_embeddings = False
    try:
        model.save_pretrained(directory, state_dict=_with_own_head(model, state))
    finally:
        model.config.tie_word_embeddings = tied
    trainer.processing_class.save_pretrained(directory)
    return directory


def _with_own_head(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    head = model.get_output_embeddings()
    names = [f"{name}.weight" for name, part in model.named_modules() if part is head]
    if head is None or head.weight is not model.get_input_embeddings().weight:
        return state
    return {**state, **{name: head.weight.detach().clone() for name in names}}


def _said(args: Any) -> dict[str, Any]:
    """How TRL wants to sample, in our words. Its 0 for ``top_k`` is no limit."""
    return {
        "temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k or None, "min_p": args.min_p,
        "max_tokens": args.max_completion_length,
    }  # fmt: skip


def _filler(processing: Any) -> int:
    """A token to stand, unmasked, where a rollout left none: TRL wants at least one in each row."""
    tokenizer = getattr(processing, "tokenizer", processing)
    return next((int(one) for one in (tokenizer.pad_token_id, tokenizer.eos_token_id) if one is not None), 0)


def _columns(rollouts: Sequence[Rollout], filler: int) -> dict[str, list[Any]]:
    """What TRL reads. What may not be trained on has its row: nothing of it is in the loss, and it has no reward."""
    columns: dict[str, list[Any]] = {}
    for one in rollouts:
        row = (
            _nothing(one, filler)
            if one.document is None
            else rollout([one.document], last_branch=True, filler_id=filler)
        )
        for name, value in row.items():
            columns.setdefault(name, []).extend(value)
    return columns


def _nothing(one: Rollout, filler: int) -> dict[str, list[Any]]:
    return {
        "prompt_ids": [[filler]], "completion_ids": [[filler]], "logprobs": [[0.0]], "env_mask": [[0]],
        "env_reward": [None], "job_id": [one.job_id], "outcome": [None], "verdict": [one.verdict],
    }  # fmt: skip
