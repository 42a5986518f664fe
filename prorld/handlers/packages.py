"""Distributions of the package index that were fetched, by their hash: data for tasks, read and never run.

``prorld data fetch`` and the commands of plugins put them there; handlers find them. The directory is the user's cache:
what is gone from it can be fetched again.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

__all__ = ["PACKAGES_VARIABLE", "cached_package", "packages_dir"]

PACKAGES_VARIABLE: Final = "PRORLD_PACKAGES"
_SHA256 = re.compile(r"[0-9a-f]{64}")


def packages_dir(environment: Mapping[str, str] | None = None) -> Path:
    """Where they are kept: ``$PRORLD_PACKAGES``, else ``prorld/packages`` of the user's cache."""
    ours = os.environ if environment is None else environment
    if named := ours.get(PACKAGES_VARIABLE):
        return Path(named)
    cache = ours.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache.startswith("/") else Path.home() / ".cache") / "prorld" / "packages"


def cached_package(sha256: str, directory: Path | None = None) -> Path | None:
    """The file with this hash, read through once to be sure; ``None`` where it is not there or is another. Blocks."""
    if _SHA256.fullmatch(sha256) is None:
        return None
    place = (packages_dir() if directory is None else directory) / sha256
    for path in sorted(place.iterdir()) if place.is_dir() else ():
        if path.is_file() and not path.name.startswith("."):
            with path.open("rb") as file:
                return path if hashlib.file_digest(file, "sha256").hexdigest() == sha256 else None
    return None
