"""The application for trainers of other servers: the original ProRL Agent server's seven routes, and NeMo Gym's /run.

It listens beside the other one, asks for no token, and answers as those servers do: with ``detail`` in what went wrong,
and with their statuses. It is as lenient as they are about what a request says of itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeVar, cast

import msgspec
from quart import Response, g, request

from prorld.http.app import App
from prorld.http.deps import CompatDeps
from prorld.http.encode import raw
from prorld.http.errors import Refusal, refusal_of
from prorld.http.negotiate import JSON
from prorld.rollout.compat.service import ALREADY_STARTED
from prorld.wire.codec import decode, encode
from prorld.wire.compat import Address, CancelProcess, CompatTiming, ProcessRequest, ProcessResult, Word
from prorld.wire.ops import ErrorDetail, Health

__all__ = ["CompatApp", "create_compat_app"]

T = TypeVar("T")

# A refusal that is 400 there; every other fault of a body is 422.
_UNREGISTERED: Final = frozenset({"unknown_data_source", "unknown_handler", "handler_broken"})
_BAD_REQUESTS: Final = frozenset({*_UNREGISTERED, ALREADY_STARTED})
_BODY_STATUSES: Final = frozenset({400, 415, 422})
_RETRY_S: Final = "1"


class WrongField(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of a body, in the words of FastAPI."""

    loc: list[str]
    msg: str
    type: str = "value_error"


class CompatError(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong: ``detail`` as the original says it, ``error`` as we do."""

    detail: str | list[WrongField]
    error: ErrorDetail


class TimedOut(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a job was up: the result but for its ``error``, which is ours here."""

    detail: str
    error: ErrorDetail
    instance_id: Any
    trajectory_id: Any
    job_id: str
    prorld_job_id: str
    critical_error: str | None
    timing: CompatTiming
    resolved: bool = False
    success: bool = False
    finish: bool = False
    filter: bool = True
    reward: float | None = None
    messages: list[Any] = []


class CompatApp(App):
    """The seven routes and one more."""

    def __init__(self, deps: CompatDeps) -> None:
        super().__init__(deps)
        self._service = deps.service
        self._gym = deps.gym
        rows: list[tuple[str, str, Callable[[], Awaitable[Response]]]] = [
            ("POST", "/start", self._start),
            ("POST", "/stop", self._stop),
            ("GET", "/status", self._status),
            ("POST", "/add_llm_server", self._add),
            ("POST", "/clear_llm_server", self._clear),
            ("POST", "/process", self._process),
            ("POST", "/cancel", self._cancel),
            ("POST", "/run", self._run),
            ("GET", "/healthz", self._health),
        ]
        for method, path, handler in rows:
            self.add_url_rule(path, path.strip("/"), handler, methods=[method])

    def refuse(self, error: BaseException) -> Response:
        """As the original would."""
        refusal = refusal_of(error, g.get("request_id", "unknown"))
        return _refused(_as_there(refusal))

    # --- routes -------------------------------------------------------------------------------------------------------

    async def _start(self) -> Response:
        await self.holds.work(_done(self._service.start))
        return _said("Server started successfully")

    async def _stop(self) -> Response:
        await self.holds.work(_done(self._service.stop))
        return _said("Server stopped successfully")

    async def _status(self) -> Response:
        return _json(await self._service.status())

    async def _add(self) -> Response:
        address = (await _body(Address)).address
        runs = await self.holds.work(partial(self._service.add_engine, address))
        return _said(f"{'Added' if runs else 'Buffered'} LLM server address: {address}")

    async def _clear(self) -> Response:
        await self.holds.work(_done(self._service.clear_engines))
        return _said("Cleared all LLM server addresses")

    async def _process(self) -> Response:
        asked = await _body(ProcessRequest)
        result = await self.holds.work(partial(self._service.process, asked))
        return _timed_out(result) if result.critical_error == "timeout" else _json(result)

    async def _cancel(self) -> Response:
        name = (await _body(CancelProcess)).job_id
        await self.holds.work(_done(partial(self._service.cancel, name)))
        return _said(f"Job {name} canceled successfully")

    async def _run(self) -> Response:
        row = await _body(dict[str, Any])
        ran = await self.holds.work(partial(self._gym.run, row))
        if ran.answer is not None:
            return _json(ran.answer)
        outcome = ran.outcome
        status = 504 if ran.timed_out else 503
        words = f"the rollout has no reward that may be trained on: {outcome.message or outcome.kind}"
        detail = ErrorDetail(code=outcome.code or outcome.kind.value, message=words, retryable=True)
        return _refused(Refusal(status, detail, {"Retry-After": _RETRY_S} if status == 503 else {}))

    async def _health(self) -> Response:
        return _json(Health())


def create_compat_app(deps: CompatDeps) -> CompatApp:
    """The application with all its routes."""
    return CompatApp(deps)


async def _body(kind: type[T]) -> T:
    """The body as JSON, whatever the request says it is: plain clients say nothing, or that it is a form."""
    return decode(cast("bytes", await request.get_data(as_text=False)), kind)


def _done(do: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[bool]]:
    async def done() -> bool:
        await do()
        return True

    return done


def _said(words: str) -> Response:
    return _json(Word(status=words))


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return raw(encode(value), JSON, status, headers=headers)


def _as_there(refusal: Refusal) -> Refusal:
    """The status that the original has for it."""
    code = refusal.detail.code
    if code in _BAD_REQUESTS:
        return refusal._replace(status=400)
    return refusal._replace(status=422) if refusal.status in _BODY_STATUSES else refusal


def _refused(refusal: Refusal) -> Response:
    error = refusal.detail
    words: str | list[WrongField] = error.message
    if refusal.status == 422:
        path = str((error.details or {}).get("path", "$"))
        at = [part for part in path.replace("]", "").replace("[", ".").split(".") if part not in ("", "$")]
        words = [WrongField(loc=["body", *at], msg=error.message, type=error.code)]
    return _json(CompatError(detail=words, error=error), refusal.status, refusal.headers)


def _timed_out(result: ProcessResult) -> Response:
    words = f"Job {result.job_id} timed out: {result.error}"
    return _json(
        TimedOut(
            detail=words,
            error=ErrorDetail(code="job_timeout", message=words, retryable=True),
            instance_id=result.instance_id,
            trajectory_id=result.trajectory_id,
            job_id=result.job_id,
            prorld_job_id=result.prorld_job_id,
            critical_error=result.critical_error,
            timing=result.timing,
        ),
        504,
    )
