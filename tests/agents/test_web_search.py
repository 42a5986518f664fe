"""A search tool is what its provider finds, bounded in number, size and time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio

from prorld.agents import SearchHit, web_search_tool
from prorld.agents.observation import OBSERVATION_BYTES
from prorld.agents.web_search import QUERY_CHARS, RESULTS_MAX
from tests.agents.support import use


class Library:
    """A provider that finds as many pages as are asked for, and does what some queries say."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    async def search(self, query: str, *, limit: int) -> Sequence[SearchHit]:
        self.asked.append((query, limit))
        await trio.lowlevel.checkpoint()
        match query:
            case "hang":
                await trio.sleep_forever()
            case "refuse":
                raise ValueError("no such words")
            case "break":
                raise OSError("the index is gone")
            case "nothing":
                return []
            case "flood":
                return [SearchHit(title="x" * 10_000, excerpt="y" * 100_000)] * 1000
        return [
            SearchHit(title=f"Page {n}", address=f"https://example.org/{n}", excerpt="Words.") for n in range(limit)
        ]


async def test_what_was_found_is_listed_in_order():
    """Number, title, address, excerpt."""
    library = Library()
    said = await use(web_search_tool(library, name="web"), None, query=" trees ", limit="2")
    assert said.text == ("1. Page 0\nhttps://example.org/0\nWords.\n\n2. Page 1\nhttps://example.org/1\nWords.")
    assert library.asked == [("trees", 2)]
    await use(web_search_tool(library), None, query="trees", limit=1000)
    assert library.asked[-1] == ("trees", RESULTS_MAX)


async def test_what_can_not_be_looked_for_is_said():
    """By the tool, or by the provider in its own words."""
    tool = web_search_tool(Library())
    for query, text in (
        ("", f"[not searched: a query has 1 to {QUERY_CHARS} characters]"),
        ("x" * 2000, f"[not searched: a query has 1 to {QUERY_CHARS} characters]"),
        ("refuse", "[not searched: no such words]"),
    ):
        said = await use(tool, None, query=query)
        assert (said.text, said.facts.refused) == (text, "bad_arguments")
    assert (await use(tool, None, query="nothing")).text == "[nothing was found]"
    assert len((await use(tool, None, query="flood", limit=20)).text) < OBSERVATION_BYTES + 100


async def test_a_provider_that_hangs_is_left(autojump_clock: trio.testing.MockClock):
    """At the limit, and the policy is told."""
    said = await use(web_search_tool(Library()), None, limit_s=7, query="hang")
    assert (said.text, said.facts.timed_out) == ("[the search was stopped after 7 s]", True)


async def test_a_provider_that_is_down_is_not_an_observation():
    """A policy must not learn that there is nothing to be found."""
    with pytest.raises(OSError, match="the index is gone"):
        await use(web_search_tool(Library()), None, query="break")
