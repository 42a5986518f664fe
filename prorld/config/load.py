"""Reads the configuration: defaults, then the file, then the environment, then flags; each value remembers its origin.

Strict: a name that is not known, in the file or in a ``PRORLD__...`` variable, is fatal and is named with its place.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from prorld.config.kinds import Kind, fields_of, inner, is_list, is_struct, is_table, is_text
from prorld.config.sections import Config
from prorld.errors import ConfigError

__all__ = ["Loaded", "find_state_dir", "load"]

PREFIX = "PRORLD__"
# Short names from before there is a file to write into, and from outside the daemon.
ALIASES: Mapping[str, tuple[str, ...]] = {"PRORLD_STATE": ("state", "dir"), "PRORLD_PLUGINS": ("handlers", "enabled")}
FILE_VARIABLE = "PRORLD_CONFIG"
FILE_BYTES_MAX = 4 << 20
FLAG = "command line"

_AT = re.compile(r"^(?P<words>.*?)(?: - at `\$(?P<at>.*)`)?$", re.DOTALL)


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration that holds, and where each value that is not a default came from."""

    config: Config
    origins: Mapping[str, str]
    file: str | None
    state_dir: Path


class _Leaf(NamedTuple):
    path: tuple[str, ...]
    value: Any
    origin: str


def load(path: Path | None, env: Mapping[str, str], flags: Mapping[str, object]) -> Loaded:
    """Read and check everything. ``flags`` go by dotted path; those that are ``None`` were not given.

    Without a path, ``$PRORLD_CONFIG`` names the file, else ``prorld/prorld.toml`` in the XDG configuration directory is
    read where it exists.
    """
    file = path if path is not None else _usual_file(env)
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for leaf in _all_leaves(file, env, flags):
        _put(merged, leaf.path, leaf.value)
        origins[".".join(leaf.path)] = leaf.origin
    try:
        config = msgspec.convert(merged, Config)
    except msgspec.ValidationError as exc:
        words, at = _words(exc)
        raise ConfigError(f"{at.lstrip('.') or 'configuration'}: {words}") from exc
    return Loaded(
        config=config,
        origins=origins,
        file=None if file is None else str(file),
        state_dir=find_state_dir(config.state.dir, env),
    )


def find_state_dir(chosen: str | None, env: Mapping[str, str]) -> Path:
    """The directory that was chosen, else ``prorld/`` in the user's XDG state directory."""
    if chosen:
        return Path(chosen).expanduser().absolute()
    return _xdg(env, "XDG_STATE_HOME", ".local/state") / "prorld"


def _usual_file(env: Mapping[str, str]) -> Path | None:
    if env.get(FILE_VARIABLE):
        return Path(env[FILE_VARIABLE]).expanduser()
    usual = _xdg(env, "XDG_CONFIG_HOME", ".config") / "prorld" / "prorld.toml"
    return usual if usual.is_file() else None


def _xdg(env: Mapping[str, str], variable: str, otherwise: str) -> Path:
    named = env.get(variable, "")
    # The XDG rules say that a path that is not absolute is to be ignored.
    return Path(named) if named.startswith("/") else Path(env.get("HOME") or "~").expanduser() / otherwise


def _all_leaves(file: Path | None, env: Mapping[str, str], flags: Mapping[str, object]) -> Iterator[_Leaf]:
    if file is not None:
        yield from _walk(_read(file), Config, (), str(file))
    yield from _env_leaves(env)
    for dotted, value in flags.items():
        if value is not None:
            path = tuple(dotted.split("."))
            kind = _kind_at(path, FLAG)
            yield from _walk(_parse(value, kind, path, FLAG) if isinstance(value, str) else value, kind, path, FLAG)


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            data = stream.read(FILE_BYTES_MAX + 1)
    except OSError as exc:
        raise ConfigError(f"{file}: can't be read: {os.strerror(exc.errno or 0)}") from exc
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{file}: over {FILE_BYTES_MAX} bytes, which is no configuration")
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{file}: not TOML: {exc}") from exc


def _env_leaves(env: Mapping[str, str]) -> Iterator[_Leaf]:
    named = [(name, ALIASES[name]) for name in ALIASES if env.get(name)]
    named += [
        (name, tuple(name.removeprefix(PREFIX).lower().split("__"))) for name in sorted(env) if name.startswith(PREFIX)
    ]
    for name, path in named:
        origin = f"${name}"
        kind = _kind_at(path, origin)
        yield from _walk(_parse(env[name], kind, path, origin), kind, path, origin)


def _walk(value: Any, kind: Kind, path: tuple[str, ...], origin: str) -> Iterator[_Leaf]:
    """The leaves of a value, each of the kind that its place asks for."""
    if isinstance(value, dict) and (is_struct(kind) or is_table(kind)):
        for key, item in value.items():
            deeper = (*path, str(key))
            yield from _walk(item, _step(kind, deeper, origin), deeper, origin)
        return
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as exc:
        words, at = _words(exc)
        raise ConfigError(f"{origin}: {'.'.join(path)}{at}: {words}") from exc
    yield _Leaf(path, value, origin)


def _kind_at(path: tuple[str, ...], origin: str) -> Kind:
    kind: Kind = Config
    for depth in range(len(path)):
        kind = _step(kind, path[: depth + 1], origin)
    return kind


def _step(kind: Kind, path: tuple[str, ...], origin: str) -> Kind:
    if is_table(kind):
        return inner(kind)
    known = fields_of(kind) if is_struct(kind) else {}
    if path[-1] in known:
        return known[path[-1]]
    near = difflib.get_close_matches(path[-1], known, n=1)
    hint = f"; did you mean {'.'.join((*path[:-1], near[0]))}?" if near else ""
    raise ConfigError(f"{origin}: {'.'.join(path)} is not a setting{hint}")


def _parse(text: str, kind: Kind, path: tuple[str, ...], origin: str) -> Any:
    """A value from text: as it stands where text is wanted, ``a,b`` for lists of text, else as JSON writes it."""
    if is_text(kind):
        return text
    if is_list(kind) and not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as exc:
        if kind is Any:
            return text
        raise ConfigError(f"{origin}: {'.'.join(path)}: {text!r} is neither a number, true, false nor JSON") from exc


def _put(merged: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    table = merged
    for name in path[:-1]:
        below = table.get(name)
        if not isinstance(below, dict):
            below = table[name] = {}
        table = below
    table[path[-1]] = value


def _words(exc: msgspec.ValidationError) -> tuple[str, str]:
    found = _AT.match(str(exc))
    if found is None:
        return str(exc), ""
    return found["words"].replace("`", ""), found["at"] or ""
