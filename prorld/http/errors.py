"""From an exception to an answer: the status by class, one shape for every body.

It decides nothing else. An exception that is not in the table is a bug of ours: its traceback goes to the log, and the
client learns only the id under which it is found there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

import structlog
import trio
from quart import Response
from structlog.typing import FilteringBoundLogger
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from prorld.errors import (
    BackendError,
    BadRequest,
    Conflict,
    EngineBusy,
    Forbidden,
    Forgotten,
    Impossible,
    NoBackend,
    NotFound,
    Overloaded,
    ProrldError,
    RequestError,
    TooLarge,
    TooMany,
    Unauthorized,
    chain,
)
from prorld.http.encode import answer
from prorld.wire.ops import ErrorBody, ErrorDetail

__all__ = ["Refusal", "UnsupportedMedia", "answer_error", "leaves", "refusal_of"]

log: FilteringBoundLogger = structlog.get_logger("prorld.http")


class UnsupportedMedia(RequestError):
    """A body that is neither JSON nor MessagePack by its own word."""

    code = "unsupported_media_type"


# The first class that fits decides, so a subclass stands before its base.
_STATUS: Final[tuple[tuple[type[ProrldError], int], ...]] = (
    (BadRequest, 400),
    (Unauthorized, 401),
    (Forbidden, 403),
    (NotFound, 404),
    (Conflict, 409),
    (Forgotten, 410),
    (TooLarge, 413),
    (UnsupportedMedia, 415),
    (Impossible, 422),
    (TooMany, 429),
    (Overloaded, 503),
    (RequestError, 400),
    (EngineBusy, 503),
    (NoBackend, 503),
    (BackendError, 422),
)

_HTTP_ERRORS: Final[dict[int, tuple[str, str]]] = {
    400: ("bad_request", "the request can't be understood"),
    404: ("no_such_route", "there is no such route"),
    405: ("method_not_allowed", "the route does not know this method"),
    408: ("body_timeout", "the body did not arrive in time"),
    413: ("too_large", "the body is over the limit"),
}


class Refusal(NamedTuple):
    """What is answered in the place of a success."""

    status: int
    detail: ErrorDetail
    headers: dict[str, str]


def answer_error(exc: BaseException, request_id: str) -> Response:
    """The answer to a request that ended with ``exc``."""
    refusal = refusal_of(exc, request_id)
    return answer(ErrorBody(error=refusal.detail), refusal.status, headers=refusal.headers)


def refusal_of(exc: BaseException, request_id: str) -> Refusal:
    """What there is to be said of ``exc``; a bug of ours goes to the log."""
    found = leaves(exc)
    refusals = [_refusal(leaf) for leaf in found]
    # One bug among refusals is still a bug, and must not hide behind them.
    known = [refusal for refusal in refusals if refusal is not None]
    if len(known) == len(refusals):
        return known[0]
    log.error("request.crashed", exc_info=exc, request_id=request_id)
    message = f"an error of the daemon; its log has it under request {request_id}"
    return Refusal(500, ErrorDetail(code="internal", message=message, retryable=False), {})


def leaves(exc: BaseException) -> list[BaseException]:
    """The exceptions in a group, or the one itself."""
    return list(_leaves(exc))


def _leaves(exc: BaseException) -> Iterator[BaseException]:
    if isinstance(exc, BaseExceptionGroup):
        for inner in exc.exceptions:
            yield from _leaves(inner)
    else:
        assert not isinstance(exc, trio.Cancelled), "a cancelled request has nobody to answer"
        yield exc


def _refusal(exc: BaseException) -> Refusal | None:
    if isinstance(exc, ProrldError):
        return _ours(exc)
    if isinstance(exc, HTTPException) and exc.code is not None and exc.code < 500:
        code, message = _HTTP_ERRORS.get(exc.code, (f"http_{exc.code}", exc.name))
        headers = {"Allow": ", ".join(sorted(exc.valid_methods or ()))} if isinstance(exc, MethodNotAllowed) else {}
        return Refusal(exc.code, ErrorDetail(code=code, message=message, retryable=exc.code == 408), headers)
    return None


def _ours(exc: ProrldError) -> Refusal | None:
    status = next((status for kind, status in _STATUS if isinstance(exc, kind)), None)
    if status is None:
        return None
    headers: dict[str, str] = {}
    if status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(getattr(exc, "retry_after_s", 1.0))))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    # An engine's error carries the reason in its causes; a refusal is complete in itself.
    message = chain(exc) if isinstance(exc, BackendError) else exc.message
    detail = ErrorDetail(code=exc.stable_code, message=message, retryable=exc.may_retry, details=exc.details)
    return Refusal(status, detail, headers)
