"""Search outside of the sandbox: what a provider is, and the tool made of one. None comes with prorld."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Protocol

import msgspec
import trio
from msgspec import Meta

from prorld.agents.observation import Observation, ToolFacts, clip, refusal
from prorld.agents.tools import Tool, async_tool

__all__ = ["QUERY_CHARS", "RESULTS_MAX", "SearchHit", "SearchProvider", "web_search_tool"]

QUERY_CHARS = 1000
RESULTS_MAX = 20
TITLE_BYTES = 300
EXCERPT_BYTES = 1500


class SearchHit(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was found."""

    title: str
    address: str = ""
    excerpt: str = ""


class SearchProvider(Protocol):
    """Finds things by a query.

    It raises ``ValueError`` for a query that it can't take: the policy reads the message. What else it raises is its
    own trouble and ends the stage, since a policy must not learn from a search engine that is down.
    """

    async def search(self, query: str, *, limit: int) -> Sequence[SearchHit]:
        """The best ``limit`` hits, best first. The caller bounds the time."""
        ...


class _Query(msgspec.Struct, frozen=True, kw_only=True):
    query: Annotated[str, Meta(description="What to look for.")]
    limit: Annotated[int, Meta(description="How many results are wanted.")] = 5


def web_search_tool(
    provider: SearchProvider, *, name: str = "search", description: str = "Search for pages by a query."
) -> Tool:
    """A tool that asks a provider."""

    async def run(given: _Query, limit_s: float) -> Observation:
        query = given.query.strip()
        if not query or len(query) > QUERY_CHARS:
            return refusal(f"[not searched: a query has 1 to {QUERY_CHARS} characters]", "bad_arguments")
        limit = max(1, min(given.limit, RESULTS_MAX))
        began = trio.current_time()
        hits: Sequence[SearchHit] | None = None
        try:
            with trio.move_on_after(limit_s):
                hits = await provider.search(query, limit=limit)
        except ValueError as exc:
            return refusal(f"[not searched: {clip(str(exc), 500)}]", "bad_arguments")
        seconds = trio.current_time() - began
        if hits is None:
            facts = ToolFacts(duration_s=seconds, timed_out=True)
            return Observation(text=f"[the search was stopped after {limit_s:g} s]", facts=facts)
        text = "\n\n".join(_said(number, hit) for number, hit in enumerate(hits[:limit], 1))
        facts = ToolFacts(duration_s=seconds, output_bytes=len(text.encode("utf-8", "replace")))
        return Observation(text=clip(text) if text else "[nothing was found]", facts=facts)

    return async_tool(name, description, _Query, run)


def _said(number: int, hit: SearchHit) -> str:
    head = f"{number}. {_line(hit.title)}"
    return "\n".join(part for part in (head, _line(hit.address), clip(hit.excerpt.strip(), EXCERPT_BYTES)) if part)


def _line(text: str) -> str:
    return clip(" ".join(text.split()), TITLE_BYTES)
