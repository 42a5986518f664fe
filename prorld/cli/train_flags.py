"""The flags of ``prorld train``: each is a setting of the run's file, by another name."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["FLAGS", "Flag", "add_flags", "chosen"]


class Flag(NamedTuple):
    """One flag: the setting that it is, what its value reads as, and what it does."""

    name: str
    setting: str
    kind: Callable[[str], Any]
    what: str
    choices: tuple[str, ...] | None = None


def number_or_none(text: str) -> int | None:
    """A whole number, or ``none``."""
    return None if text == "none" else int(text)


def numbers(text: str) -> list[float]:
    """Numbers with commas between them."""
    return [float(part) for part in text.split(",")]


FLAGS: dict[str, tuple[Flag, ...]] = {
    "what is trained, and on what": (
        Flag("--model", "model", str, "a directory of Hugging Face's form, or a GGUF file"),
        Flag("--handler", "tasks.handler", str, "the kind of task (default: what the instances name)"),
        Flag("--prompts", "tasks.prompts", str, "a file of instances, one a line, as `prorld data` writes them"),
        Flag("--generator", "tasks.generator", str, "a module that prints instances: python -m M --count N --seed S"),
        Flag("--options", "tasks.options", shlex.split, "more arguments for it, in quotes"),
        Flag("--seed", "tasks.seed", int, "seed of the order of instances and of the learner (0)"),
    ),
    "how long": (
        Flag("--steps", "steps", int, "optimizer steps; more of them later is the same run (100)"),
        Flag("--stop-at", "stop_at", float, "end once the mean reward of a step is that high"),
        Flag("--out", "out", str, "checkpoints, metrics.jsonl and curve.png go there (prorld-run)"),
        Flag("--checkpoint-every", "checkpoint_every", int, "steps between checkpoints; a killed run repeats them (5)"),
    ),
    "a step": (
        Flag("--mode", "mode", str, "sync: collect, then train; async: rollouts never wait (sync)", ("sync", "async")),
        Flag("--groups", "groups.per_step", int, "groups of a step (8)"),
        Flag("--samples", "groups.samples", int, "rollouts of a group (8)"),
        Flag("--rule", "groups.rule", str, "which groups count: spread is DAPO's filter (spread)", ("spread", "all")),
        Flag("--prompts-per-group", "groups.prompts_per_group", int, "prompts tried for a group at most (8)"),
        Flag("--leftovers", "groups.leftovers", str, "rollouts left by a step (carry)", ("carry", "drain", "cancel")),
        Flag("--max-staleness", "groups.max_staleness", number_or_none, "versions a group may lag, or none (2)"),
        Flag("--max-running", "groups.max_running", int, "groups that run at once (1.5 times those of a step)"),
        Flag("--max-ready", "groups.max_ready", int, "async: rollouts stop while so many groups wait (16)"),
        Flag("--empty-max", "groups.empty_max", int, "steps in a row without a group that end the run (1)"),
    ),
    "a rollout": (
        Flag("--temperature", "sampling.temperature", float, "temperature of sampling; 1 is the model's own (1)"),
        Flag("--max-tokens", "sampling.max_tokens", int, "tokens sampled in a turn at most (512)"),
        Flag("--max-turns", "sampling.max_turns", int, "turns of a rollout at most (16)"),
        Flag("--max-context", "sampling.max_context_tokens", int, "tokens of a rollout, its prompt among them (8192)"),
    ),
    "the learner": (
        Flag("--learning-rate", "learn.learning_rate", float, "step size of AdamW (2e-5)"),
        Flag("--loss", "learn.loss", str, "mean over tokens (DAPO) or rollouts (GRPO) (token)", ("token", "sample")),
        Flag("--clip-low", "learn.clip_low", float, "the ratio is clipped below 1 less this (0.2)"),
        Flag("--clip-high", "learn.clip_high", float, "the ratio is clipped above 1 and this (0.28)"),
        Flag("--importance-max", "learn.importance_max", float, "where importance weights are cut off (2)"),
        Flag("--passes", "learn.passes", int, "how often a step goes over its groups (1)"),
        Flag("--grad-norm-max", "learn.grad_norm_max", float, "the gradient's norm is cut to this (1)"),
        Flag("--lora-rank", "learn.lora_rank", int, "train an adapter of this rank, not all weights"),
        Flag("--dtype", "learn.dtype", str, "what the model computes in (bfloat16)", ("bfloat16", "float32")),
        Flag("--device", "learn.device", str, "auto, cpu, cuda, cuda:1 (auto)"),
        Flag("--threads", "learn.threads", int, "threads of torch on the processor (1)"),
        Flag("--packed-tokens", "learn.tokens_max", int, "the longest packed row (8192)"),
    ),
    "handing weights over": (
        Flag(
            "--hand-over", "hand_over.form", str,
            "whole weights or an adapter for vLLM, or one file for the embedded engine (weights)",
            ("weights", "lora", "gguf", "gguf-lora"),
        ),
        Flag("--weights-dir", "hand_over.directory", str, "where the engines can read (default: shared memory)"),
        Flag("--update-mode", "hand_over.mode", str, "what running calls meet (abort)", ("abort", "wait", "keep")),
        Flag("--update-timeout", "hand_over.timeout_s", float, "seconds that a pause may take (300)"),
    ),
    "evaluation": (
        Flag("--eval-count", "evaluation.count", int, "held-out instances, before and after (0: none)"),
        Flag("--eval-prompts", "evaluation.prompts", str, "a file of them (default: generated, or the last lines)"),
        Flag("--eval-every", "evaluation.every", int, "also after every so many steps (0)"),
        Flag("--eval-samples", "evaluation.samples", int, "rollouts of each held-out instance (1)"),
        Flag("--eval-temperatures", "evaluation.temperatures", numbers, "an evaluation at each, as 0,1 (0)"),
    ),
}  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare them in their groups. What is not typed is not there, so that the file's settings hold."""
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            metavar = None if flag.choices else _metavar(flag)
            group.add_argument(
                flag.name, dest=flag.setting, type=flag.kind, choices=flag.choices, metavar=metavar,
                default=argparse.SUPPRESS, help=flag.what.replace("%", "%%"),
            )  # fmt: skip


def chosen(args: argparse.Namespace) -> dict[str, Any]:
    """What was typed, by setting."""
    settings = [flag.setting for flags in FLAGS.values() for flag in flags]
    found = {name: getattr(args, name) for name in settings if hasattr(args, name)}
    if "tasks.seed" in found:
        found["learn.seed"] = found["tasks.seed"]
    return found


def _metavar(flag: Flag) -> str:
    if flag.kind in (int, float, number_or_none):
        return "N"
    own = {"--prompts": "FILE", "--eval-prompts": "FILE", "--out": "DIR", "--weights-dir": "DIR", "--model": "PATH"}
    return (own | {"--generator": "MODULE", "--handler": "NAME", "--eval-temperatures": "N,N"}).get(
        flag.name, flag.name.removeprefix("--").replace("-", "_").upper()
    )
