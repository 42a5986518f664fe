"""Instances by number: the same number is the same instance in every life of a run.

So a run that goes on after a crash asks for what it asked for before, and needs to remember one number.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from prorld.errors import ConfigError
from prorld.train.run_config import RunSettings

__all__ = ["Prompts", "from_file", "from_generator", "prompts_of"]

# So many instances ``start``, ``start + 1``, ... of an endless sequence.
Prompts = Callable[[int, int], list[dict[str, Any]]]

FILE_BYTES_MAX = 512 << 20
GENERATOR_S_MAX = 120.0
# A generator is asked for so many at once; each such part has a seed of its own.
PART = 256
# Held-out parts have seeds from here on; training would get there after 2**40 parts.
HELD_OUT_SEED = 1 << 40


def prompts_of(settings: RunSettings) -> tuple[Prompts, list[dict[str, Any]]]:
    """The endless instances of training, and those held out for evaluation, which it never sees."""
    tasks, evaluation = settings.tasks, settings.evaluation
    held = [] if evaluation.prompts is None else _read(Path(evaluation.prompts))
    if evaluation.count and held:
        held = held[: evaluation.count]
    if tasks.generator is not None:
        generate = from_generator(tasks.generator, tasks.options, tasks.seed)
        if evaluation.count and not held:
            # The same for every seed, so that runs can be compared.
            held = from_generator(tasks.generator, tasks.options, HELD_OUT_SEED)(0, evaluation.count)
        return generate, held
    lines = _read(Path(tasks.prompts or ""))
    if evaluation.count and not held:
        lines, held = lines[: -evaluation.count], lines[-evaluation.count :]
        if not lines:
            raise ConfigError(f"{tasks.prompts} holds {len(held)} instances: none is left to train on")
    return from_file(lines, tasks.seed), held


def from_file(lines: list[dict[str, Any]], seed: int) -> Prompts:
    """The lines again and again, each time in another order."""

    def take(start: int, count: int) -> list[dict[str, Any]]:
        orders: dict[int, list[int]] = {}
        found: list[dict[str, Any]] = []
        for number in range(start, start + count):
            epoch, place = divmod(number, len(lines))
            if epoch not in orders:
                orders[epoch] = random.Random(f"{seed}-{epoch}").sample(range(len(lines)), len(lines))  # noqa: S311 - an order, no secret
            found.append(lines[orders[epoch][place]])
        return found

    return take


def from_generator(module: str, options: list[str], seed: int) -> Prompts:
    """What a module prints; it is run again for each part of the sequence."""
    parts: dict[int, list[dict[str, Any]]] = {}

    def part(number: int) -> list[dict[str, Any]]:
        if number not in parts:
            parts.clear()
            parts[number] = _generated(module, options, seed + number * 1_000_003)
        return parts[number]

    def take(start: int, count: int) -> list[dict[str, Any]]:
        return [part(number // PART)[number % PART] for number in range(start, start + count)]

    return take


def _generated(module: str, options: list[str], seed: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", module, "--count", str(PART), "--seed", str(seed), *options]
    try:
        done = subprocess.run(command, capture_output=True, timeout=GENERATOR_S_MAX, check=False)  # noqa: S603 - the user named the module
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ConfigError(f"the generator {module} did not come to an end: {exc}") from exc
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise ConfigError(f"the generator {module} ended with {done.returncode}: {said}")
    found = _decoded(done.stdout, f"the generator {module}")
    if len(found) != PART:
        raise ConfigError(f"the generator {module} gave {len(found)} instances where {PART} were asked for")
    return found


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as exc:
        raise ConfigError(f"{path} can't be read: {exc.strerror}") from exc
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} is larger than {FILE_BYTES_MAX} bytes")
    return _decoded(data, str(path))


def _decoded(data: bytes, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            try:
                found.append(msgspec.json.decode(line, type=dict[str, Any]))
            except msgspec.MsgspecError as exc:
                raise ConfigError(f"{name}, line {number}: {exc}") from exc
    if not found:
        raise ConfigError(f"{name} holds no instance")
    return found
