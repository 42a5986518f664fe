"""The one error of the client: what went wrong, whether trying again can help, the HTTP status where there was one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prorld.domain.policy import BackendResult
from prorld.errors import ProrldError

# Codes that this side makes itself; every other code came from the daemon.
NO_DAEMON = "no_daemon"
CONNECTION_LOST = "connection_lost"
BAD_REPLY = "bad_reply"
# Nothing new came while the caller was willing to wait.
NOTHING_NEW = "nothing_new"
# An update of a policy goes on, and the caller has no more time for it.
STILL_RUNNING = "still_running"
# All connections of an asynchronous client were in use for too long.
TOO_MANY_CALLS = "too_many_calls"
BAD_ADDRESS = "bad_address"
TOKEN_UNREADABLE = "token_unreadable"  # noqa: S105 - the name of an error, no secret
TOKEN_EXPOSED = "token_exposed"  # noqa: S105 - the name of an error, no secret


class ClientError(ProrldError):
    """A call that did not succeed."""

    code = "client_error"

    def __init__(
        self,
        message: str,
        *,
        code: str,
        retryable: bool = False,
        status: int | None = None,
        details: dict[str, Any] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, code=code, retryable=retryable, details=details)
        self.status = status
        self.retry_after_s = retry_after_s


class UpdateFailed(ClientError):
    """No engine took the new weights. ``backends`` says of each why."""

    code = "update_failed"

    def __init__(self, message: str, *, code: str, backends: Sequence[BackendResult]) -> None:
        super().__init__(message, code=code)
        self.backends = tuple(backends)
