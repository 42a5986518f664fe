"""Rows made into instances that their handler takes, and written as one file that appears when it is whole."""

from __future__ import annotations

import hashlib
import os
import random
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from prorld.cli.data_archive import Member
from prorld.cli.data_rows import Row, rows_of, shape_of
from prorld.cli.data_sets import Convert
from prorld.cli.exits import UsageError
from prorld.cli.moving_line import MovingLine
from prorld.cli.output import count
from prorld.cli.running import is_interrupt
from prorld.domain.job import AgentLimits
from prorld.errors import HandlerError, ProrldError, chain
from prorld.handlers.base import AgentHandler
from prorld.handlers.datasets import Dataset
from prorld.handlers.registry import Registry, accept
from prorld.kit.containment import contained

__all__ = ["Choice", "Made", "Maker", "written"]

# What a daemon takes in one request, less what else is in it.
INSTANCE_BYTES_MAX = 15 << 20
# A row may be a whole file.
INSTANCES_PER_ROW_MAX = 1_000_000
SHUFFLED_BYTES_MAX = 4 << 30
BAD_ROWS_SHOWN = 10
ROWS_PER_LINE = 64
ERROR_CHARS_MAX = 500


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Which instances are wanted, and in which order."""

    filters: dict[str, str] = {}
    split: str | None = None
    limit: int | None = None
    seed: int | None = None
    skip_bad: bool = False

    @property
    def takes_all(self) -> bool:
        """Whether all instances of the set should come out."""
        return not self.filters and self.split is None and self.limit is None


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it. ``skipped`` rows were bad; ``members`` are the files that were read."""

    instances: int
    rows: int
    skipped: int
    sha256: str
    members: list[str]


