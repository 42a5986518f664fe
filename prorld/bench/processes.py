"""The two processes that are measured against each other: the scripted engine, and ``prorld serve`` on top of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec
import trio

from prorld.errors import ProrldError
from prorld.kit.process import Child, child
from prorld.ops.state_dir import ENDPOINT_FILE
from prorld.testing.byte_tokenizer import write_byte_tokenizer
from prorld.testing.scripted_engine.script import Script
from prorld.wire.ops import Endpoint

__all__ = ["SAMPLED", "BenchFailed", "Daemon", "run_daemon", "script"]

START_S_MAX = 60.0
# The daemon ends its jobs and sockets itself; what takes longer is killed.
STOP_S_MAX = 15.0
LINES_SHOWN = 20
POLL_S = 0.05
ANSWER = "a" * 63
# With the end of turn.
SAMPLED = len(ANSWER) + 1


class BenchFailed(ProrldError):
    """The bench could not measure."""

    code = "bench_failed"


class Daemon(msgspec.Struct, frozen=True, kw_only=True):
    """A daemon that listens."""

    address: str
    token: str
    pid: int


def script() -> Script:
    """What the engine says: the same 64 tokens each time, at once."""
    return Script(turns=[ANSWER], max_model_len=1 << 20)


def configuration(place: Path, engine: str, *, places: int, connections: int, running: int | None = None) -> str:
    """The daemon's settings: wide enough that no gate or bound is what is measured, and defaults otherwise.

    Nothing is audited: those calls would be counted among the ones that the engine is told to hold. ``running`` makes
    RUN narrower.
    """
    return f"""\
backends = [{{ kind = "vllm", url = "{engine}" }}]

[server]
port = 0
connections_max = {connections}

[stages]
init = {places}
run = {places if running is None else running}
eval = {places}

[admission]
enabled = false

[audit]
share = 0.0

[limits]
jobs_max = {2 * places + 1000}
mailbox_size = {places + 1000}

[timeouts]
drain_s = 0.1

[metrics]
loop_lag_interval_s = 0.02

[handlers]
enabled = ["bench"]

[log]
format = "json"

[policies.default]
tokenizer = "{write_byte_tokenizer(place / "tokenizer")}"
"""


async def run_daemon(
    place: Path,
    engine: str,
    *,
    places: int,
    connections: int,
    running: int | None = None,
    task_status: trio.TaskStatus[Daemon] = trio.TASK_STATUS_IGNORED,
) -> None:
    """``prorld serve`` as a process of its own until cancelled. Raises ``BenchFailed`` when it ends by itself."""
    config, state, log = place / "prorld.toml", place / "state", place / "daemon.log"
    config.write_text(configuration(place, engine, places=places, connections=connections, running=running))
    argv = [sys.executable, "-m", "prorld.cli", "serve", "--config", str(config), "--state-dir", str(state)]
    # Into a file, as a batch system does it: through a pipe, every line would wake the bench on the daemon's time.
    with log.open("wb") as output:
        async with trio.open_nursery() as nursery:
            run = partial(
                child, argv, env=_environment(), stdout=output.fileno(), stderr="stdout", term_seconds=STOP_S_MAX
            )
            process: Child = await nursery.start(run, name="daemon under test")
            task_status.started(await _ready(process, state, log))
            raise BenchFailed(f"the daemon ended with {await process.wait()}:\n{_tail(log)}")


async def _ready(process: Child, state: Path, log: Path) -> Daemon:
    """Wait until the daemon has said where it listens."""
    with trio.move_on_after(START_S_MAX):
        while True:
            await trio.sleep(POLL_S)
            if (state / ENDPOINT_FILE).exists():
                address = msgspec.json.decode((state / ENDPOINT_FILE).read_bytes(), type=Endpoint).address
                return Daemon(address=address, token=(state / "token").read_text().strip(), pid=process.pid)
            if process.exit_code is not None:
                break
    raise BenchFailed(f"the daemon did not start:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text("utf-8", "replace").splitlines()[-LINES_SHOWN:])


def _environment() -> Mapping[str, str]:
    """The caller's, without what configures another daemon."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PRORLD")}
