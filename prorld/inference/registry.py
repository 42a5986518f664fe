"""The clients of engines that there are: those of prorld, and those that plugins bring under ``prorld.backends``.

The entry point's name is a kind of engine that prorld has no client for; it loads to a callable that takes the
``AddBackend`` and gives a ``Backend``. Whatever it raises is the answer to the one who adds such an engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint
from typing import cast, get_args

from prorld.errors import BackendError, ConfigError, chain
from prorld.inference.contract import Backend
from prorld.inference.llamacpp import LlamaCppBackend
from prorld.inference.pool import BackendFactory
from prorld.inference.vllm import VllmBackend
from prorld.kit.entry_points import load_parts
from prorld.wire.ops import AddBackend, BackendKindName

__all__ = ["GROUP", "backend_factories"]

GROUP = "prorld.backends"


def backend_factories(*, found: Iterable[EntryPoint] | None = None) -> dict[str, BackendFactory]:
    """What makes the client of each kind of engine. A plugin that is broken is logged and left out."""
    factories = _own()
    for part in load_parts(GROUP, _sound, found=found).values():
        if part.value is not None:
            factories[part.name] = _contained(part.distribution, part.value)
    return factories


def _own() -> dict[str, BackendFactory]:
    return {
        "vllm": lambda request: VllmBackend(request.url, model=request.model),
        "llamacpp": lambda request: LlamaCppBackend(request.url, model=request.model),
    }


def _sound(name: str, value: object) -> BackendFactory:
    kinds = get_args(BackendKindName)
    if name not in kinds:
        raise ConfigError(f"{name} is no kind of engine; there are {', '.join(kinds)}")
    if name in _own():
        raise ConfigError(f"prorld has a client for {name} of its own")
    if not callable(value):
        raise ConfigError(f"what {name} loads to can't be called")
    return cast("BackendFactory", value)


def _contained(distribution: str, factory: BackendFactory) -> BackendFactory:
    def make(request: AddBackend) -> Backend:
        try:
            return factory(request)
        except ValueError:
            # The pool answers it as a wrong address.
            raise
        except Exception as exc:
            raise BackendError(f"the client of {distribution} can't be made: {chain(exc)}", retryable=False) from exc

    return make
