"""Who may do what: tokens, their tenants and their roles.

The admin's token is made on the first start, in the state directory. Tokens of other tenants come from ``tokens.toml``
beside it. Both files belong to the daemon's user alone, or the daemon does not start. Tokens are compared as digests,
in constant time, and never logged.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
import stat
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Protocol
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from prorld.domain.ids import ADMIN_TENANT, COMPAT_TENANT
from prorld.errors import ConfigError, Forbidden, Unauthorized

__all__ = [
    "ADMIN_TENANT",
    "Auth",
    "Caller",
    "CompatAuth",
    "Credentials",
    "NoAuth",
    "Role",
    "TokenBook",
    "load_token_book",
]

TOKEN_FILE: Final = "token"  # noqa: S105 - a file name
TOKENS_FILE: Final = "tokens.toml"
_FILE_BYTES_MAX: Final = 256 << 10
_TOKEN_CHARS_MIN: Final = 16
_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})

TokenText = Annotated[str, Meta(min_length=_TOKEN_CHARS_MIN, max_length=512, pattern=r"^[\x21-\x7e]+\Z")]


class Role(StrEnum):
    """``read`` looks, ``trainer`` also works on its tenant's jobs, ``admin`` does everything for all tenants."""

    READ = "read"
    TRAINER = "trainer"
    ADMIN = "admin"


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks."""

    tenant: str
    role: Role

    @property
    def sees(self) -> str | None:
        """The tenant whose resources the caller sees; ``None`` for all of them."""
        return None if self.role is Role.ADMIN else self.tenant

    def may(self, method: str) -> None:
        """``Forbidden`` when the role never allows this method."""
        if self.role is Role.READ and method not in _READING:
            raise Forbidden("this token may only read", code="read_only")

    def must_be_admin(self) -> None:
        """``Forbidden`` for everybody else."""
        if self.role is not Role.ADMIN:
            raise Forbidden("this call needs an admin token", code="admin_only")


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says of its sender."""

    authorization: str | None
    host: str | None = None
    origin: str | None = None


class Auth(Protocol):
    """Tells who sent a request."""

    @property
    def is_open(self) -> bool:
        """Whether everybody who can reach the server may do everything."""
        ...

    def who(self, credentials: Credentials) -> Caller:
        """The caller; ``Unauthorized`` or ``Forbidden`` when there is none."""
        ...


class TokenEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One token of ``tokens.toml``."""

    token: TokenText
    tenant: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
    role: Role = Role.TRAINER


class _TokenFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokens: list[TokenEntry] = []


class TokenBook:
    """Known tokens."""

    def __init__(self, entries: Sequence[TokenEntry]) -> None:
        self._callers = tuple((_digest(e.token), Caller(tenant=e.tenant, role=e.role)) for e in entries)
        if len({digest for digest, _ in self._callers}) != len(self._callers):
            raise ConfigError("the same token is given twice")

    def __repr__(self) -> str:
        return f"<TokenBook of {len(self._callers)} tokens>"

    @property
    def is_open(self) -> bool:
        """Never."""
        return False

    def who(self, credentials: Credentials) -> Caller:
        """The caller whose token this is."""
        if credentials.authorization is None:
            raise Unauthorized("this call needs a bearer token", code="no_token")
        scheme, _, token = credentials.authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthorized("expected `Authorization: Bearer TOKEN`", code="no_token")
        digest = _digest(token.strip())
        found: Caller | None = None
        # No early end: how long it takes says nothing of which token was nearly right.
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None:
            raise Unauthorized("this token is not known", code="unknown_token")
        return found


class NoAuth:
    """Authentication is off: whoever reaches the server is an admin.

    Web pages that the user's browser shows can reach a loopback address, too, so a request that names another host, or
    comes from another origin, is refused.
    """

    @property
    def is_open(self) -> bool:
        """Always."""
        return True

    def who(self, credentials: Credentials) -> Caller:
        """An admin."""
        host = credentials.host or ""
        if not _is_local(host):
            raise Forbidden("without authentication the server answers to local names only", code="foreign_host")
        if credentials.origin is not None and _authority(credentials.origin) != host:
            raise Forbidden("without authentication the server answers no other web page", code="foreign_origin")
        return Caller(tenant=ADMIN_TENANT, role=Role.ADMIN)


class CompatAuth:
    """The listener for trainers of other servers, which send no token: whoever reaches it may use its routes.

    Web pages are kept out as ``NoAuth`` keeps them out. Where other machines may come, they name this one as they like.
    """

    def __init__(self, *, is_public: bool) -> None:
        self._is_public = is_public

    @property
    def is_open(self) -> bool:
        """Whether it has to stay on addresses that only this machine reaches."""
        return not self._is_public

    def who(self, credentials: Credentials) -> Caller:
        """The tenant of all of them."""
        host = credentials.host or ""
        if not self._is_public and not _is_local(host):
            raise Forbidden("this listener answers to local names only", code="foreign_host")
        if credentials.origin is not None and _authority(credentials.origin) != host:
            raise Forbidden("this listener answers no other web page", code="foreign_origin")
        return Caller(tenant=COMPAT_TENANT, role=Role.TRAINER)


def _authority(origin: str) -> str | None:
    """Whose page asks; ``None`` for what is no origin, which no page of ours sends."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def load_token_book(state_dir: Path) -> TokenBook:
    """The tokens of a state directory; makes the directory and the admin's token where there are none.

    ``ConfigError`` when a file is not the user's own, can be read by others, or can't be understood.
    """
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        admin = _admin_token(state_dir / TOKEN_FILE)
        others = _other_tokens(state_dir / TOKENS_FILE)
    except OSError as exc:
        raise ConfigError(f"can't use the state directory {state_dir}: {exc.strerror}: {exc.filename}") from exc
    return TokenBook([TokenEntry(token=admin, tenant=ADMIN_TENANT, role=Role.ADMIN), *others])


def _admin_token(path: Path) -> str:
    text = _read_private(path)
    if text is None:
        _write_new(path, f"prorld_{secrets.token_urlsafe(32)}\n")
        # Read back what is there now: another daemon may have been first.
        text = _read_private(path) or b""
    try:
        return msgspec.convert(text.decode("ascii").strip(), TokenText)
    except (UnicodeDecodeError, msgspec.ValidationError) as exc:
        raise ConfigError(f"{path} holds no token; delete it and a new one is made") from exc


def _other_tokens(path: Path) -> list[TokenEntry]:
    text = _read_private(path)
    if text is None:
        return []
    try:
        return msgspec.toml.decode(text, type=_TokenFile).tokens
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        # Not the decoder's words: they may quote a line, and the line may hold a token.
        raise ConfigError(f"{path} is not a list of [[tokens]] with token, tenant and role") from exc


def _read_private(path: Path) -> bytes | None:
    """A small file that only its owner, who is this user, can read; ``None`` where there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{path} is not a regular file")
        if found.st_uid != os.geteuid():
            raise ConfigError(f"{path} belongs to another user; delete it or start as that user")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(f"{path} can be used by others; `chmod 600` it, or delete it and a new one is made")
        if found.st_size > _FILE_BYTES_MAX:
            raise ConfigError(f"{path} is larger than {_FILE_BYTES_MAX} bytes")
        return os.read(fd, _FILE_BYTES_MAX)
    finally:
        os.close(fd)


def _write_new(path: Path, text: str) -> None:
    """Make a private file, whole or not at all; one that is there already stays."""
    half = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
        os.write(fd, text.encode())
        os.fsync(fd)
        os.link(half, path)
    except FileExistsError:
        return
    finally:
        os.close(fd)
        half.unlink()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def _is_local(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname
        return name in ("localhost", None) or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
