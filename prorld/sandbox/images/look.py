"""What an image brings along: shells, interpreters, its C library, its environment. Looks without leaving the image."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

__all__ = ["Contents", "environment_of", "environment_said", "inside", "look"]

LINKS_MAX = 40
PROGRAMS = ("bash", "sh", "python3", "ipython", "ipython3", "git", "node", "cargo", "go", "gcc", "tmux")

_PLACES = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_NOTED = "/.singularity.d/env/"
_ENVIRONMENTS = ("10-docker2singularity.sh", "90-environment.sh")
_ENVIRONMENT_BYTES_MAX = 1 << 16
_OS_RELEASE_BYTES_MAX = 1 << 14
# `export NAME="value"`, and what Apptainer makes of a registry's image: `export NAME="${NAME:-"value"}"`.
_EXPORT = re.compile(r"^export ([A-Za-z_][A-Za-z0-9_]*)=(.*)$")
_DEFAULT = re.compile(r'^"\$\{[A-Za-z_][A-Za-z0-9_]*:-"(.*)"\}"$')
_ESCAPED = re.compile(r'\\([$`"\\n])')


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. ``programs`` has each that is there with its path in the image."""

    programs: dict[str, str]
    libc: str
    system: str
    env: dict[str, str]

    @property
    def misses(self) -> tuple[str, ...]:
        """What a sandbox's tools want and this image has not."""
        return tuple(name for name in ("bash", "python3") if name not in self.programs)


def look(root: Path) -> Contents:
    """Look at the root file system of an image."""
    environment = environment_of(root)
    places = [*environment.get("PATH", "").split(":"), *_PLACES]
    programs = {name: path for name in PROGRAMS if (path := _program(root, name, places)) is not None}
    return Contents(programs=programs, libc=_libc(root), system=_system(root), env=environment)


def inside(root: Path, path: str) -> Path | None:
    """Where a path of the image stands on the host, links followed as a process in the image would."""
    todo = [part for part in PurePosixPath(path).parts if part != "/"]
    done: list[str] = []
    links = 0
    while todo:
        part = todo.pop(0)
        if part == "..":
            done = done[:-1]
            continue
        here = root.joinpath(*done, part)
        try:
            found = here.lstat()
        except OSError:
            return None
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > LINKS_MAX:
                return None
            target = PurePosixPath(here.readlink())
            if target.is_absolute():
                done = []
            todo = [piece for piece in target.parts if piece != "/"] + todo
        else:
            done.append(part)
    return root.joinpath(*done)


def environment_of(root: Path) -> dict[str, str]:
    """The variables that the image sets, where Apptainer has noted them."""
    found: dict[str, str] = {}
    for name in _ENVIRONMENTS:
        found |= _exports(_read(root, f"{_NOTED}{name}", _ENVIRONMENT_BYTES_MAX))
    return found


def environment_said(inspected: Mapping[str, Any]) -> dict[str, str]:
    """The same from what ``apptainer inspect`` says of a file; nothing where it says something unknown."""
    attributes = inspected.get("attributes")
    texts = attributes.get("environment") if isinstance(attributes, dict) else None
    found: dict[str, str] = {}
    for name in _ENVIRONMENTS:
        text = texts.get(f"{_NOTED}{name}") if isinstance(texts, dict) else None
        if isinstance(text, str):
            found |= _exports(text[:_ENVIRONMENT_BYTES_MAX])
    return found


def _exports(script: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in script.splitlines():
        export = _EXPORT.match(line.strip())
        if export is None:
            continue
        default = _DEFAULT.match(export[2])
        value = _unquoted(export[2] if default is None else f'"{_once_unescaped(default[1])}"')
        if value is not None:
            found[export[1]] = value
    return found


def _once_unescaped(text: str) -> str:
    """Apptainer escapes its default values once for each pair of quotes, and newlines as a backslash and an n."""
    return _ESCAPED.sub(lambda found: "\n" if found[1] == "n" else found[1], text)


def _unquoted(text: str) -> str | None:
    """The first word of the shell in a text; ``None`` where only a shell could tell."""
    word: list[str] = []
    quote = ""
    letters = iter(text)
    for letter in letters:
        if quote == "'" and letter != quote:
            word.append(letter)
        elif letter == quote:
            quote = ""
        elif letter == "\\":
            escaped = next(letters, "")
            # Within double quotes only these can be escaped, and before others the backslash stays.
            word.append(escaped if not quote or escaped in '$`"\\' else f"\\{escaped}")
        elif letter in "$`":
            return None
        elif not quote and letter in "\"'":
            quote = letter
        elif not quote and letter in " \t;&|<>()":
            break
        else:
            word.append(letter)
    return None if quote else "".join(word)


def _program(root: Path, name: str, places: list[str]) -> str | None:
    for place in places:
        if place.startswith("/"):
            found = inside(root, f"{place}/{name}")
            if found is not None and os.access(found, os.X_OK) and found.is_file():
                return f"{place}/{name}"
    return None


def _libc(root: Path) -> str:
    for place in _LIBRARIES:
        real = inside(root, place)
        if real is None or not real.is_dir():
            continue
        names = {entry.name for entry in os.scandir(real)}
        if any(name.startswith("ld-musl-") for name in names):
            return "musl"
        deeper = (f"{place}/{name}/libc.so.6" for name in names if name.endswith("-linux-gnu"))
        if "libc.so.6" in names or any(inside(root, path) is not None for path in deeper):
            return "glibc"
    return "none"


def _system(root: Path) -> str:
    said = _read(root, "/etc/os-release", _OS_RELEASE_BYTES_MAX)
    found = re.search(r'^PRETTY_NAME="?([^"\n]*)"?$', said, re.MULTILINE)
    return "" if found is None else found[1][:200]


def _read(root: Path, path: str, bytes_max: int) -> str:
    place = inside(root, path)
    try:
        if place is None or not stat.S_ISREG(place.lstat().st_mode):
            return ""
        with place.open("rb") as file:
            return file.read(bytes_max).decode("utf-8", "replace")
    except OSError:
        return ""
