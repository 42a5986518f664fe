"""``prorld status``: what the daemon does now."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from prorld.cli.common import add_client_options, add_json_option, client_of, epilog
from prorld.cli.exits import Exit
from prorld.cli.output import clean, say, say_json, seconds, table, typed

if TYPE_CHECKING:
    from prorld.wire.ops import Ready, Status

SUMMARY = "what the daemon does now"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Jobs, stages, engines, sandboxes and whether the daemon is ready for work."
    parser.epilog = epilog(
        ("prorld status", "for people"),
        ("prorld status --json", "for scripts"),
        ("prorld status --ready", "exit 0 when it takes work, 75 when it does not (yet)"),
    )
    parser.add_argument("--ready", action="store_true", help="exit 75 unless the daemon is ready for work")
    add_client_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Ask and print."""
    import msgspec

    with client_of(args) as client:
        status, ready = client.status(), client.ready()
        address = client.address
    if args.json:
        say_json({**msgspec.to_builtins(status), "ready": ready.ready, "missing": msgspec.to_builtins(ready.missing)})
    else:
        say(*status_lines(status, ready, address))
    return Exit.TEMPORARY if args.ready and not ready.ready else Exit.OK


def status_lines(status: Status, ready: Ready, address: str) -> list[str]:
    """The status for people."""
    state = "draining" if status.draining else "ready" if ready.ready else "not ready"
    lines = [f"prorld {status.version} at {address}: {state}, up {seconds(status.uptime_s)}, pid {status.pid}"]
    lines += [f"  missing: {clean(item.message)}; {clean(typed(item.cure))}" for item in ready.missing]
    warnings = [item for item in status.conditions if item.severity == "warning"]
    lines += [f"  warning: {clean(item.message)}; {clean(typed(item.cure))}" for item in warnings]
    lines += [f"jobs       {_counts(status.jobs)}", f"outcomes   {_counts(status.outcomes)}"]
    for name in ("init", "run", "eval"):
        stage = getattr(status.stages, name)
        lines.append(f"{name:<10} {stage.active} of {stage.workers} workers busy, {stage.waiting} waiting")
    warm = f", of them {status.sandboxes_warm} waiting for a job" if status.sandboxes_warm else ""
    lines.append(f"sandboxes  {status.sandboxes}{warm}{', each in a cgroup of its own' if status.cgroups else ''}")
    lag = status.loop_lag_s
    lines.append(f"loop lag   {lag.p50 * 1000:.1f} ms median, {lag.p99 * 1000:.1f} ms p99")
    if status.backends:
        rows = [
            [
                b.backend_id,
                b.kind,
                b.state,
                str(b.leases),
                str(b.inflight),
                "-" if b.version is None else str(b.version),
                b.model,
                b.url,
            ]
            for b in status.backends
        ]
        lines += ["", *table(("ENGINE", "KIND", "STATE", "LEASES", "CALLS", "VERSION", "MODEL", "URL"), rows)]
    else:
        lines.append(typed("engines    none up; see the daemon's log (backend.absent), or `prorld doctor`"))
    return lines


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.items() if n) or "none"
