"""Asking an engine of the pool for the log-probabilities of tokens that are there already.

It takes no lease and no place of a job: the least loaded engine of the right version, within the engine's bound on
calls and a bound of its own. What goes wrong here speaks against the question and not against the engine; whether that
is well is for health checks and jobs to find out.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec
import trio

from prorld.domain.backends import BackendState
from prorld.domain.scoring import UnscoredReason
from prorld.domain.versions import PolicyVersion, in_words
from prorld.errors import BackendError, ContextOverflow, EngineBusy, MalformedReply, Unsupported
from prorld.inference.pool_entry import PoolEntry

__all__ = ["CannotScore", "Gate", "ScoreDesk", "Scored", "Scorer"]

# Of all jobs together: scoring is prefill without a cache, and more of it at once would be felt by those who sample.
SCORES_AT_ONCE = 4
# 32k tokens on a slow engine, its queue included.
SCORE_S_MAX = 120.0
VERSION_S_MAX = 5.0
BUSY_WAIT_S = 0.5
# Engines that are asked for one answer before it is given up.
ENGINES_TRIED_MAX = 3

# Whom to ask first: one with strikes is doubtful, one that drains wants to end.
_RANK = {BackendState.UP: 0, BackendState.SUSPECT: 1, BackendState.DRAINING: 2}


class CannotScore(BackendError):
    """No scores, and which kind of no it is."""

    retryable = False

    def __init__(self, message: str, reason: UnscoredReason) -> None:
        super().__init__(message)
        self.reason: UnscoredReason = reason


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """``logprobs`` begin where they were asked for and end early where the engine's context does."""

    backend_id: str
    logprobs: array[float]
    varies: bool = False


class ScoreDesk(Protocol):
    """What scoring asks of the pool."""

    def entries(self, policy: str) -> Sequence[PoolEntry]:
        """The engines of a policy."""
        ...

    def place(self, entry: PoolEntry, *, prompted: int) -> AbstractAsyncContextManager[None]:
        """A place in the engine, within its bound on calls; how the call went is counted and is no strike."""
        ...


class Gate(Protocol):
    """Whether the engines of a policy may be asked at all; closed while its weights change."""

    @property
    def is_open(self) -> bool:
        """Whether they may be."""
        ...

    async def wait_open(self) -> None:
        """Wait until they may be. The caller's scope bounds the wait."""
        ...


class _Tried:
    """What one question has met so far: who refused it, and who had no place for a token behind it."""

    def __init__(self) -> None:
        self.refused: dict[str, BackendError] = {}
        self.cramped: set[str] = set()


class Scorer:
    """Scores tokens on the engines of a pool. ``gate`` finds that of a policy; without one, policies never change."""

    def __init__(self, desk: ScoreDesk, gate: Callable[[str], Gate | None] = lambda _: None) -> None:
        self._desk = desk
        self._gate = gate
        self._places = trio.CapacityLimiter(SCORES_AT_ONCE)

    def served(self, policy: str) -> frozenset[PolicyVersion | None]:
        """The versions that the policy's engines have now; ``None`` for an engine that does not say."""
        return frozenset(entry.found.weights for entry in self._desk.entries(policy) if entry.can_score)

    async def score(self, policy: str, version: PolicyVersion | None, token_ids: array[int], start: int) -> Scored:
        """What ``version`` says of every token from ``start`` on; ``CannotScore`` where nobody can tell."""
        gate = self._gate(policy)
        tried = _Tried()
        with trio.move_on_after(SCORE_S_MAX):
            while True:
                # Not in a place: those of other policies would stand behind one that is paused.
                while gate is not None and not gate.is_open:
                    await gate.wait_open()
                async with self._places:
                    found = await self._score(policy, version, token_ids, start, tried)
                if found is not None:
                    return found
        raise CannotScore(f"no engine of policy {policy!r} gave scores within {SCORE_S_MAX:g} s", "unscored")

    async def _score(
        self, policy: str, version: PolicyVersion | None, token_ids: array[int], start: int, known: _Tried
    ) -> Scored | None:
        """In a place; ``None`` where the policy is paused."""
        tried, cramped = known.refused, known.cramped
        gate = self._gate(policy)
        while True:
            await trio.lowlevel.checkpoint()
            if gate is not None and not gate.is_open:
                return None
            entry = self._choose(policy, version, tried)
            ids = token_ids[: entry.found.max_context_tokens - (entry.backend_id in cramped)]
            if len(ids) <= start:
                raise CannotScore(f"token {start} is beyond the context of {entry.backend_id}", "too_long")
            try:
                logprobs = await self._ask(entry, ids, start)
                await _assert_version(entry, version)
            except EngineBusy:
                await trio.sleep(BUSY_WAIT_S)
            except CannotScore:
                raise
            except (ContextOverflow, Unsupported) as exc:
                if len(ids) < entry.found.max_context_tokens:
                    tried[entry.backend_id] = exc
                else:
                    # Most engines sample a token behind what they score, and this one found no place for it.
                    cramped.add(entry.backend_id)
            except BackendError as exc:
                tried[entry.backend_id] = exc
            else:
                return Scored(backend_id=entry.backend_id, logprobs=logprobs, varies=entry.found.varies)

    def _choose(self, policy: str, version: PolicyVersion | None, tried: Mapping[str, BackendError]) -> PoolEntry:
        """The least loaded engine of the version that can score and was not tried; raises ``CannotScore``."""
        serving = [entry for entry in self._desk.entries(policy) if entry.can_score and entry.found.weights == version]
        able = [entry for entry in serving if entry.found.scores and entry.found.exact]
        untried = [entry for entry in able if entry.backend_id not in tried]
        if untried and len(tried) < ENGINES_TRIED_MAX:
            return min(untried, key=_load)
        for backend_id, error in tried.items():
            raise CannotScore(f"{backend_id} gave no scores: {error.message}", "unscored") from error
        if not serving:
            raise CannotScore(f"no engine of policy {policy!r} serves {in_words(version)} now", "not_served")
        raise CannotScore(f"the engines of policy {policy!r} can't say what given tokens score", "no_scores")

    async def _ask(self, entry: PoolEntry, ids: array[int], start: int) -> array[float]:
        async with self._desk.place(entry, prompted=len(ids)):
            logprobs = await entry.backend.score(ids, start)
        if len(logprobs) != len(ids) - start or not all(map(math.isfinite, logprobs)):
            raise MalformedReply(f"{entry.backend_id} scored {len(logprobs)} of {len(ids) - start} tokens")
        return logprobs


async def _assert_version(entry: PoolEntry, version: PolicyVersion | None) -> None:
    """An update may have overtaken the question, and no version is ever meant twice: so it is looked at afterwards."""
    if entry.found.weights != version:
        raise CannotScore(f"{entry.backend_id} has moved on meanwhile", "not_served")
    if not entry.found.control:
        return
    now: PolicyVersion | None = None
    with trio.move_on_after(VERSION_S_MAX) as waiting:
        now = await entry.backend.read_version()
    if waiting.cancelled_caught:
        raise BackendError(f"{entry.backend_id} does not say which version it has")
    if now != version:
        raise CannotScore(f"{entry.backend_id} has moved on meanwhile", "not_served")


def _load(entry: PoolEntry) -> tuple[int, float, float]:
    row = entry.row
    return _RANK.get(row.state, len(_RANK)), row.inflight / row.weight, row.leases / row.weight
