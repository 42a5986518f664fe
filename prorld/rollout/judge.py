"""Asking another policy from EVAL: one greedy answer, of no trajectory and no budget of the job that wants it.

The session is one of its own, so what it samples is counted for the engines and nowhere else. Whatever goes wrong is a
``GraderError``: a judge that is not there, or does not answer, is no bad grade.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol

import trio

from prorld.domain.job import AgentLimits, JobSpec, Sampling
from prorld.domain.messages import Message
from prorld.errors import BackendError, GraderError, chain
from prorld.inference.contract import Turn
from prorld.inference.session import ModelSession

__all__ = ["ASKS_AT_ONCE", "Asked", "JudgeSource", "ask_judge"]

# Of one attempt; a grader that asks more at a time waits, and spends its own limit on that.
ASKS_AT_ONCE = 8
MESSAGES_MAX = 64
CHARS_MAX = 1 << 20
TOKENS_MAX = 1 << 15
LIMIT_S_MAX = 3600.0
# A judge's context is its engine's to bound.
CONTEXT_TOKENS_MAX = 10_000_000


class Asked(NamedTuple):
    """What a judge said, and what it took."""

    answer: str
    sampled: int
    seconds: float


class JudgeSource(Protocol):
    """Where engines come from; that of the jobs."""

    def open(
        self, spec: JobSpec, attempt: int, on_turn: Callable[[int, Turn], None]
    ) -> AbstractAsyncContextManager[ModelSession]:
        """Lease an engine for as long as the block lasts. Waits for one where there is none."""
        ...

    def knows(self, policy: str) -> bool:
        """Whether there is such a policy, with an engine or without."""
        ...


async def ask_judge(
    source: JudgeSource,
    asker: JobSpec,
    attempt: int,
    n: int,
    policy: str,
    messages: Sequence[Message],
    *,
    max_tokens: int,
    limit_s: float,
    places: trio.CapacityLimiter,
) -> Asked:
    """The ``n``-th answer of an attempt, in one of its ``places``. Raises ``GraderError`` and nothing else."""
    await trio.lowlevel.checkpoint()
    _check(messages, max_tokens, limit_s)
    if not source.knows(policy):
        raise GraderError(f"there is no policy {policy[:64]!r} that could judge", code="no_judge")
    spec = _spec(asker, n, policy, max_tokens)
    began = trio.current_time()
    leased: ModelSession | None = None
    turn: Turn | None = None
    with trio.move_on_after(limit_s):
        try:
            async with places, source.open(spec, attempt, _nobody_listens) as session:
                leased = session
                await session.start(messages)
                turn = await session.turn()
        except Exception as exc:
            raise _failed(policy, exc) from exc
    if turn is None:
        raise _late(policy, leased, limit_s)
    if not turn.content.strip():
        raise GraderError(f"the judge {policy} gave no answer: {_why_empty(turn)}", code="judge_failed")
    return Asked(turn.content, turn.sampled, trio.current_time() - began)


def _check(messages: Sequence[Message], max_tokens: int, limit_s: float) -> None:
    words = None
    if not 1 <= len(messages) <= MESSAGES_MAX:
        words = f"it is asked with 1 to {MESSAGES_MAX} messages, not {len(messages)}"
    elif sum(len(message.content) for message in messages) > CHARS_MAX:
        words = f"its messages are longer than {CHARS_MAX} characters"
    elif not 1 <= max_tokens <= TOKENS_MAX:
        words = f"it may be given 1 to {TOKENS_MAX} tokens, not {max_tokens}"
    elif not 0 < limit_s <= LIMIT_S_MAX or math.isnan(limit_s):
        words = f"it may be given up to {LIMIT_S_MAX:g} s, not {limit_s:g}"
    if words is not None:
        raise GraderError(f"the judge can't be asked: {words}", code="judge_failed")


def _spec(asker: JobSpec, n: int, policy: str, max_tokens: int) -> JobSpec:
    """A job that is none: a name of its own for the engine, one turn, and nothing that could be too old."""
    return JobSpec(
        job_id=f"{asker.job_id}-judge-{n}",
        tenant=asker.tenant,
        handler=asker.handler,
        instance={},
        policy=policy,
        sampling=Sampling(temperature=0.0, max_tokens=max_tokens),
        agent=AgentLimits(max_turns=1, max_context_tokens=CONTEXT_TOKENS_MAX, max_sampled_tokens=max_tokens),
        priority=asker.priority,
        purpose="eval",
        max_staleness=None,
    )


def _nobody_listens(_turn: int, _said: Turn) -> None:
    pass


def _failed(policy: str, exc: Exception) -> GraderError:
    may_pass = isinstance(exc, BackendError) and exc.may_retry
    return GraderError(f"the judge {policy} failed: {chain(exc, limit=500)}", code="judge_failed", retryable=may_pass)


def _late(policy: str, leased: ModelSession | None, limit_s: float) -> GraderError:
    """Without an engine it is as if there were no judge, for now; with one the judge was too slow."""
    if leased is None:
        message = f"no engine of the judge {policy} was there within {limit_s:g} s"
        return GraderError(message, code="no_judge", retryable=True)
    lacking = "" if leased.lacking is None else f", which it spent waiting ({leased.lacking})"
    message = f"the judge {policy} did not answer within {limit_s:g} s{lacking}"
    return GraderError(message, code="judge_timeout", retryable=True)


def _why_empty(turn: Turn) -> str:
    if not turn.sampled:
        return "what it was asked leaves no room in its context"
    if turn.truncated:
        return f"it was still at it after {turn.sampled} tokens"
    return "it said nothing"
