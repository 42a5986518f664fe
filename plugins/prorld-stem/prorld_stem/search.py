"""Which search the tool ``web_search`` has, by configuration: Tavily's service, or an index of the operator's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec
import trio
from msgspec import Meta

from prorld.agents import SearchProvider, Tool, web_search_tool
from prorld.errors import ConfigError
from prorld_stem.library import Library
from prorld_stem.tavily import URL, Tavily, read_key

__all__ = ["SEARCH_TOOL", "SearchPlan", "open_search", "search_tool"]

SEARCH_TOOL: Final = "web_search"


class SearchPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the two, or none: then there is no such tool. ``offered`` says that jobs get it without asking for it."""

    library: str | None = None
    tavily_key_file: str | None = None
    tavily_url: Annotated[str, Meta(max_length=1_000)] = URL
    tavily_ca_file: str | None = None
    offered: bool = True

    @property
    def wanted(self) -> bool:
        """Whether there is anything to search in."""
        return self.library is not None or self.tavily_key_file is not None


async def open_search(plan: SearchPlan) -> SearchProvider | None:
    """The provider, looked at once: a missing key or index is told when the handler is opened, and not by a rollout."""
    if plan.library is not None and plan.tavily_key_file is not None:
        raise ConfigError("search has a library and a key of Tavily; it takes one of them")
    if plan.library is not None:
        library = Library(Path(plan.library))
        await trio.to_thread.run_sync(library.check)
        return library
    if plan.tavily_key_file is not None:
        key = await trio.to_thread.run_sync(read_key, Path(plan.tavily_key_file))
        ca_file = None if plan.tavily_ca_file is None else Path(plan.tavily_ca_file)
        try:
            return Tavily(key, url=plan.tavily_url, ca_file=ca_file)
        except (ValueError, OSError) as exc:
            raise ConfigError(f"search.tavily_url or search.tavily_ca_file can't be used: {exc}") from exc
    return None


def search_tool(provider: SearchProvider) -> Tool:
    """The tool that a policy is offered."""
    return web_search_tool(provider, name=SEARCH_TOOL, description="Search for texts by a few words.")
