"""The clients of engines that there are: those of prorld, and those that plugins bring under ``prorld.backends``.

The entry point's name is a kind of engine, and what it loads to takes the ``AddBackend`` and gives a ``Backend``; it is
used in the place of prorld's own client. Only the kinds that prorld starts by itself keep theirs. Whatever the callable
raises is the answer to the one who adds such an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint
from typing import cast, get_args

from prorld.config.sections import EngineKey
from prorld.errors import BackendError, ConfigError, chain
from prorld.inference.contract import Backend
from prorld.inference.llamacpp import LlamaCppBackend
from prorld.inference.openai import OpenAIBackend
from prorld.inference.pool import BackendFactory
from prorld.inference.prorl import ProrlBackend
from prorld.inference.sglang import SglangBackend
from prorld.inference.vllm import VllmBackend
from prorld.kit.entry_points import load_parts
from prorld.wire.ops import AddBackend, BackendKindName

__all__ = ["GROUP", "backend_factories", "read_engine_keys"]

GROUP = "prorld.backends"

# The kinds of the engines that prorld starts.
_STARTED = frozenset({"vllm", "llamacpp"})

_CLIENTS: dict[BackendKindName, Callable[..., Backend]] = {
    "vllm": VllmBackend,
    "sglang": SglangBackend,
    "llamacpp": LlamaCppBackend,
    "openai": OpenAIBackend,
    "prorl": ProrlBackend,
}


def read_engine_keys(entries: Iterable[EngineKey], environment: Mapping[str, str]) -> dict[str, str]:
    """The keys by the address they go to. Raises ``ConfigError`` for a variable that is not set."""
    keys: dict[str, str] = {}
    for entry in entries:
        key = environment.get(entry.env)
        if not key:
            raise ConfigError(f"engine_keys: {entry.env}, the key of {entry.url}, is not in the environment")
        keys[entry.url.rstrip("/")] = key
    return keys


def backend_factories(
    *, found: Iterable[EntryPoint] | None = None, keys: Mapping[str, str] | None = None
) -> dict[str, BackendFactory]:
    """What makes the client of each kind of engine. A plugin that is broken is logged and left out.

    ``keys`` are those of ``read_engine_keys``; plugins get none of them.
    """
    factories = _own(keys or {})
    for part in load_parts(GROUP, _sound, found=found).values():
        if part.value is not None:
            factories[part.name] = _contained(part.distribution, part.value)
    return factories


def _own(keys: Mapping[str, str]) -> dict[str, BackendFactory]:
    def of(make: Callable[..., Backend]) -> BackendFactory:
        return lambda request: make(request.url, model=request.model, api_key=_key_for(request.url, keys))

    return {kind: of(make) for kind, make in _CLIENTS.items()}


def _key_for(url: str, keys: Mapping[str, str]) -> str | None:
    """The key of the longest address that the url is, or is below."""
    fitting = [place for place in keys if url.rstrip("/") == place or url.startswith(f"{place}/")]
    return keys[max(fitting, key=len)] if fitting else None


def _sound(name: str, value: object) -> BackendFactory:
    kinds = get_args(BackendKindName)
    if name not in kinds:
        raise ConfigError(f"{name} is no kind of engine; there are {', '.join(kinds)}")
    if name in _STARTED:
        raise ConfigError(f"prorld starts engines of kind {name} and keeps its own client for them")
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
