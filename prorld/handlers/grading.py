"""Grading apart: what passes from the rollout's sandbox to the fresh one that it is graded in.

Both ends of it, the same for the daemon and for handlers that run by themselves. Everything that is carried is the
policy's word and nothing else of the rollout's sandbox gets across.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trio

from prorld.errors import HandlerError, SandboxError, boundary
from prorld.handlers.base import AgentHandler, Grade, JobContext, RunResult
from prorld.sandbox.contract import SandboxSpec

__all__ = ["CARRY_FILES_MAX", "GRADING_TRIES", "evaluate", "open_grading_sandbox", "take_along"]

CARRY_FILES_MAX = 1024
PATH_MAX = 4096
# A rollout is dear, and a sandbox that does not come up is not its fault.
GRADING_TRIES = 3
RETRY_PAUSE_S = 0.2


async def take_along(handler: AgentHandler[Any], job: JobContext[Any]) -> dict[str, bytes]:
    """What the handler carries over, checked and bounded. Raises ``HandlerError`` where it can't be had as it should.

    Called at the end of RUN, while the rollout's sandbox lives.
    """
    carried: object = await handler.carry(job)
    if not isinstance(carried, Mapping):
        raise HandlerError(f"carry returned {type(carried).__name__}, no mapping", code="wrong_result")
    files: dict[str, bytes] = {}
    for path, data in carried.items():
        if not isinstance(path, str) or not isinstance(data, bytes):
            raise HandlerError("carry returned something else than bytes by path", code="wrong_result")
        files[path] = data
    if len(files) > CARRY_FILES_MAX or any(len(path) > PATH_MAX for path in files):
        words = f"{CARRY_FILES_MAX} files can be carried over, under paths of {PATH_MAX} characters"
        raise HandlerError(words, code="carry_refused")
    size = sum(map(len, files.values()))
    if size > handler.carry_bytes_max:
        words = f"{size} bytes are more than the {handler.carry_bytes_max} that may be carried over"
        raise HandlerError(words, code="carry_refused")
    return files


async def open_grading_sandbox(job: JobContext[Any], spec: SandboxSpec, files: Mapping[str, bytes]) -> None:
    """Make ``job.sandbox`` a fresh one with these files. One that fails is made again a few times."""
    for left in reversed(range(GRADING_TRIES)):
        try:
            sandbox = await job.open_sandbox(spec)
            for path, data in files.items():
                with boundary(HandlerError, f"putting {path} into the grading sandbox", code="carry_refused"):
                    await sandbox.write_file(path, data)
        except SandboxError as exc:
            if not left or not exc.may_retry:
                raise
        else:
            return
        await job.close_sandbox()
        await trio.sleep(RETRY_PAUSE_S)


async def evaluate(handler: AgentHandler[Any], job: JobContext[Any], result: RunResult) -> Grade:
    """The handler's grade, and a figure where it was given sooner than an honest one can be."""
    began = trio.current_time()
    grade = await handler.evaluate(job, result)
    if trio.current_time() - began < handler.eval_s_min:
        job.measure("suspicious.short_eval", 1.0)
    return grade
