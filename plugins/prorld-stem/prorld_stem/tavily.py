"""Search on the web by Tavily's API. The key is read from a file of the operator's, and is shown to nobody."""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import trio
from msgspec import Meta

from prorld.agents import SearchHit
from prorld.handlers import HandlerError
from prorld_stem.http_request import Address, HttpFailed, Reply, post_json

__all__ = ["Tavily", "read_key"]

URL: Final = "https://api.tavily.com/search"
KEY_BYTES: Final = 512
# What the service takes of a query.
QUERY_CHARS: Final = 400
TRIES: Final = 3
TRY_S: Final = 15.0
PAUSE_S: Final = 0.5
EXCERPT_CHARS: Final = 4_000
_AGAIN: Final = frozenset({408, 429, 500, 502, 503, 504})


class _Result(msgspec.Struct, frozen=True, kw_only=True):
    title: str = ""
    url: str = ""
    content: str = ""


class _Found(msgspec.Struct, frozen=True, kw_only=True):
    results: Annotated[list[_Result], Meta(max_length=100)]


def read_key(path: Path) -> str:
    """The key in a file that only its owner may read. Raises ``HandlerError``, without any of the content. Blocks."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        raise HandlerError(f"the key file {path} can't be read: {exc.strerror}", code="key_unreadable") from exc
    try:
        # Of the descriptor: what is looked at is what is read.
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise HandlerError(f"the key file {path} is no ordinary file", code="key_unreadable")
        if found.st_mode & 0o077:
            message = f"the key file {path} may be read by others than its owner: chmod 600 it"
            raise HandlerError(message, code="key_exposed")
        data = os.read(descriptor, KEY_BYTES + 1)
    except OSError as exc:
        raise HandlerError(f"the key file {path} can't be read: {exc.strerror}", code="key_unreadable") from exc
    finally:
        os.close(descriptor)
    key = data.strip()
    if not key or len(data) > KEY_BYTES or not all(0x21 <= byte <= 0x7E for byte in key):
        raise HandlerError(f"the key file {path} holds no key: one line of ASCII is wanted", code="key_unreadable")
    return key.decode("ascii")


class Tavily:
    """A search provider."""

    def __init__(self, key: str, *, url: str = URL, ca_file: Path | None = None) -> None:
        self._key = key
        self._address = Address.of(url)
        self._trust = ssl.create_default_context(cafile=ca_file) if self._address.secure else None

    def __repr__(self) -> str:
        return f"<Tavily at {self._address.host}>"

    async def search(self, query: str, *, limit: int) -> Sequence[SearchHit]:
        """The best hits. A service that is busy or away is asked again, a few times."""
        if len(query) > QUERY_CHARS:
            raise ValueError(f"a query has at most {QUERY_CHARS} characters")
        body = msgspec.json.encode({"query": query, "max_results": limit, "search_depth": "basic"})
        trouble = "it did not answer in time"
        for number in range(TRIES):
            if number:
                await trio.sleep(PAUSE_S * 2**number)
            try:
                with trio.move_on_after(TRY_S):
                    reply = await post_json(self._address, body, bearer=self._key, trust=self._trust)
                    if reply.status not in _AGAIN:
                        return self._hits(reply)[:limit]
                    trouble = f"it answers {reply.status}"
            except HttpFailed as exc:
                trouble = str(exc)
        raise HandlerError(f"the search service can't be used: {trouble}", code="search_failed", retryable=True)

    def _hits(self, reply: Reply) -> list[SearchHit]:
        if reply.status == 400:
            raise ValueError("the search service does not take this query")
        if reply.status != 200:
            raise HandlerError(f"the search service answers {reply.status}", code="search_refused")
        try:
            found = msgspec.json.decode(reply.body, type=_Found)
        except (msgspec.DecodeError, UnicodeError) as exc:
            raise HandlerError(f"the search service answers something else: {exc}", code="search_failed") from exc
        return [
            SearchHit(title=one.title, address=one.url, excerpt=one.content[:EXCERPT_CHARS]) for one in found.results
        ]
