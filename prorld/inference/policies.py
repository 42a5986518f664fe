"""The policies: named models, each with the tokenizer and the renderer that its tokens are made with.

A renderer is made once per policy and set of template variables, in a thread, and kept. It never looks at engines.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
import trio

from prorld.errors import RendererError, boundary
from prorld.kit.lanes import Lane
from prorld.tokens.choice import CHOICES, make_renderer
from prorld.tokens.contract import Renderer
from prorld.tokens.gguf import load_gguf_tokenizer
from prorld.tokens.tokenizer import HfTokenizer

__all__ = ["Policies", "PolicySource", "load_tokenizer"]

# Template variables come from jobs; a trainer uses one or two sets of them.
RENDERERS_MAX = 32


class PolicySource(msgspec.Struct, frozen=True, kw_only=True):
    """Where a policy's tokens come from: a directory with ``tokenizer.json``, or a GGUF file; and who renders."""

    tokenizer: str | None = None
    renderer: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    max_staleness: int | None = None


class Policies:
    """The policies of one daemon."""

    def __init__(self, sources: Mapping[str, PolicySource], lane: Lane) -> None:
        self._sources = dict(sources)
        self._lane = lane
        self._tokenizers: dict[str, HfTokenizer] = {}
        self._renderers: OrderedDict[tuple[str, bytes], Renderer] = OrderedDict()
        self._loading = trio.Lock()

    def names(self) -> Collection[str]:
        """The policies there are, also those that come later."""
        return self._sources.keys()

    def source(self, policy: str) -> PolicySource:
        """Where one's tokens come from."""
        return self._sources[policy]

    def put(self, policy: str, source: PolicySource) -> None:
        """Make or change a policy; sessions that are open keep the renderer that they have."""
        if self._sources.get(policy) == source:
            return
        self._sources[policy] = source
        self._drop_renderers(policy)

    def forget(self, policy: str) -> None:
        """As if it had never been."""
        self._sources.pop(policy, None)
        self._drop_renderers(policy)

    async def check(self, source: PolicySource) -> None:
        """``RendererError`` where its tokenizer can't be loaded, or its renderer can't be made."""
        choice = source.renderer or "auto"
        if choice not in CHOICES:
            raise RendererError(f"there is no renderer {choice!r}; there are {', '.join(CHOICES)}")
        if source.tokenizer is None:
            await trio.lowlevel.checkpoint()
            return
        async with self._loading:
            tokenizer = await self._tokenizer(source.tokenizer)
            with boundary(RendererError, f"making the renderer {choice}"):
                await self._lane.run(make_renderer, tokenizer, source.chat_template_kwargs, choice)

    def _drop_renderers(self, policy: str) -> None:
        for key in [key for key in self._renderers if key[0] == policy]:
            del self._renderers[key]

    async def renderer(
        self, policy: str, chat_template_kwargs: Mapping[str, Any], *, model_path: str | None = None
    ) -> Renderer:
        """The renderer for a job of a policy. Raises ``RendererError``.

        Where no tokenizer is configured, the first engine whose ``model_path`` is on this machine brings it, for good.
        """
        source = self._sources[policy]
        if source.tokenizer is None and model_path is not None and _holds_tokenizer(model_path):
            source = self._sources[policy] = msgspec.structs.replace(source, tokenizer=model_path)
        variables = {**source.chat_template_kwargs, **chat_template_kwargs}
        key = (policy, msgspec.json.encode(variables, order="deterministic"))
        known = self._renderers.get(key)
        if known is not None:
            self._renderers.move_to_end(key)
            return known
        # One at a time, so that a thousand jobs that start together load one tokenizer.
        async with self._loading:
            known = self._renderers.get(key)
            if known is not None:
                return known
            if source.tokenizer is None:
                words = f"policy {policy} has no tokenizer and its engine's model is not on this machine"
                cure = f"name a directory with tokenizer.json as policies.{policy}.tokenizer"
                raise RendererError(f"{words}; {cure}", code="no_tokenizer")
            tokenizer = await self._tokenizer(source.tokenizer)
            with boundary(RendererError, f"making the renderer of policy {policy}"):
                made = await self._lane.run(make_renderer, tokenizer, variables, source.renderer or "auto")
            self._renderers[key] = made
            while len(self._renderers) > RENDERERS_MAX:
                self._renderers.popitem(last=False)
            return made

    async def _tokenizer(self, path: str) -> HfTokenizer:
        if path not in self._tokenizers:
            with boundary(RendererError, f"loading the tokenizer {path}", code="no_tokenizer"):
                self._tokenizers[path] = await self._lane.run(load_tokenizer, path)
        return self._tokenizers[path]


def _holds_tokenizer(path: str) -> bool:
    place = Path(path)
    if not place.is_absolute():
        return False
    return (place.suffix == ".gguf" and place.is_file()) or (place / "tokenizer.json").is_file()


def load_tokenizer(path: str) -> HfTokenizer:
    """From a GGUF file, or a directory with ``tokenizer.json``."""
    place = Path(path).expanduser()
    return load_gguf_tokenizer(place) if place.is_file() else HfTokenizer.from_directory(place)
