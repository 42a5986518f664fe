"""Where a distribution's files come from: pages and files of web servers, and of directories on this machine.

It owns passwords: they are taken out of every address that comes in, and go to the server that they came for alone.
"""

from __future__ import annotations

import base64
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit, urlunsplit
from urllib.request import url2pathname

import trio

from prorld.cli.exits import UsageError
from prorld.cli.package_index import ACCEPT, Link, PackageError, Wanted, links_of, named
from prorld.cli.package_settings import IndexSettings
from prorld.kit.http_client import HttpError, ResponseTooLarge
from prorld.kit.http_download import Got, Origin, download, origin_of

__all__ = ["Source", "shown"]

PAGE_BYTES_MAX = 64 << 20
FILES_MAX = 100_000
TRIES_MAX = 3
TRY_AGAIN_S = 1.0
_COPY_BYTES = 1 << 20
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

Write = Callable[[bytes], object]


class Source:
    """The places of the settings. What it can't reach it says in a ``PackageError``."""

    def __init__(self, index: IndexSettings) -> None:
        self._index = index
        self._passwords: dict[Origin, str] = {}
        self._indexes = [self._public(place) for place in index.indexes]
        self._links = [self._public(place) for place in index.links]
        try:
            self._trust = ssl.create_default_context(cafile=index.certificates)
        except OSError as exc:
            raise UsageError(f"the certificates in {index.certificates} can't be read: {exc}") from exc

    async def links(self, what: Wanted, warn: Callable[[str], None]) -> list[Link]:
        """All files that the places have of it. Raises where none of them can be asked; else ``warn`` tells of some."""
        found: list[Link] = []
        troubles: list[PackageError] = []
        pages = [(f"{root.rstrip('/')}/{what.name}/", True) for root in self._indexes]
        for place, is_index in (*pages, *((link, False) for link in self._links)):
            try:
                found += await self._page(place, is_index=is_index)
            except PackageError as exc:
                troubles.append(exc)
        if troubles and not found:
            raise troubles[0]
        for trouble in troubles:
            warn(trouble.message)
        return found

    async def file(self, link: Link, begin: Callable[[], Write], bytes_max: int) -> None:
        """Hand on a file's bytes; ``begin`` gives where they go, again for every new try."""
        local = _local(link.url)
        if local is not None:
            await trio.to_thread.run_sync(_copy, local, begin(), bytes_max)
            return
        got = await self._get(link.url, begin, bytes_max, "*/*")
        if got.status != 200:
            raise PackageError(f"{shown(link.url)} answers {got.status}", code="index_failed", retryable=True)

    async def _page(self, place: str, *, is_index: bool) -> list[Link]:
        local = _local(place)
        if local is not None:
            return await trio.to_thread.run_sync(_directory, local, is_index)
        parts: list[bytes] = []

        def begin() -> Write:
            parts.clear()
            return parts.append

        got = await self._get(place, begin, PAGE_BYTES_MAX, ACCEPT)
        if got.status == 404 and is_index:
            return []
        if got.status != 200:
            retryable = got.status >= 500 or got.status == 429
            raise PackageError(f"{shown(place)} answers {got.status}", code="index_failed", retryable=retryable)
        try:
            found = await trio.to_thread.run_sync(
                links_of, b"".join(parts), got.headers.get("content-type", "text/html"), got.url
            )
        except ValueError as exc:
            raise PackageError(f"{shown(place)} is no page of an index: {exc}", code="index_failed") from exc
        return [Link(url=self._public(x.url), filename=x.filename, sha256=x.sha256, yanked=x.yanked) for x in found]

    async def _get(self, url: str, begin: Callable[[], Write], bytes_max: int, accept: str) -> Got:
        for attempt in range(1, TRIES_MAX + 1):
            last = attempt == TRIES_MAX
            try:
                got = await download(
                    url, begin(), bytes_max=bytes_max, headers=lambda origin: self._headers(origin, accept),
                    plain_allowed=self._plain_allowed, trust=self._trust,
                )  # fmt: skip
            except ResponseTooLarge as exc:
                raise PackageError(f"{shown(url)}: {exc}", code="package_too_large") from exc
            except HttpError as exc:
                if last:
                    raise PackageError(f"{shown(url)}: {exc}", code="index_failed", retryable=True) from exc
            else:
                if last or (got.status < 500 and got.status != 429):
                    return got
            await trio.sleep(TRY_AGAIN_S * attempt)
        raise AssertionError

    def _headers(self, origin: Origin, accept: str) -> Sequence[tuple[str, str]]:
        password = self._passwords.get(origin)
        return [("accept", accept), ("user-agent", "prorld"), *([("authorization", password)] if password else [])]

    def _plain_allowed(self, origin: Origin) -> bool:
        _, host, port = origin
        return host in _LOOPBACK or not {host, f"{host}:{port}", "*"}.isdisjoint(self._index.trusted_hosts)

    def _public(self, place: str) -> str:
        """The address without its password, which is kept for the server."""
        parts = urlsplit(place)
        if parts.scheme not in ("http", "https") or "@" not in parts.netloc:
            return place
        user, _, host = parts.netloc.rpartition("@")
        name, _, secret = user.partition(":")
        token = base64.b64encode(f"{unquote(name)}:{unquote(secret)}".encode()).decode()
        clean = urlunsplit(parts._replace(netloc=host))
        self._passwords.setdefault(origin_of(clean), f"Basic {token}")
        return clean


def shown(url: str) -> str:
    """An address for people: without a password, a query, or anything else that may be secret."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))


def _local(place: str) -> Path | None:
    if place.startswith("file:"):
        return Path(url2pathname(urlsplit(place).path))
    return None if "://" in place else Path(place).expanduser()


def _directory(path: Path, is_index: bool) -> list[Link]:  # noqa: FBT001 - for a thread, by position
    """The files of a directory, or those that its page names; blocks. An index may well not have the distribution."""
    try:
        page = path / "index.html" if path.is_dir() else path
        if is_index and not page.is_file():
            return []
        if page.is_file():
            with page.open("rb") as file:
                data = file.read(PAGE_BYTES_MAX + 1)
            if len(data) > PAGE_BYTES_MAX:
                raise PackageError(f"{page} is larger than {PAGE_BYTES_MAX} bytes", code="package_too_large")
            return links_of(data, "text/html", page.resolve().as_uri())
        names = sorted(each.name for each in path.iterdir())[:FILES_MAX]
    except OSError as exc:
        raise PackageError(f"{path} can't be read: {exc.strerror or exc}", code="index_failed") from exc
    base = path.resolve().as_uri() + "/"
    return [link for name in names if (link := named(base, quote(name))) is not None]


def _copy(path: Path, write: Write, bytes_max: int) -> None:
    total = 0
    try:
        with path.open("rb") as file:
            while piece := file.read(_COPY_BYTES):
                total += len(piece)
                if total > bytes_max:
                    raise PackageError(f"{path} is over {bytes_max} bytes", code="package_too_large")
                write(piece)
    except OSError as exc:
        raise PackageError(f"{path} can't be read: {exc.strerror or exc}", code="index_failed") from exc
