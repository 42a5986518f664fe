"""What a client has to make of an engine that misbehaves on command."""

from __future__ import annotations

from array import array

import trio

from prorld.errors import BackendError, EngineBusy, MalformedReply
from prorld.testing.engine_under_test import EngineUnderTest, assert_whole, error_of
from prorld.testing.scripted_engine.script import MALFORMED, Fault

__all__ = [
    "FAULT_CONTRACT",
    "SCORE_FAULTS",
    "FaultCheck",
    "a_hanging_engine_is_left_by_the_caller",
    "fault_is_typed",
    "score_fault_is_typed",
]

FaultCheck = tuple[Fault, type[BackendError]]

FAULT_CONTRACT: tuple[FaultCheck, ...] = (
    *((Fault(kind=kind), MalformedReply) for kind in MALFORMED),
    (Fault(kind="truncated"), BackendError),
    (Fault(kind="reset"), BackendError),
    (Fault(kind="status", status=500), BackendError),
    (Fault(kind="status", status=503), EngineBusy),
    (Fault(kind="status", status=429), EngineBusy),
)


async def fault_is_typed(engine: EngineUnderTest, check: FaultCheck) -> None:
    """A call that meets the fault fails with its class, may be tried again, and the next call is well."""
    fault, wanted = check
    assert engine.arm is not None
    await engine.arm(fault)
    error = await error_of(engine, engine.request(max_tokens=12))
    assert isinstance(error, wanted), f"{fault.kind}: {error!r}"
    assert error.may_retry
    request = engine.request()
    assert_whole(await engine.backend.generate(request), request)


SCORE_FAULTS: tuple[FaultCheck, ...] = (
    *(
        (Fault(kind=kind, on="score"), MalformedReply)
        for kind in ("garbage", "lengths", "other_ids", "nan", "infinite", "sentinel", "prompt_ids", "prompt_length")
    ),
    (Fault(kind="status", status=500, on="score"), BackendError),
    (Fault(kind="status", status=503, on="score"), EngineBusy),
)


async def score_fault_is_typed(engine: EngineUnderTest, check: FaultCheck) -> None:
    """A score that meets the fault fails with its class, and the next one is well."""
    fault, wanted = check
    assert engine.arm is not None
    await engine.arm(fault)
    ids = array("i", engine.prompt)
    error: BackendError | None = None
    try:
        await engine.backend.score(ids, 1)
    except BackendError as exc:
        error = exc
    assert isinstance(error, wanted), f"{fault.kind}: {error!r}"
    assert len(await engine.backend.score(ids, 1)) == len(ids) - 1


async def a_hanging_engine_is_left_by_the_caller(engine: EngineUnderTest) -> None:
    """An engine that never answers holds nobody past the caller's own deadline."""
    assert engine.arm is not None
    await engine.arm(Fault(kind="hang"))
    with trio.move_on_after(0.2) as scope:
        await engine.backend.generate(engine.request())
    assert scope.cancelled_caught
