"""The interpreter that a container gets from the host: the files that the warden uses while it runs, and no others.

Which these are is not guessed: a Python that has imported the warden is asked for its modules and its libraries. With
the host's own loader beside them they run on an image of any distribution, whether it has an interpreter or not.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

from prorld.errors import SandboxError, boundary
from prorld.kit.lanes import Lane
from prorld.kit.process import run_group
from prorld.sandbox.warden_client import import_places

__all__ = ["KIT", "Kit", "kit_command", "make_kit"]

KIT = "/.prorld"  # in the container

# -B: nothing is written beside the host's files. What is imported beside the warden is what Python itself asks for
# late: codecs, and what shows an error.
_ASK = """\
import sys
sys.path.extend(sys.argv[1].split(":"))
import encodings.ascii, encodings.latin_1, encodings.utf_8, traceback, linecache, os, sysconfig
import prorld.sandbox.docker_inner
import json
with open("/proc/self/maps") as maps:
    mapped = sorted({line.split(None, 5)[5].strip() for line in maps if "/" in line and " r-xp " in line})
files = [getattr(module, "__file__", None) for module in sys.modules.values()]
print(json.dumps({
    "files": sorted({name for name in files if name}),
    "mapped": mapped,
    "binary": os.path.realpath("/proc/self/exe"),
    "stdlib": sysconfig.get_path("stdlib"),
    "version": "python%d.%d" % sys.version_info[:2],
}))
"""
_BOOT = "import sys; sys.path.append(sys.argv[1]); from prorld.sandbox.docker_inner import main; main(sys.argv[2:])"
_DIRECTORIES = ("bin", "lib", "site", "so")


class _Closure(msgspec.Struct, frozen=True, kw_only=True):
    """What a running interpreter says of itself."""

    files: list[str]
    mapped: list[str]
    binary: str
    stdlib: str
    version: str


class Kit(msgspec.Struct, frozen=True, kw_only=True):
    """A kit on this host. ``loader`` says that it has the host's loader."""

    place: Path
    version: str
    loader: bool


async def make_kit(base: Path, lane: Lane) -> Kit:
    """The kit below ``base``, made when it is not there yet. Raises ``SandboxError``."""
    places = import_places()
    argv = [sys.executable, "-I", "-S", "-B", "-c", _ASK, ":".join(places)]
    with boundary(SandboxError, "asking the interpreter for its files"):
        said = await run_group(argv, env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"})
    try:
        closure = msgspec.json.decode(said.stdout, type=_Closure)
    except msgspec.DecodeError as exc:
        words = said.stderr[-500:].decode("utf-8", "replace").strip()
        raise SandboxError(f"the interpreter does not say what it is made of: {words}", retryable=False) from exc
    with boundary(SandboxError, "copying the interpreter for containers"):
        return await lane.run(_fill, base, closure, places)


def kit_command(kit: Kit, arguments: Iterable[str]) -> list[str]:
    """How the container's first process is started, in the container."""
    load = [f"{KIT}/so/loader", "--inhibit-cache", "--library-path", f"{KIT}/so"] if kit.loader else []
    return [*load, f"{KIT}/bin/{kit.version}", "-I", "-S", "-B", "-c", _BOOT, f"{KIT}/site", *arguments]


def _fill(base: Path, closure: _Closure, places: Iterable[str]) -> Kit:
    """Copy the closure to a directory named after it; another daemon may do the same at the same time."""
    sources = sorted({*closure.files, *closure.mapped, closure.binary})
    stamps = [(name, os.stat(name).st_size, os.stat(name).st_mtime_ns) for name in sources]  # noqa: PTH116
    loader = next((name for name in closure.mapped if Path(name).name.startswith("ld")), None)
    place = base / hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]
    kit = Kit(place=place, version=closure.version, loader=loader is not None)
    base.mkdir(mode=0o755, parents=True, exist_ok=True)
    _check_ours(base)
    if place.is_dir():
        _check_ours(place)
        return kit
    fresh = Path(tempfile.mkdtemp(prefix=".", dir=base))
    try:
        _copy_all(fresh, closure, places, loader)
        for directory in (fresh, *fresh.rglob("*/")):  # whatever the umask
            directory.chmod(0o755)
        fresh.rename(place)
    except OSError:
        if not place.is_dir():  # nobody was faster
            raise
    finally:
        if fresh.is_dir():
            shutil.rmtree(fresh, ignore_errors=True)
    return kit


def _check_ours(place: Path) -> None:
    """What lies there is run as root in containers: nobody else may have put it there."""
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise SandboxError(f"{place} can be written by others", retryable=False)


def _copy_all(kit: Path, closure: _Closure, places: Iterable[str], loader: str | None) -> None:
    for name in _DIRECTORIES:
        (kit / name).mkdir()
    library = kit / "lib" / closure.version
    (library / "lib-dynload").mkdir(parents=True)
    roots = [(Path(closure.stdlib), library), *((Path(place), kit / "site") for place in places)]
    roots.sort(key=lambda root: len(root[0].parts), reverse=True)  # one may lie within another
    for name in closure.files:
        _copy_module(Path(name), roots)
    modules = set(closure.files)
    for name in closure.mapped:
        if name not in modules and name != closure.binary:
            _copy_library(Path(name), kit / "so")
    if loader is not None:
        _copy(Path(loader), kit / "so" / "loader", mode=0o755)
    _copy(Path(closure.binary), kit / "bin" / closure.version, mode=0o755)


def _copy_module(source: Path, roots: Iterable[tuple[Path, Path]]) -> None:
    for root, target in roots:
        if source.is_relative_to(root):
            _copy(source, target / source.relative_to(root))
            compiled = source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}.pyc"
            if source.suffix == ".py" and compiled.is_file():
                _copy(compiled, target / compiled.relative_to(root))
            return
    raise OSError(f"{source} is in none of the places that modules come from")


def _copy_library(source: Path, target: Path) -> None:
    """By each of its names: a program asks for a library by one that is usually a link."""
    names = {source.name}
    for entry in source.parent.glob(f"{source.name.split('.so', 1)[0]}.so*"):
        if entry.resolve() == source.resolve():
            names.add(entry.name)
    for name in names:
        _copy(source, target / name)


def _copy(source: Path, target: Path, *, mode: int = 0o644) -> None:
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    shutil.copy2(source, target)  # with its time, which its compiled form is compared with
    target.chmod(mode)
