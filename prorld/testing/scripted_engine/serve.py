"""Running a scripted engine: inside a test's own nursery, or as a process of its own."""

from __future__ import annotations

import os
import sys
from functools import partial

import msgspec
import trio

from prorld.errors import BackendError
from prorld.kit.process import Child, child
from prorld.testing.scripted_engine.http11 import serve_connection
from prorld.testing.scripted_engine.routes import ScriptedServer
from prorld.testing.scripted_engine.script import Script

__all__ = ["Serving", "run_scripted_engine", "serve_scripted"]

# Held requests open at the same moment come in a burst.
BACKLOG = 4096
READY_SECONDS_MAX = 30.0


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """Where a scripted engine listens; ``pid`` of its process, or of this one."""

    url: str
    pid: int


async def serve_scripted(
    server: ScriptedServer,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    task_status: trio.TaskStatus[Serving] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve in this process until cancelled."""
    listeners = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
    url = f"http://{host}:{listeners[0].socket.getsockname()[1]}"
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(trio.serve_listeners, partial(serve_connection, server.answer), listeners))
        task_status.started(Serving(url=url, pid=os.getpid()))


async def run_scripted_engine(
    script: Script, *, port: int = 0, task_status: trio.TaskStatus[Serving] = trio.TASK_STATUS_IGNORED
) -> None:
    """A process of its own until cancelled. Returns when the engine ends by itself, as it does by the fault ``die``."""
    argv = [sys.executable, "-m", "prorld.testing.scripted_engine", "--port", str(port), "--script", "-"]
    async with trio.open_nursery() as nursery:
        run = partial(child, argv, env=dict(os.environ), stdin="pipe", stdout="pipe", stderr="inherit")
        process: Child = await nursery.start(run, name="scripted engine")
        await process.stdin.send_all(msgspec.json.encode(script) + b"\n")
        with trio.fail_after(READY_SECONDS_MAX):
            line = await _line(process)
        task_status.started(Serving(url=msgspec.json.decode(line)["url"], pid=process.pid))
        await process.wait()


async def _line(process: Child) -> bytes:
    said = b""
    while b"\n" not in said:
        more = await process.stdout.receive_some(4096)
        if not more:
            raise BackendError("the scripted engine did not start")
        said += more
    return said.partition(b"\n")[0]
