"""``prorld plugin check``: the handler contract, run here and told one line per check."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import msgspec
import trio

from prorld.cli.author_trace import author_lines
from prorld.cli.configuration import load_for_sandboxes
from prorld.cli.exits import Exit
from prorld.cli.local import instances_of, open_registry, silence_logs
from prorld.cli.output import note, say, say_json, seconds, style_for
from prorld.cli.running import run_trio
from prorld.cli.sandboxes import open_runtime
from prorld.handlers.base import AgentHandler
from prorld.sandbox.contract import SandboxRuntime
from prorld.testing.fake_sandbox import FakeRuntime
from prorld.testing.handler_contract import CHECK_S, HANDLER_CONTRACT, HandlerCheck, HandlerUnderTest


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One check of one handler."""

    name: str
    promise: str
    ok: bool
    seconds: float
    message: str | None = None


def check(args: argparse.Namespace) -> int:
    """Check one handler."""
    silence_logs()
    registry, name = open_registry(args.target)
    handler = registry.get(name)
    instances = instances_of(handler, args.instances)[: max(1, args.limit)]
    if not args.json:
        note(f"checking {name} on {len(instances)} instance{'' if len(instances) == 1 else 's'}")
    under = partial(open_runtime, args.sandbox, load_for_sandboxes(args))
    results = run_trio(partial(_check_all, handler, instances, under, told=not args.json))
    failed = sum(not result.ok for result in results)
    if args.json:
        say_json(results)
    else:
        say("", f"{len(results) - failed} of {len(results)} checks passed")
    return Exit.FAILED if failed else Exit.OK


async def _check_all(
    handler: AgentHandler[Any],
    instances: list[dict[str, Any]],
    opened: Callable[[], AbstractAsyncContextManager[SandboxRuntime]],
    *,
    told: bool,
) -> list[Result]:
    results: list[Result] = []
    async with opened() as runtime:
        # Each check gets fakes of its own; real sandboxes share their warden.
        shared = None if isinstance(runtime, FakeRuntime) else runtime
        under = HandlerUnderTest(handler=handler, instances=instances, runtime=shared)
        for one in HANDLER_CONTRACT:
            result, error = await _check_one(one, under)
            results.append(result)
            if told:
                _tell(result, error)
    return results


async def _check_one(one: HandlerCheck, under: HandlerUnderTest) -> tuple[Result, BaseException | None]:
    began = trio.current_time()
    error: BaseException | None = None
    try:
        with trio.fail_after(CHECK_S):
            await one(under)
    except (Exception, SystemExit) as exc:  # noqa: BLE001 - whatever the author's code raises is the finding
        error = exc
    doc = (one.__doc__ or "").strip().splitlines()[0]
    name = getattr(one, "__name__", "check")
    took = trio.current_time() - began
    message = None if error is None else _words(error)
    return Result(name=name, promise=doc, ok=error is None, seconds=round(took, 3), message=message), error


def _words(error: BaseException) -> str:
    if isinstance(error, trio.TooSlowError):
        return f"took more than {CHECK_S:g} s"
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if isinstance(error, AssertionError) and str(error) else f"{type(error).__name__}: {error}"


def _tell(result: Result, error: BaseException | None) -> None:
    style = style_for(sys.stdout)
    state = style("ok  ", "green") if result.ok else style("FAIL", "red", "bold")
    say(f"{state}  {result.name.replace('_', ' ')}  {style(seconds(result.seconds), 'dim')}")
    if error is not None:
        say(*(f"      {line}" for line in [result.message or "", *author_lines(error)]))
    sys.stdout.flush()
