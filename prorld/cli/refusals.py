"""Refusals of the daemon in the words of the command line: which flag helps, and what stands in the details."""

from __future__ import annotations

from prorld.cli.output import typed
from prorld.client import ClientError

__all__ = ["with_cure", "with_words"]


def with_words(error: ClientError, *words: str) -> ClientError:
    """The same refusal, saying more."""
    return ClientError(
        error.message + "".join(words),
        code=error.stable_code,
        retryable=error.may_retry,
        status=error.status,
        details=error.details,
        retry_after_s=error.retry_after_s,
    )


def with_cure(error: ClientError) -> ClientError:
    """With the flag that a holder of a paused policy has to give; what can't be cured so stays as it is."""
    # An update that runs is told by its id; that one ends by itself.
    if error.stable_code != "policy_busy" or set(error.details or {}) != {"holder"}:
        return error
    return with_words(error, typed("; if the pause is yours, give its --pause-id (`prorld policies list` shows it)"))
