"""What a user asks of the factory, and one package of it: from the command line, or from a line of a list."""

from __future__ import annotations

import argparse
import hashlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgspec

from prorld.errors import BadRequest
from prorld_swe.factory.candidates import OPERATORS
from prorld_swe.factory.layout import Wishes

__all__ = ["Order", "Settings", "add_wishes", "is_requirement", "read_list", "wishes_of"]

LIST_BYTES_MAX = 1 << 20
LINES_MAX = 5_000
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(==[A-Za-z0-9.!+_-]+)?")


def is_requirement(text: str) -> bool:
    """Whether this is ``NAME`` or ``NAME==VERSION``."""
    return _REQUIREMENT.fullmatch(text) is not None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How tasks are made. Those that decide what a run of tests says are part of a package's key in the journal."""

    per_package: int = 3
    tries: int = 40
    operators: tuple[str, ...] = OPERATORS
    combined: float = 0.2
    per_function: int = 2
    seed: int = 1
    jobs: int = 1
    max_f2p: int = 3
    limit_s: float = 120.0
    slow_s: float = 5.0
    package_s: float = 1_800.0
    times: int = 3
    load: int = 2
    image: str | None = None

    def key(self, sha256: str, wishes: Wishes) -> str:
        """Names a package as it was asked: with other answers to expect, it is another one."""
        asked = (self.image, self.limit_s, self.slow_s, self.times, self.load, self.max_f2p, wishes)
        return f"{sha256[:20]}-{hashlib.sha256(msgspec.json.encode(asked)).hexdigest()[:12]}"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One package: a file, or a requirement, and what is known of it."""

    what: str
    wishes: Wishes = Wishes()

    @property
    def file(self) -> Path | None:
        """The source distribution, where it is a file."""
        path = Path(self.what)
        return path if self.what.endswith((".tar.gz", ".tgz")) else None

    def must_be_sound(self) -> None:
        """``BadRequest`` for what is neither a file of a source distribution nor a requirement."""
        if self.file is None and not is_requirement(self.what):
            raise BadRequest(f"{self.what[:100]!r} is neither NAME, NAME==VERSION nor a .tar.gz")


class Options(Protocol):
    """A parser, or a group of its options: argparse has no public name for both."""

    def add_argument(self, name: str, /, **how: Any) -> object:
        """Declare one."""
        ...


class _LineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def add_wishes(parser: Options) -> None:
    """What can be said of one package, on the command line and in a list alike."""
    parser.add_argument("--code", action="append", default=[], metavar="PATH", help="where the code is")
    parser.add_argument("--tests", action="append", default=[], metavar="PATH", help="where the tests are")
    parser.add_argument("--python-path", metavar="DIR", help="where it is imported from: src, or .")
    parser.add_argument("--pytest-arg", action="append", default=[], metavar="ARG", help="a further word for pytest")


def wishes_of(args: argparse.Namespace) -> Wishes:
    """What was said of it. Raises ``BadRequest``."""
    for path in (*args.code, *args.tests, *([args.python_path] if args.python_path else [])):
        if path.startswith("/") or (path != "." and not {"", ".", ".."}.isdisjoint(path.split("/"))):
            raise BadRequest(f"{path[:100]!r} is no plain path within a package")
    return Wishes(
        code=tuple(args.code),
        tests=tuple(args.tests),
        python_path=args.python_path,
        pytest_args=tuple(args.pytest_arg),
    )


def read_list(path: Path) -> Iterator[Order]:
    """The packages of a list: one a line, with its options; ``#`` begins a comment. Raises ``BadRequest``. Blocks."""
    parser = _LineParser(prog="", add_help=False)
    parser.add_argument("what")
    add_wishes(parser)
    if path.stat().st_size > LIST_BYTES_MAX:
        raise BadRequest(f"{path} is over {LIST_BYTES_MAX >> 20} MiB")
    for number, line in enumerate(path.read_text("utf-8").splitlines()[:LINES_MAX], 1):
        try:
            words = shlex.split(line, comments=True)
            if not words:
                continue
            args = parser.parse_args(words)
            order = Order(what=args.what, wishes=wishes_of(args))
            order.must_be_sound()
        except (ValueError, BadRequest) as exc:
            raise BadRequest(f"{path}, line {number}: {exc}") from exc
        yield order
