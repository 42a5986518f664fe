"""``prorld demo``: real rollouts of a small real model in real sandboxes, shown; then everything stops.

The daemon runs in this process, so nothing of it can outlive the command.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prorld.cli.common import add_json_option, epilog, positive
from prorld.cli.configuration import backend
from prorld.cli.exits import Exit
from prorld.cli.output import note, program, say, say_json, style_for, width

if TYPE_CHECKING:
    from prorld.cli.demo_run import Report
    from prorld.config import Loaded
    from prorld.wire.ops import Endpoint

SUMMARY = "show a few real rollouts, then stop"

LOG_FILE = "daemon.log"
ENDS_WITHIN_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Starts a daemon of its own with the embedded engine (SmolLM2-135M, on the processor), hands in small\n"
        "arithmetic tasks, shows what became of them and one conversation, keeps the trajectories as files and stops.\n"
        "Exit 0 when at least one rollout was graded and none failed for reasons of infrastructure."
    )
    parser.epilog = epilog(
        ("prorld demo", "six rollouts"),
        ("prorld demo --n 20 --json", "twenty, a report for a script"),
        ("prorld demo --backend vllm=http://gpu1:8000", "the same tasks on your engine"),
    )
    parser.add_argument("--n", type=positive, default=6, metavar="N", help="rollouts (default 6)")
    parser.add_argument("--within", type=float, default=900.0, metavar="SECONDS", help="cancel the rest then (900)")
    parser.add_argument("--state-dir", metavar="DIR", help="the demo's own (default: demo/ in the usual one)")
    parser.add_argument(
        "--backend", type=backend, action="append", metavar="KIND=URL", help="an engine of yours instead"
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file for this daemon (default: none, not even yours)")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Start, roll out, show, stop."""
    from prorld.cli.running import run_trio
    from prorld.log import configure

    loaded = load_demo(args)
    # A later `prorld serve` keeps its secrets in the parent, which only has these rights if it is named itself.
    loaded.state_dir.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    loaded.state_dir.mkdir(mode=0o700, exist_ok=True)
    log = loaded.state_dir / LOG_FILE
    with log.open("w", encoding="utf-8") as stream:
        configure(loaded.config.log.level, "json", stream=stream)
        note(f"starting a daemon in {loaded.state_dir} (its log: {log})")
        try:
            report = run_trio(partial(_roll_out, loaded, args.n, args.within))
        except KeyboardInterrupt:
            note("", "interrupted; everything has stopped")
            raise
    if args.json:
        say_json(report)
    else:
        from prorld.cli.conversation import View
        from prorld.cli.demo_run import report_lines

        say(*report_lines(report, View(style_for(sys.stdout), min(width(), 100), lines_per_message=8)))
    if not report.good:
        note(f"this demo did not end well; see {log} and `{program()} doctor`")
        return Exit.FAILED
    return Exit.OK


def load_demo(args: argparse.Namespace) -> Loaded:
    """The demo's configuration: a free port, a state directory of its own, nothing of the user's unless named."""
    from prorld.client.find import state_dir
    from prorld.config import load

    flags: dict[str, object] = {
        "server.port": 0,
        "state.dir": args.state_dir or str(state_dir() / "demo"),
        "backends": args.backend,
        # By name, so that a missing engine ends the demo with words instead of a wait.
        "engine.enabled": args.backend is None,
        # For a person at Ctrl-C.
        "timeouts.drain_s": 5.0,
    }
    return load(Path(args.config or os.devnull), {}, flags)


async def _roll_out(loaded: Loaded, n: int, within_s: float) -> Report:
    import trio

    from prorld.cli.demo_run import drive
    from prorld.client import ClientError
    from prorld.daemon import serve

    reports: list[Report] = []
    ended = trio.Event()
    lost: ClientError | None = None

    async def daemon(*, task_status: trio.TaskStatus[Endpoint] = trio.TASK_STATUS_IGNORED) -> None:
        await serve(loaded, task_status=task_status)
        ended.set()

    async with trio.open_nursery() as nursery:
        endpoint: Endpoint = await nursery.start(daemon, name="daemon")
        # The synchronous client in a thread: the demo uses the same door as every trainer.
        job = partial(drive, endpoint.address, loaded.state_dir, n, within_s)
        try:
            reports.append(await trio.to_thread.run_sync(job, abandon_on_cancel=True))
        except ClientError as exc:
            lost = exc
        if lost is not None:
            with trio.move_on_after(ENDS_WITHIN_S):
                await ended.wait()
            # Nothing but a signal ends it in peace, and the client has only seen that it went away.
            raise KeyboardInterrupt if ended.is_set() else lost
        nursery.cancel_scope.cancel()
    return reports[0]
