"""The client of an address that speaks OpenAI's routes, of which nothing more is known.

What the engine calls itself decides: vLLM and llama.cpp are used by their own exact clients, everything else by text
alone. Which one it was is in the probe's details as ``spoken_to_as``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import msgspec

from prorld.domain.versions import PolicyVersion
from prorld.inference.contract import (
    Backend,
    BackendKind,
    Capabilities,
    EngineLoad,
    Generation,
    GenerationRequest,
    PauseMode,
    WeightRef,
)
from prorld.inference.llamacpp import LlamaCppBackend
from prorld.inference.openai_text import TextBackend
from prorld.inference.vllm import VllmBackend
from prorld.kit.http_client import ClientStatistics

__all__ = ["OpenAIBackend"]

_Exact = VllmBackend | LlamaCppBackend

# By what engines write as the owner of their models.
_EXACT: dict[str, Callable[..., _Exact]] = {"vllm": VllmBackend, "llamacpp": LlamaCppBackend}


class OpenAIBackend:
    """One engine behind ``url``, with or without ``/v1`` at its end. ``text_only`` leaves exact clients aside."""

    def __init__(
        self, url: str, *, model: str | None = None, api_key: str | None = None, text_only: bool = False
    ) -> None:
        self._url = url
        self._root = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._api_key = api_key
        self._text_only = text_only
        self._text = TextBackend(self._root, model=model, api_key=api_key)
        self._exact: _Exact | None = None
        self._owner: str | None = None

    def __repr__(self) -> str:
        return f"<OpenAIBackend {self._url}>"

    @property
    def kind(self) -> BackendKind:
        """Which API it speaks."""
        return "openai"

    @property
    def url(self) -> str:
        """Where the engine is."""
        return self._url

    @property
    def _client(self) -> Backend:
        return self._text if self._exact is None else self._exact

    async def probe(self) -> Capabilities:
        """Ask the engine who it is, and let its own client ask the rest."""
        owner = (await self._text.card()).owned_by or ""
        if owner != self._owner:
            before, self._exact = self._exact, None
            if before is not None:
                await before.aclose()
            make = None if self._text_only else _EXACT.get(owner)
            if make is not None:
                self._exact = make(self._root, model=self._model, api_key=self._api_key)
            self._owner = owner
        found = await self._client.probe()
        details = {**found.details, "spoken_to_as": "openai" if self._exact is None else owner}
        return msgspec.structs.replace(found, details=details)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample. Raises ``BackendError`` or one of its kinds."""
        return await self._client.generate(request)

    async def healthy(self) -> bool:
        """Whether the engine is well."""
        return await self._client.healthy()

    async def load(self) -> EngineLoad:
        """What the engine says of its load."""
        return await self._client.load()

    async def score(self, token_ids: array[int], start: int) -> array[float]:
        """The raw log-probability of every token from ``start`` on."""
        return await self._client.score(token_ids, start)

    async def pause(self, mode: PauseMode) -> None:
        """Start nothing new."""
        await self._client.pause(mode)

    async def resume(self) -> None:
        """Start again."""
        await self._client.resume()

    async def load_weights(self, ref: WeightRef) -> None:
        """Load weights."""
        await self._client.load_weights(ref)

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        await self._client.unload_adapter(name)

    async def clear_cache(self) -> None:
        """Forget every prefix."""
        await self._client.clear_cache()

    async def set_version(self, version: PolicyVersion) -> None:
        """Tell the engine its version."""
        await self._client.set_version(version)

    async def read_version(self) -> PolicyVersion | None:
        """What the engine calls its weights."""
        return await self._client.read_version()

    def statistics(self) -> ClientStatistics:
        """The sockets of the calls to this engine."""
        return (self._text if self._exact is None else self._exact).statistics()

    async def aclose(self) -> None:
        """Close pooled sockets."""
        await self._text.aclose()
        if self._exact is not None:
            await self._exact.aclose()
