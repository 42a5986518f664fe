"""A client that does not give up: it asks again until there is an answer, as a trainer does whose daemon comes back."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import trio

from prorld.kit.http_client import HttpClient, HttpError

__all__ = ["AskedInVain", "Caller", "Refused"]

# What passes by itself: a daemon that is full, that drains, whose disk is full.
PASSING = frozenset({429, 502, 503, 504})
AGAIN_S = 0.2
AGAIN_REFUSED_S = 0.2
PAGE = 500


class AskedInVain(Exception):
    """No answer came within the deadline."""


class Refused(Exception):
    """An answer that no repetition changes."""

    def __init__(self, what: str, status: int, body: Any) -> None:
        super().__init__(f"{what} answered {status}: {body}")
        self.status = status
        error = body.get("error", {}) if isinstance(body, dict) else {}
        self.code: str = error.get("code", "")
        self.details: dict[str, Any] = error.get("details") or {}


class Caller:
    """``refusals`` counts the codes of answers that were passing, ``broken`` the exchanges that broke."""

    def __init__(self, address: str, token: str, *, connections_max: int, patience_s: float) -> None:
        self._http = HttpClient(address, connections_max=connections_max)
        self._headers = (("authorization", f"Bearer {token}"), ("content-type", "application/json"))
        self._patience_s = patience_s
        self.refusals: Counter[str] = Counter()
        self.broken = 0

    def close(self) -> None:
        """Close the sockets that are not in use."""
        self._http.close()

    async def get(self, path: str) -> Any:
        """The body of a GET, decoded."""
        return (await self.ask("GET", path))[1]

    async def post(self, path: str, body: Any) -> Any:
        """The body of the answer to a POST, decoded. The request may have been sent more than once."""
        return (await self.ask("POST", path, body))[1]

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and body of an answer that stands. ``Refused`` and ``AskedInVain``."""
        with trio.move_on_after(self._patience_s):
            while True:
                answer = await self.once(method, path, body)
                if answer is None:
                    await trio.sleep(AGAIN_S)
                    continue
                status, found = answer
                if status < 300:
                    return status, found
                if status not in PASSING:
                    raise Refused(f"{method} {path}", status, found)
                self.refusals[found.get("error", {}).get("code", str(status))] += 1
                await trio.sleep(AGAIN_REFUSED_S)
        raise AskedInVain(f"{method} {path}: no answer within {self._patience_s:g} s")

    async def once(self, method: str, path: str, body: Any = None) -> tuple[int, Any] | None:
        """One exchange; ``None`` where it broke, and nobody knows what became of it."""
        data = b"" if body is None else msgspec.json.encode(body)
        try:
            response = await self._http.request(method, path, data, self._headers)
        except HttpError:
            self.broken += 1
            return None
        try:
            return response.status, msgspec.json.decode(response.body) if response.body else {}
        except msgspec.DecodeError:
            return response.status, {}

    async def all(self, path: str) -> list[Any]:
        """Every page of a list."""
        found: list[Any] = []
        next_: str | None = None
        first, rest = ("&", "&") if "?" in path else ("?", "&")
        while True:
            cursor = "" if next_ is None else f"{rest}next={next_}"
            page = await self.get(f"{path}{first}limit={PAGE}{cursor}")
            found += page["items"]
            next_ = page["next"]
            if next_ is None:
                return found

    async def all_events(self, path: str) -> list[Any]:
        """Every event from the first one on."""
        found: list[Any] = []
        after = "0"
        while True:
            page = await self.get(f"{path}?after={after}&limit={PAGE}")
            found += page["items"]
            if page["next"] is None:
                return found
            after = page["next"]
