"""What a simple index (PEP 503, PEP 691) or a directory has of a distribution, and which of it is taken. Pure.

Pages are hostile until read: what is no well-formed file of the distribution is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html.parser import HTMLParser
from typing import Any, Literal
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import msgspec
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, sys_tags
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from prorld.errors import ProrldError

__all__ = ["ACCEPT", "Candidate", "Kind", "PackageError", "Wanted", "choose", "links_of", "named", "wanted"]

ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
LINKS_MAX = 200_000

Kind = Literal["wheel", "sdist"]

_REQUIREMENT = re.compile(
    r"\s*([A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?)\s*(?:==\s*([A-Za-z0-9.!+_-]{1,64}))?\s*"
)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_JSON = "application/vnd.pypi.simple.v1+json"


class PackageError(ProrldError):
    """A distribution can't be had: not there, not what it should be, too large, or its index does not answer."""

    code = "package_not_found"


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is looked for. ``name`` is normalized; no version is the newest one."""

    name: str
    version: str | None
    kind: Kind
    sha256: str | None = None

    def __str__(self) -> str:
        return f"{self.name}{'' if self.version is None else f'=={self.version}'} ({self.kind})"


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A file that a page names, or that lies in a directory."""

    url: str
    filename: str
    sha256: str | None = None
    yanked: bool = False


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the distribution. A lower ``rank`` is read more easily: pure wheels first."""

    link: Link
    version: Version
    rank: int


def wanted(requirement: str, kind: Kind, sha256: str | None) -> Wanted:
    """``name`` or ``name==version``; ``PackageError`` for anything else."""
    found = _REQUIREMENT.fullmatch(requirement)
    if found is None:
        raise PackageError(f"{requirement!r:.120} is neither name nor name==version", code="bad_input")
    if sha256 is not None and _SHA256.fullmatch(sha256) is None:
        raise PackageError(f"{sha256!r:.120} is no SHA-256 in hexadecimal", code="bad_input")
    try:
        version = None if found[2] is None else str(Version(found[2]))
    except InvalidVersion:
        raise PackageError(f"{found[2]} is no version", code="bad_input") from None
    return Wanted(name=canonicalize_name(found[1]), version=version, kind=kind, sha256=sha256)


# --- pages ------------------------------------------------------------------------------------------------------------


class _File(msgspec.Struct):
    filename: str
    url: str
    hashes: dict[str, Any] = {}
    yanked: bool | str = False


class _Page(msgspec.Struct):
    files: list[_File]


def links_of(page: bytes, content_type: str, url: str) -> list[Link]:
    """The files that a page names; ``ValueError`` where it is no page of an index."""
    if content_type.partition(";")[0].strip().lower() == _JSON:
        try:
            files = msgspec.json.decode(page, type=_Page).files
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise ValueError(f"its JSON is not that of a simple index: {exc}") from exc
        found = [
            Link(
                url=urljoin(url, file.url), filename=file.filename, sha256=_hash(file.hashes.get("sha256")),
                yanked=bool(file.yanked) or file.yanked == "",
            )
            for file in files[:LINKS_MAX]
        ]  # fmt: skip
        return [link for link in found if _is_plain(link.filename)]
    parser = _Anchors(url)
    parser.feed(page.decode("utf-8", "replace"))
    parser.close()
    return parser.links


class _Anchors(HTMLParser):
    def __init__(self, url: str) -> None:
        super().__init__(convert_charrefs=True)
        self._base = url
        self.links: list[Link] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        href = values.get("href")
        if not href or len(self.links) >= LINKS_MAX:
            return
        if tag == "base":
            self._base = urljoin(self._base, href)
        elif tag == "a" and (link := named(self._base, href, yanked="data-yanked" in values)) is not None:
            self.links.append(link)


def named(base: str, href: str, *, yanked: bool = False) -> Link | None:
    """The file that a link leads to; ``None`` where it leads to none."""
    try:
        url, fragment = urldefrag(urljoin(base, href))
        filename = unquote(urlsplit(url).path).rpartition("/")[2]
    except ValueError:
        return None
    algorithm, _, value = fragment.partition("&")[0].partition("=")
    sha256 = _hash(value) if algorithm == "sha256" else None
    return Link(url=url, filename=filename, sha256=sha256, yanked=yanked) if _is_plain(filename) else None


def _is_plain(filename: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._!+-]{0,254}", filename) is not None


def _hash(value: object) -> str | None:
    return value.lower() if isinstance(value, str) and _SHA256.fullmatch(value.lower()) else None


# --- the choice -------------------------------------------------------------------------------------------------------


def choose(links: Iterable[Link], what: Wanted) -> Candidate:
    """The file to take, as pip would choose the version; ``PackageError`` says what there is instead."""
    here = frozenset(sys_tags()) if what.kind == "wheel" else frozenset[Tag]()
    found = [each for link in links if (each := _candidate(link, what, here)) is not None]
    if not found:
        raise PackageError(f"there is no {what.kind} of {what.name} on the index")
    if what.version is None:
        fitting = [each for each in found if not each.link.yanked]
        fitting = [each for each in fitting if not each.version.is_prerelease] or fitting
    else:
        exact = SpecifierSet(f"=={what.version}")
        fitting = [each for each in found if exact.contains(each.version, prereleases=True)]
        # Withdrawn ones are for those who name them, where there is no other.
        fitting = [each for each in fitting if not each.link.yanked] or fitting
    if what.sha256 is not None and fitting:
        known = [each for each in fitting if each.link.sha256 == what.sha256]
        fitting = known or [each for each in fitting if each.link.sha256 is None]
        if not fitting:
            raise PackageError(f"no file of {what} on the index has the SHA-256 {what.sha256}", code="package_mismatch")
    if not fitting:
        raise PackageError(f"there is no {what} on the index; there are: {_versions(found)}")
    newest = max(each.version for each in fitting)
    return min(
        (each for each in fitting if each.version == newest), key=lambda each: (each.rank, each.link.filename)
    )  # fmt: skip


def _versions(found: Sequence[Candidate]) -> str:
    versions = sorted({each.version for each in found}, reverse=True)
    return ", ".join(map(str, versions[:8])) + (" ..." if len(versions) > 8 else "")


def _candidate(link: Link, what: Wanted, here: frozenset[Tag]) -> Candidate | None:
    try:
        if what.kind == "wheel":
            name, version, _, tags = parse_wheel_filename(link.filename)
            if {tag.platform for tag in tags} == {"any"}:
                rank = 0
            else:
                rank = 1 if not here.isdisjoint(tags) else 2 if "linux" in link.filename else 3
        else:
            name, version = parse_sdist_filename(link.filename)
            rank = 0 if link.filename.endswith(".tar.gz") else 1
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None
    return Candidate(link=link, version=version, rank=rank) if name == what.name else None
