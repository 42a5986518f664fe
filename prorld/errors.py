"""The closed taxonomy of errors. One class per boundary; every class has a stable snake_case code.

Three families, three fates:

* ``ConfigError`` ends the process at start with one readable line.
* ``RequestError`` is answered to the client; nothing was changed.
* ``RolloutError`` is recorded on the job that met it and never ends anything else.

Anything outside this file that escapes from a job is a bug: it is logged with its traceback and still becomes exactly
one terminal event.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

__all__ = [
    "BackendError",
    "BadRequest",
    "ConfigError",
    "Conflict",
    "ContextOverflow",
    "EngineBusy",
    "Forbidden",
    "Forgotten",
    "GraderError",
    "HandlerError",
    "Impossible",
    "MalformedReply",
    "NoBackend",
    "NotFound",
    "Overloaded",
    "ProrldError",
    "RendererError",
    "RequestError",
    "RolloutError",
    "SandboxError",
    "Stale",
    "TooLarge",
    "TooMany",
    "Unauthorized",
    "Unsupported",
    "WeightsRefused",
    "boundary",
    "chain",
    "leaves",
]


class ProrldError(Exception):
    """Base of everything prorld raises on purpose."""

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        retryable: bool | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self._code = code
        self._retryable = retryable
        self.details = details

    @property
    def stable_code(self) -> str:
        """The code a program may match on."""
        return self._code or type(self).code

    @property
    def may_retry(self) -> bool:
        """Whether the same call can succeed later without a change by the caller."""
        return type(self).retryable if self._retryable is None else self._retryable


class ConfigError(ProrldError):
    """The configuration can't be used; the process ends with exit code 78."""

    code = "config_error"


# --- answered to a client ---------------------------------------------------------------------------------------------


class RequestError(ProrldError):
    """A request that is refused; nothing was accepted and nothing was changed."""

    code = "bad_request"


class BadRequest(RequestError):
    """Not decodable, or a field is wrong; ``details["path"]`` names it."""


class Unauthorized(RequestError):
    """No token, or one that is not known."""

    code = "unauthorized"


class Forbidden(RequestError):
    """A known token whose role does not allow the call."""

    code = "forbidden"


class NotFound(RequestError):
    """No such resource for this tenant."""

    code = "not_found"


class Conflict(RequestError):
    """The same id with another body, or a state that does not allow the call."""

    code = "conflict"


class Forgotten(RequestError):
    """It existed and its retention has ended; its id never runs again."""

    code = "forgotten"


class TooLarge(RequestError):
    """A body over the bound."""

    code = "too_large"


class Impossible(RequestError):
    """Well-formed, but it can't be done: an unknown handler, an impossible budget."""

    code = "impossible"


class Overloaded(RequestError):
    """Nothing was accepted; come back after ``retry_after_s``."""

    code = "overloaded"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class TooMany(Overloaded):
    """The caller's own share is used up, while the daemon has room for others; nothing was accepted."""

    code = "too_many"


# --- recorded on a job ------------------------------------------------------------------------------------------------


class RolloutError(ProrldError):
    """Something a rollout met; ``prorld.domain.outcome`` says which outcome it becomes."""


class SandboxError(RolloutError):
    """The sandbox could not be made, died, or broke its protocol. Infrastructure, never the policy's fault."""

    code = "sandbox_failed"
    retryable = True


class BackendError(RolloutError):
    """An engine call failed. ``status`` is the engine's HTTP status where there was one."""

    code = "engine_failed"
    retryable = True

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        retryable: bool | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message, code=code, retryable=retryable, details=details)
        self.status = status


class EngineBusy(BackendError):
    """The engine is paused or full (503, 429): wait and ask again; never a strike against it."""

    code = "engine_busy"


class ContextOverflow(BackendError):
    """The prompt does not fit the engine's context; a limit of the policy, not a fault."""

    code = "context_overflow"
    retryable = False


class MalformedReply(BackendError):
    """An answer that can't be trusted: wrong lengths, non-finite log-probabilities, other prompt ids."""

    code = "malformed_engine_reply"
    retryable = True


class Unsupported(BackendError):
    """This kind of engine can't do that, or was started without it."""

    code = "engine_cannot"
    retryable = False


class WeightsRefused(BackendError):
    """The weights can't be loaded, and the engine goes on with those it had."""

    code = "weights_refused"
    retryable = False


class NoBackend(BackendError):
    """The policy has no engine that could take the call."""

    code = "no_backend"


class Stale(RolloutError):
    """What was sampled is too old for the version that the policy has now."""

    code = "stale"


class RendererError(RolloutError):
    """The chat template or tokenizer can't render these messages without breaking the prefix law."""

    code = "renderer_refused"


class HandlerError(RolloutError):
    """The task's handler failed or was used wrongly."""

    code = "handler_failed"


class GraderError(RolloutError):
    """The grader did not run to its end. The reward is then ``null``, never zero."""

    code = "grader_failed"


@contextmanager
def boundary(error: type[RolloutError], what: str, *, code: str | None = None) -> Iterator[None]:
    """Classify what escapes from a block at the edge of the project.

    An error that is already classified passes unchanged. ``what`` says what was being done ("starting the sandbox");
    the cause stays chained and is not repeated in the message.
    """
    try:
        yield
    except RolloutError:
        raise
    except Exception as exc:
        raise error(f"{what} failed", code=code) from exc


def leaves(exc: BaseException) -> Iterator[BaseException]:
    """The exceptions in a group, however deep, in order; an exception that is no group is its own leaf."""
    if isinstance(exc, BaseExceptionGroup):
        for inner in exc.exceptions:
            yield from leaves(inner)
    else:
        yield exc


def chain(exc: BaseException, *, limit: int = 2000) -> str:
    """The message of an error followed by those of its causes, outermost first, bounded to ``limit`` characters.

    A cause that an error was raised again from, in the same words, is said once.
    """
    parts: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = exc
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        words = _one(current)
        if not parts or parts[-1] != words:
            parts.append(words)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    # A lone surrogate in a plugin's words can't be written on any wire.
    text = ": ".join(parts)[: limit + 1].encode("utf-8", "replace").decode()
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _one(exc: BaseException) -> str:
    if isinstance(exc, BaseExceptionGroup):
        return f"{exc.message} [{'; '.join(_one(leaf) for leaf in exc.exceptions[:4])}]"
    if isinstance(exc, ProrldError):
        return exc.message
    return f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
