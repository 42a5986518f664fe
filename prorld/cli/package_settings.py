"""Where distributions are looked for: what the user has told pip or uv, else the public index.

pip's variables come first, then uv's, then pip's configuration files, from the one that binds nearest.
"""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from prorld.cli.exits import UsageError

__all__ = ["PUBLIC_INDEX", "IndexSettings", "settings"]

PUBLIC_INDEX = "https://pypi.org/simple"
FILE_BYTES_MAX = 1 << 20

_SECTIONS = ("download", "install", "global")


class IndexSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``indexes`` are roots of simple indexes, in order; ``links`` are directories, or pages that link to files.

    A place may hold a password; it is never shown.
    """

    indexes: tuple[str, ...] = (PUBLIC_INDEX,)
    links: tuple[str, ...] = ()
    # Hosts, or ``host:port``, that need no TLS.
    trusted_hosts: tuple[str, ...] = ()
    # A file with the authorities to trust, instead of this machine's.
    certificates: str | None = None


def settings(env: Mapping[str, str] | None = None, prefix: Path | None = None) -> IndexSettings:
    """The settings of this user; ``UsageError`` names a file that can't be read."""
    ours = os.environ if env is None else env
    files = [*_pip_files(ours, Path(sys.prefix) if prefix is None else prefix)]

    def said(pip: str, *uv: str) -> str | None:
        for name in (f"PIP_{pip.upper().replace('-', '_')}", *uv):
            if ours.get(name, "").strip():
                return ours[name]
        return next((found for found in (_of_file(file, pip) for file in files) if found), None)

    index = said("index-url", "UV_DEFAULT_INDEX", "UV_INDEX_URL")
    more = said("extra-index-url", "UV_INDEX", "UV_EXTRA_INDEX_URL")
    none = (said("no-index", "UV_NO_INDEX") or "").strip().lower() in {"1", "true", "yes", "on"}
    links = said("find-links", "UV_FIND_LINKS")
    hosts = said("trusted-host", "UV_INSECURE_HOST")
    indexes = () if none else (*_words(index or PUBLIC_INDEX), *_words(more))
    return IndexSettings(
        indexes=tuple(dict.fromkeys(_unnamed(place) for place in indexes)),
        links=_words(links),
        trusted_hosts=_words(hosts),
        certificates=said("cert", "SSL_CERT_FILE"),
    )


def _words(text: str | None) -> tuple[str, ...]:
    return tuple((text or "").replace(",", " ").split())


def _unnamed(place: str) -> str:
    """Without the name that uv lets an index have."""
    name, equals, rest = place.partition("=")
    return rest if equals and "/" not in name and "://" in rest else place


def _pip_files(env: Mapping[str, str], prefix: Path) -> Iterator[configparser.RawConfigParser]:
    """The files of pip, the one that wins first."""
    named = env.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return
    home = Path(env["HOME"]) if env.get("HOME") else Path("/nonexistent")
    user = Path(env.get("XDG_CONFIG_HOME") or home / ".config")
    everybody = [Path(place) for place in reversed((env.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")) if place]
    places: Sequence[Path] = [
        *([Path(named)] if named else ()),
        prefix / "pip.conf",
        user / "pip" / "pip.conf",
        home / ".pip" / "pip.conf",
        Path("/etc/pip.conf"),
        *(place / "pip" / "pip.conf" for place in everybody),
    ]
    for path in places:
        if path.is_file():
            yield _read(path)


def _read(path: Path) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser()
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise UsageError(f"{path} is larger than {FILE_BYTES_MAX} bytes")
        parser.read_string(data.decode())
    except (OSError, UnicodeDecodeError, configparser.Error) as exc:
        # Its lines may hold a password, and a parser's message repeats them.
        raise UsageError(f"pip's settings in {path} can't be read: {type(exc).__name__}") from None
    return parser


def _of_file(parser: configparser.RawConfigParser, key: str) -> str | None:
    for section in _SECTIONS:
        for spelled in (key, key.replace("-", "_")):
            value = parser.get(section, spelled, fallback="").strip()
            if value:
                return value
    return None
