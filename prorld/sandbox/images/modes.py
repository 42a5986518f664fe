"""When an image that is there already is taken: the keys of the cache.

* ``scratch``: never.
* ``versioned``: what it was made from is called the same: the reference with its tag, or the file of a definition, its
  bases, its stages and its declared version. A change of its scripts alone is not seen.
* ``lock``: all of what it was made from has the same content: the definition, its arguments, the files that it copies
  and lock files that were named; or a reference that is itself a digest.

A key is the SHA-256 of those things; two images never have the same key by accident.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path

from prorld.errors import SandboxError
from prorld.sandbox.images.tree import Tick, digest_file, digest_tree

__all__ = ["copied_files", "definition_key", "key_of", "reference_key"]

DEFINITION_BYTES_MAX = 1 << 20

_SECTION = re.compile(r"^%([a-z]+)", re.IGNORECASE)
_PINNED = re.compile(r"@sha256:[0-9a-f]{64}$")
_HEADERS = ("bootstrap", "from", "stage", "include", "osversion", "mirrorurl", "registry", "namespace", "fingerprints")


def key_of(*parts: str) -> str:
    """One key for all of the parts, each kept apart from the next."""
    digest = sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogateescape")
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()


def reference_key(reference: str, mode: str, arch: str) -> str | None:
    """The key of what a reference stands for; ``None`` where it may stand for something else by now."""
    if mode == "versioned" or (mode == "lock" and _PINNED.search(reference)):
        return key_of("pull", reference, arch)
    return None


def definition_key(
    definition: Path, mode: str, *, arguments: Mapping[str, str], lock_files: Iterable[Path], extra: str, tick: Tick
) -> str | None:
    """The key of what a definition makes; ``None`` where it is always made again."""
    if mode == "scratch":
        return None
    text = _text(definition)
    said = [f"{name}={value}" for name, value in sorted(arguments.items())]
    if mode == "versioned":
        # Two definitions may well have one base and one version, and nothing else in common.
        return key_of("build", mode, extra, str(definition.resolve()), *said, *_versions(text))
    contents = [_content(path, tick) for path in (*copied_files(text, definition.parent), *lock_files)]
    return key_of("build", mode, extra, *said, text, *contents)


def copied_files(text: str, directory: Path) -> list[Path]:
    """What ``%files`` copies from the host, in order; wildcards as Apptainer's shell sees them."""
    found: list[Path] = []
    inside = False
    for line in text.splitlines():
        section = _SECTION.match(line)
        if section is not None:
            # `%files from STAGE` copies from an earlier stage and not from the host.
            inside = section[1].lower() == "files" and " from " not in f"{line} "
            continue
        words = line.split()
        if inside and words and not words[0].startswith("#"):
            source = Path(words[0])
            base, pattern = (Path("/"), words[0].lstrip("/")) if source.is_absolute() else (directory, words[0])
            found += sorted(base.glob(pattern))
    return found


def _versions(text: str) -> list[str]:
    """The headers of each stage, and the labels that say a version."""
    said: list[str] = []
    section = ""
    for line in text.splitlines():
        begun = _SECTION.match(line)
        if begun is not None:
            section = begun[1].lower()
            continue
        name, _, value = line.strip().partition(":")
        words = line.split(None, 1)
        if name.lower() in _HEADERS and (not section or name.lower() in {"bootstrap", "from", "stage"}):
            # A new stage begins with a header, whatever section stands before it.
            section = "" if name.lower() == "bootstrap" else section
            said.append(f"{name.lower()}: {value.strip()}")
        elif section == "labels" and len(words) == 2 and words[0].lower().endswith("version"):
            said.append(f"{words[0].lower()} {words[1].strip()}")
    return said


def _text(definition: Path) -> str:
    try:
        with definition.open("rb") as file:
            data = file.read(DEFINITION_BYTES_MAX + 1)
        if len(data) > DEFINITION_BYTES_MAX:
            raise SandboxError(f"{definition} is too large for a definition", code="bad_definition", retryable=False)
        return data.decode()
    except (OSError, UnicodeDecodeError) as exc:
        words = getattr(exc, "strerror", None) or "it is no text"
        raise SandboxError(f"{definition} can't be read: {words}", code="bad_definition", retryable=False) from exc


def _content(path: Path, tick: Tick) -> str:
    try:
        return f"{path.name} {digest_tree(path, tick) if path.is_dir() else digest_file(path, tick)}"
    except OSError as exc:
        raise SandboxError(f"{path} can't be read: {exc.strerror}", code="bad_definition", retryable=False) from exc
