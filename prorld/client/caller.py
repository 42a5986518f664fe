"""Typed calls to one daemon, as flows: what is tried again, what a reply is read as, what a refusal is told as."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import quote, urlencode

import msgspec

from prorld.client.errors import BAD_REPLY, CONNECTION_LOST, NO_DAEMON, ClientError
from prorld.client.find import TOKEN_VARIABLE, Target
from prorld.client.flows import Ask, Flow, Nap
from prorld.client.http import JSON, MSGPACK, Reply
from prorld.wire.ops import ErrorBody

__all__ = ["AWAY_S", "LONG_POLL_S", "REQUEST_S", "Caller", "Calls", "part", "query"]

T = TypeVar("T")

REQUEST_S = 60.0
UNAUTHORIZED = 401
# The longest that one long-poll asks for; a longer wait is several of them.
LONG_POLL_S = 30.0
# How long a daemon may stay away, one that is started again or a window that is full, before a wait gives up.
AWAY_S = 300.0
_BACKOFF_S = (0.1, 0.3, 1.0, 2.0)
_AWAY = frozenset({NO_DAEMON, CONNECTION_LOST})


class Caller:
    """Where the daemon is, and the patience of whoever calls it.

    ``find`` says where. It is asked again while nobody answers: a daemon that was started again may listen elsewhere,
    and its state directory tells where.
    """

    def __init__(self, find: Callable[[], Target], patience_s: float) -> None:
        self._find = find
        self._target = find()
        self._patience_s = patience_s

    @property
    def address(self) -> str:
        """Where the daemon is."""
        return str(self._target.address)

    def call(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        body: msgspec.Struct | None = None,
        within_s: float = REQUEST_S,
        also: tuple[int, ...] = (),
        accept: str = JSON,
        patience_s: float | None = None,
        is_repeatable: bool = True,
    ) -> Flow[T]:
        """One call, tried again while that can do no harm and patience lasts. Raises ``ClientError``.

        One that is not ``is_repeatable`` is not sent again where its answer was lost, only where it was refused.
        """
        data = None if body is None else msgspec.json.encode(body)
        until = time.monotonic() + (self._patience_s if patience_s is None else patience_s)
        attempt = 0
        while True:
            target = self._target
            try:
                reply = yield Ask(target, method, path, data, within_s, accept, is_repeatable)
                return _told(target, reply, kind, also)
            except ClientError as exc:
                pause = exc.retry_after_s or _BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)]
                is_lost = exc.stable_code == CONNECTION_LOST and not is_repeatable
                if is_lost or not exc.may_retry or time.monotonic() + pause > until:
                    raise
                is_away = exc.stable_code in _AWAY
            yield Nap(pause)
            if is_away:
                self._follow()
            attempt += 1

    def call_surely(
        self,
        method: str,
        path: str,
        kind: type[T],
        refusals: frozenset[str],
        done: Callable[[], Flow[list[T]]],
        *,
        body: msgspec.Struct | None = None,
    ) -> Flow[T]:
        """One call that is refused where it was done before.

        After a lost answer such a refusal may be of what this very call did: then ``done`` looks, and what it finds is
        the answer. Where it finds nothing, the call that was lost may still be in progress, and it is asked for again.
        """
        until, attempt, was_lost = time.monotonic() + self._patience_s, 0, False
        while True:
            try:
                return (yield from self.call(method, path, kind, body=body, is_repeatable=False))
            except ClientError as exc:
                is_lost = exc.stable_code == CONNECTION_LOST and exc.may_retry
                if not is_lost and not (was_lost and exc.stable_code in refusals):
                    raise
                refusal = exc
            found: list[T] = [] if is_lost else (yield from done())
            if found:
                return found[0]
            was_lost = True
            pause = _BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)]
            if time.monotonic() + pause > until:
                raise refusal
            yield Nap(pause)
            self._follow()
            attempt += 1

    def _follow(self) -> None:
        try:
            self._target = self._find()
        except ClientError:
            # Its directory says nothing while it starts; the next try looks again.
            return

    def poll(
        self,
        path: str,
        kind: type[T],
        done: Callable[[T], bool],
        within_s: float | None,
        *,
        patience_s: float | None = None,
    ) -> Flow[T]:
        """What a GET says once it is ``done``, or as it is after ``within_s``."""
        until = None if within_s is None else time.monotonic() + within_s
        while True:
            left = LONG_POLL_S if until is None else min(LONG_POLL_S, max(0.0, until - time.monotonic()))
            where = f"{path}{query(wait_s=f'{left:.3f}')}"
            found = yield from self.call("GET", where, kind, within_s=left + REQUEST_S, patience_s=patience_s)
            if done(found) or (until is not None and time.monotonic() >= until):
                return found


class Calls:
    """What the parts of a client have in common."""

    def __init__(self, caller: Caller, *, progress: bool | None = None) -> None:
        self._caller = caller
        self._call = caller.call
        self._progress = progress

    @property
    def address(self) -> str:
        """Where the daemon is."""
        return self._caller.address


def _told(target: Target, reply: Reply, kind: type[T], also: tuple[int, ...]) -> T:
    try:
        return _decoded(reply, kind, also)
    except ClientError as exc:
        if exc.status != UNAUTHORIZED:
            raise
        cure = f"no token is known for {target.address}: set ${TOKEN_VARIABLE}"
        words = f"it came from {target.token_from}" if target.token else cure
        message = f"{exc.message} ({words})"
        raise ClientError(message, code=exc.stable_code, status=exc.status, details=exc.details) from exc


def _decoded(reply: Reply, kind: type[T], also: tuple[int, ...]) -> T:
    if not 200 <= reply.status < 300 and reply.status not in also:
        raise _refusal(reply)
    try:
        if reply.headers.get("content-type") == MSGPACK:
            return msgspec.msgpack.decode(reply.body, type=kind)
        # An answer without a body stands for ``None``.
        return msgspec.json.decode(reply.body or b"null", type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        message = f"the daemon answered something else than {kind.__name__}: {exc}"
        raise ClientError(message, code=BAD_REPLY, status=reply.status) from exc


def _refusal(reply: Reply) -> ClientError:
    try:
        decode = msgspec.msgpack.decode if reply.headers.get("content-type") == MSGPACK else msgspec.json.decode
        error = decode(reply.body, type=ErrorBody).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        text = f"HTTP {reply.status} without a readable body; is this a prorld daemon?"
        return ClientError(text, code=BAD_REPLY, status=reply.status)
    return ClientError(
        error.message,
        code=error.code,
        retryable=error.retryable,
        status=reply.status,
        details=error.details,
        retry_after_s=_seconds(reply.headers.get("retry-after")),
    )


def _seconds(text: str | None) -> float | None:
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return seconds if 0 < seconds < float("inf") else None


def part(text: str) -> str:
    """A part of a path."""
    return quote(text, safe="")


def query(**fields: object) -> str:
    """What follows a path; a field that is ``None`` is left out."""
    given = {name: value for name, value in fields.items() if value is not None}
    return f"?{urlencode(given)}" if given else ""
