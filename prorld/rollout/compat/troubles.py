"""Why engines that a trainer has named do not serve it, in words that it can show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prorld.domain.backends import BackendState
from prorld.errors import BackendError, EngineBusy, MalformedReply, ProrldError, RequestError, Unsupported, chain
from prorld.wire.ops import BackendInfo

__all__ = ["NAMED_MAX", "WORDS_MAX", "is_final", "sentence", "why_not", "words_of"]

NAMED_MAX: Final = 5
WORDS_MAX: Final = 500
_NO_ENGINE: Final = range(400, 500)
# Those say that it is an engine, and not now.
_LATER: Final = frozenset({408, 425, 429})


def is_final(error: ProrldError) -> bool:
    """Whether waiting is in vain: it was refused, or what answers there is no engine of the kind it is named as."""
    if isinstance(error, RequestError):
        return not error.may_retry
    if isinstance(error, EngineBusy) or not isinstance(error, BackendError):
        return False
    return isinstance(error, MalformedReply | Unsupported) or (
        error.status in _NO_ENGINE and error.status not in _LATER
    )


def why_not(info: BackendInfo) -> str | None:
    """Why an engine of the pool takes no calls; ``None`` for one that does."""
    if info.state == BackendState.QUARANTINED:
        return f"{info.url} is kept out: {info.details.get('quarantine', 'its version is not that of the policy')}"
    if info.state == BackendState.DOWN:
        return f"{info.url} was there and does not answer any more"
    return f"{info.url} is being drained" if info.state == BackendState.DRAINING else None


def words_of(url: str, error: ProrldError | None, *, was_there: bool) -> str:
    """Of an address at which there is no engine."""
    if error is not None:
        return f"{url}: {chain(error)[:WORDS_MAX]}"
    return f"{url} was removed" if was_there else f"{url} has not answered yet"


def sentence(troubles: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = len(troubles) - NAMED_MAX
    return "; ".join([*troubles[:NAMED_MAX], *([f"and {more} more"] if more > 0 else [])])
