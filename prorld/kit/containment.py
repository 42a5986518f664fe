"""Keeps what a plugin may raise to what an exception handler expects.

Errors pass, cancellation passes. What is neither (``sys.exit``, a ``KeyboardInterrupt`` or a ``BaseException`` of the
plugin's own) would pass every ``except Exception`` and end the process; it becomes a ``HandlerError``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio

from prorld.errors import HandlerError, leaves

__all__ = ["contained"]


@contextmanager
def contained(what: str) -> Iterator[None]:
    """Run a plugin's code; beside something strange in a group, a cancellation or an error stays what it is."""
    try:
        yield
    except (Exception, trio.Cancelled):
        raise
    except BaseExceptionGroup as group:
        strange, rest = group.split(lambda exc: not isinstance(exc, Exception | trio.Cancelled | BaseExceptionGroup))
        if strange is None:
            raise
        if rest is not None:
            raise rest from strange
        raise _error(what, next(leaves(strange))) from strange
    except BaseException as exc:  # noqa: ASYNC103  (no cancellation: that is raised again above)
        raise _error(what, exc) from exc


def _error(what: str, exc: BaseException) -> HandlerError:
    if isinstance(exc, SystemExit):
        return HandlerError(f"{what} called sys.exit", code="sys_exit")
    return HandlerError(f"{what} raised {type(exc).__name__}, which is no Exception", code="not_an_exception")
