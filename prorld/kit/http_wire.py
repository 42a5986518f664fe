"""The bytes of HTTP/1.1: requests, and the form of response that engines give nearly always. Pure.

h11 takes as long for one exchange as all the rest of it together. So a response in the plain form, whose head came
in one piece and names its length, is read here; everything else is left to h11, and where both could read something
they read the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

__all__ = ["Head", "plain_head", "request_head"]

Headers = Iterable[tuple[str, str]]

_NAME = r"[-!#$%&'*+.^_`|~0-9A-Za-z]+"
_VALUE = r"(?:[!-~\x80-\xff](?:[\t -~\x80-\xff]*[!-~\x80-\xff])?)?"
_LINE = re.compile(f"({_NAME}):[ \t]*({_VALUE})[ \t]*".encode("latin-1"))
_STATUS = re.compile(rb"HTTP/1\.1 ([2-5][0-9][0-9])(?: [\t -~\x80-\xff]*)?")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_METHOD = re.compile(_NAME)
_TARGET = re.compile(r"[!-~]+")
_SENT_VALUE = re.compile(_VALUE)

# These responses have no body, whatever their length says.
_BODILESS = frozenset({204, 304})

# A head of this size or larger is not plain; h11 has a bound of its own for it.
HEAD_BYTES_MAX = 16 * 1024


class Head(msgspec.Struct, frozen=True):
    """What stands before a body of ``length`` bytes, which begins at ``body_at`` of the data."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    length: int
    body_at: int


def request_head(method: str, target: str, authority: str, length: int, headers: Headers) -> bytes:
    """The request up to its body; ``ValueError`` for what could be read as anything else than was meant."""
    if not _METHOD.fullmatch(method) or not _TARGET.fullmatch(target) or not _TARGET.fullmatch(authority):
        raise ValueError(f"not a valid request: {method!r} {target!r}")
    parts = [f"{method} {target} HTTP/1.1\r\nhost: {authority}\r\ncontent-length: {length}\r\n"]
    for name, value in headers:
        if not _METHOD.fullmatch(name) or not _SENT_VALUE.fullmatch(value):
            raise ValueError(f"not a valid request: the header {name!r}")
        parts.append(f"{name}: {value}\r\n")
    parts.append("\r\n")
    return "".join(parts).encode("latin-1")


def plain_head(data: bytes) -> Head | None:
    """The head of a response in the plain form; ``None`` where it is another one, or not whole yet."""
    end = data.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX)
    first, *lines = data[: max(end, 0)].split(b"\r\n")
    begun = _STATUS.fullmatch(first)
    headers = None if begun is None else _headers(lines)
    if begun is None or headers is None:
        return None
    lengths = [value for name, value in headers if name == b"content-length"]
    status = int(begun[1])
    if len(lengths) != 1 or not _LENGTH.fullmatch(lengths[0]) or status in _BODILESS:
        return None
    return Head(status, headers, int(lengths[0]), end + 4)


def _headers(lines: Iterable[bytes]) -> tuple[tuple[bytes, bytes], ...] | None:
    headers: list[tuple[bytes, bytes]] = []
    for line in lines:
        found = _LINE.fullmatch(line)
        if found is None:
            return None
        name, value = found[1].lower(), found[2]
        if name == b"transfer-encoding" or (name == b"connection" and value.lower() != b"keep-alive"):
            return None
        headers.append((name, value))
    return tuple(headers)