class Maker:
    """One run over the rows of a set."""

    def __init__(
        self, data: Dataset, convert: Convert, registry: Registry, choice: Choice, line: MovingLine, *, local: bool
    ) -> None:
        self._data = data
        self._convert = convert
        self._registry = registry
        self._handler: AgentHandler[Any] | None = None if data.handler is None else registry.get(data.handler)
        self._choice = choice
        self._line = line
        self._local = local
        self._encoder = msgspec.json.Encoder()
        self._source = None if self._handler is None else _data_source(self._handler, data.name)
        self._unseen = set(choice.filters)
        self._rows = self._skipped = self._instances = 0
        self._members: list[str] = []

    def make(self, members: Iterable[Member], out: BinaryIO) -> Made:
        """Write an instance a line. ``UsageError`` names the first bad row, unless such are skipped."""
        digest = hashlib.sha256()
        for line in self._ordered(self._lines(members)):
            out.write(line)
            digest.update(line)
            self._instances += 1
            if self._instances == self._choice.limit:
                break
        self._line.clear()
        if self._skipped > BAD_ROWS_SHOWN:
            self._line.stay(f"{self._skipped - BAD_ROWS_SHOWN} more rows were bad")
        if self._rows and self._unseen:
            raise UsageError(f"no row and no instance has a field {', '.join(sorted(self._unseen))} to filter by")
        if not self._instances:
            bad = f"; {count(self._skipped, 'row')} of them bad" if self._skipped else ""
            raise UsageError(f"{self._data.name}: no instance came of {count(self._rows, 'row')}{bad}")
        return Made(
            instances=self._instances, rows=self._rows, skipped=self._skipped, sha256=digest.hexdigest(),
            members=self._members,
        )  # fmt: skip

    def _ordered(self, lines: Iterator[bytes]) -> Iterator[bytes]:
        if self._choice.seed is None:
            return lines
        held: list[bytes] = []
        left = SHUFFLED_BYTES_MAX
        for line in lines:
            left -= len(line)
            if left < 0:
                raise UsageError(f"more than {SHUFFLED_BYTES_MAX} bytes of instances can't be shuffled")
            held.append(line)
        # Not for secrets: the same seed has to give the same order, here and elsewhere.
        random.Random(self._choice.seed).shuffle(held)  # noqa: S311
        return iter(held)

    def _lines(self, members: Iterable[Member]) -> Iterator[bytes]:
        for member in members:
            self._members.append(member.name)
            self._line.show(f"reading {member.where}")
            shape = shape_of(member.name, self._data.rows) if self._local else self._data.rows
            for row in rows_of(member, shape):
                self._rows += 1
                where = f"{member.where}, {row.at}" if row.at else member.where
                if self._rows % ROWS_PER_LINE == 0:
                    self._line.show(f"{count(self._rows, 'row')} read, now {where}")
                try:
                    lines = [*self._of_row(row, member)]
                except UsageError:
                    raise
                except ProrldError as exc:
                    if is_interrupt(exc):
                        raise KeyboardInterrupt from exc
                    self._bad(where, exc)
                    continue
                yield from lines

    def _bad(self, where: str, error: ProrldError) -> None:
        words = f"{where}: {error.message[:ERROR_CHARS_MAX]}"
        if not self._choice.skip_bad:
            raise UsageError(f"{words}; --skip-bad leaves such rows out") from error
        self._skipped += 1
        if self._skipped <= BAD_ROWS_SHOWN:
            self._line.stay(f"left out: {words}")

    def _of_row(self, row: Row, member: Member) -> Iterator[bytes]:
        if row.value is None:
            raise HandlerError(row.error or "no value")
        fields = row.value if isinstance(row.value, dict) else {}
        undecided = self._wants(fields, self._choice.filters)
        if undecided is None or not self._in_split(fields, member):
            return
        for instance in self._converted(row.value, member):
            if self._wants(instance, undecided) == {}:
                yield self._sound(instance)

    def _converted(self, value: object, member: Member) -> list[dict[str, Any]]:
        try:
            with contained(self._data.convert):
                found = [*islice(self._convert(value, member.name), INSTANCES_PER_ROW_MAX + 1)]
        except ProrldError:
            raise
        except Exception as exc:
            raise HandlerError(f"{self._data.convert} failed: {chain(exc)}") from exc
        if len(found) > INSTANCES_PER_ROW_MAX:
            raise HandlerError(f"more than {INSTANCES_PER_ROW_MAX} instances came of one row")
        for instance in found:
            if not isinstance(instance, dict):
                raise HandlerError(f"{self._data.convert} gave a {type(instance).__name__}, and not a dict")
        return found

    def _in_split(self, fields: dict[str, Any], member: Member) -> bool:
        """By the field ``split`` of the row; without one, by the words of the file's name."""
        wanted = self._choice.split
        said = fields.get("split")
        if wanted is None or isinstance(said, str):
            return wanted in (None, said)
        return wanted in re.split(r"[^A-Za-z0-9]+", member.name)

    def _wants(self, fields: dict[str, Any], filters: dict[str, str]) -> dict[str, str] | None:
        """The filters that these fields say nothing of; ``None`` where they say no."""
        open_: dict[str, str] = {}
        for key, wanted in filters.items():
            found = _field(fields, key)
            if found is _MISSING:
                open_[key] = wanted
                continue
            self._unseen.discard(key)
            if _text(found) != wanted:
                return None
        return open_

    def _sound(self, instance: dict[str, Any]) -> bytes:
        """The instance as a line, when its handler, where it has one, would take it as a job's."""
        if self._source is not None and "data_source" not in instance:
            instance = {**instance, "data_source": self._source}
        # What JSON makes of it is what the daemon will see.
        try:
            line = self._encoder.encode(instance)
            seen: object = msgspec.json.decode(line)
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as exc:
            raise HandlerError(f"the instance can't be written as JSON: {exc}") from exc
        if len(line) > INSTANCE_BYTES_MAX:
            raise HandlerError(f"the instance has {len(line)} bytes, and a job may have {INSTANCE_BYTES_MAX}")
        if self._handler is None:
            return line + b"\n"
        assert isinstance(seen, dict)
        accept(self._handler, seen, AgentLimits())
        if self._handler.data_sources and "data_source" in seen:
            self._registry.select(None, seen)
        return line + b"\n"


_MISSING = object()


def _field(fields: dict[str, Any], key: str) -> object:
    if key in fields:
        return fields[key]
    value: object = fields
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _text(value: object) -> str:
    """As it is typed in a filter: text as it is, all else as JSON."""
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError):
        return str(value)


def _data_source(handler: AgentHandler[Any], name: str) -> str | None:
    """What to call instances of this set, where the handler has a place for it and the instance says nothing."""
    fields = {field.encode_name for field in msgspec.structs.fields(handler.instance_type)}
    if "data_source" not in fields and handler.instance_type.__struct_config__.forbid_unknown_fields:
        return None
    sources = handler.data_sources
    if name in sources or any(each.endswith("*") and name.startswith(each[:-1]) for each in sources):
        return name
    return next((each for each in sources if not each.endswith("*")), None)


@contextmanager
def written(target: Path, meta: Path, describe: Callable[[], bytes]) -> Iterator[BinaryIO]:
    """A file, and what is to be known of it beside it; what fails in the block leaves both as they were."""
    part = secrets.token_hex(4)
    half, half_meta = (path.with_name(f".{path.name}.{part}.part") for path in (target, meta))
    try:
        with half.open("xb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        half_meta.write_bytes(describe())
        # Never a description beside something else than what it describes.
        meta.unlink(missing_ok=True)
        half.replace(target)
        half_meta.replace(meta)
    except OSError as exc:
        raise UsageError(f"{target} can't be written: {exc.strerror or exc}") from exc
    finally:
        half.unlink(missing_ok=True)
        half_meta.unlink(missing_ok=True)
