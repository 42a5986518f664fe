"""Runtimes that plugins bring under ``prorld.sandboxes``, chosen by ``sandbox.runtime``.

The entry point loads to a callable that takes a ``SandboxHost`` and gives an async context manager whose value is the
``SandboxRuntime``: what it needs beside single sandboxes lives as long as the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import cast

import msgspec
import trio

from prorld.errors import ConfigError, chain
from prorld.kit.entry_points import load_parts
from prorld.sandbox.contract import SandboxRuntime
from prorld.sandbox.kinds import KINDS

__all__ = ["GROUP", "RuntimeFactory", "SandboxHost", "run_runtime", "runtime_factory"]

GROUP = "prorld.sandboxes"


class SandboxHost(msgspec.Struct, frozen=True, kw_only=True):
    """Where sandboxes are made: their directory, the daemon's boot id, and whom they run as where that is not us."""

    runtime_dir: Path
    boot_id: str
    user: tuple[int, int] | None = None


RuntimeFactory = Callable[[SandboxHost], AbstractAsyncContextManager[SandboxRuntime]]


def runtime_factory(name: str, *, found: Iterable[EntryPoint] | None = None) -> RuntimeFactory:
    """The factory of a plugin's runtime; ``ConfigError`` where there is none or it is broken."""
    parts = load_parts(GROUP, _sound, found=found)
    part = parts.get(name)
    if part is None:
        there = ", ".join([*KINDS, *parts])
        raise ConfigError(f"sandbox.runtime: there is no runtime {name}; there is {there}")
    if part.value is None:
        raise ConfigError(f"sandbox.runtime: {name} of {part.distribution} can't be used: {part.error}")
    return part.value


def _sound(name: str, value: object) -> RuntimeFactory:
    if name in KINDS:
        raise ConfigError(f"prorld has a runtime {name} of its own")
    if not callable(value):
        raise ConfigError(f"what {name} loads to can't be called")
    return cast("RuntimeFactory", value)


async def run_runtime(
    factory: RuntimeFactory,
    host: SandboxHost,
    *,
    task_status: trio.TaskStatus[SandboxRuntime] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Keep a runtime open until cancelled; hands it out. Raises ``ConfigError`` where it can't be opened."""
    opened = False
    try:
        async with factory(host) as runtime:
            opened = True
            task_status.started(runtime)
            await trio.sleep_forever()
    except Exception as exc:
        if opened:
            raise
        raise ConfigError(f"sandbox.runtime can't be opened: {chain(exc)}") from exc
