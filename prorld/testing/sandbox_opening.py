"""What checks of sandboxes share: one for the length of a block, and how results are judged."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from prorld.sandbox.contract import CommandResult, Sandbox, SandboxRuntime, SandboxSpec

__all__ = ["JOB", "open_sandbox", "put_tree", "raises", "same", "start_sandbox", "tree_at", "untroubled"]

START_SECONDS = 60.0
JOB = "contract"


@asynccontextmanager
async def open_sandbox(
    runtime: SandboxRuntime, spec: SandboxSpec | None = None, *, sandbox_id: str = "contract-1"
) -> AsyncIterator[Sandbox]:
    """A sandbox for the length of a block; it is gone when the block has been left."""
    async with trio.open_nursery() as nursery:
        with trio.fail_after(START_SECONDS):
            sandbox = await start_sandbox(runtime, nursery, spec or SandboxSpec(), sandbox_id)
        yield sandbox
        nursery.cancel_scope.cancel("the block has ended")


async def start_sandbox(runtime: SandboxRuntime, nursery: trio.Nursery, spec: SandboxSpec, sandbox_id: str) -> Sandbox:
    """A sandbox in a nursery of the caller's; it ends with that."""

    async def run(*, task_status: trio.TaskStatus[Sandbox] = trio.TASK_STATUS_IGNORED) -> None:
        await runtime.run(spec, sandbox_id=sandbox_id, job_id=JOB, task_status=task_status)

    sandbox: Sandbox = await nursery.start(run, name=f"sandbox {sandbox_id}")
    return sandbox


def untroubled(result: CommandResult) -> bool:
    """Whether neither a limit nor a restart had to do with it."""
    return not result.timed_out and not result.restarted


def same(result: CommandResult, exit_code: int, output: bytes) -> None:
    """Hold a result to its exit code and output."""
    assert (result.exit_code, result.output) == (exit_code, output), result


async def raises(kind: type[Exception], call: Awaitable[object]) -> None:
    """Hold a call to its error."""
    try:
        await call
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def put_tree(root: Path, files: dict[str, bytes]) -> None:
    """Write files below a directory of the host."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def tree_at(root: Path) -> dict[str, bytes]:
    """The files below a directory of the host."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if not path.is_dir()}
