"""What a rollout asks of its sandbox and what it gets, all of it, as it happens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import trio

from prorld.sandbox.contract import CommandResult, Sandbox, SandboxInfo, SandboxRuntime, SandboxSpec

__all__ = ["Recorder", "SandboxCall"]

Kind = Literal["bash", "python", "read_file", "write_file", "upload", "download"]


class SandboxCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call: what was run or which file, and what came back. ``error`` where it raised."""

    kind: Kind
    text: str
    result: CommandResult | None = None
    size: int | None = None
    error: str | None = None


class Recorder:
    """Tells every call of every sandbox. ``on_call`` must not block."""

    def __init__(self, on_call: Callable[[SandboxCall], None]) -> None:
        self.on_call = on_call

    def watching(self, runtime: SandboxRuntime) -> SandboxRuntime:
        """The same runtime, watched."""
        return _WatchedRuntime(runtime, self)


class _WatchedRuntime:
    """Hands out watched sandboxes."""

    def __init__(self, runtime: SandboxRuntime, recorder: Recorder) -> None:
        self._runtime = runtime
        self._recorder = recorder

    @property
    def name(self) -> str:
        return self._runtime.name

    def list(self) -> tuple[SandboxInfo, ...]:
        return self._runtime.list()

    async def run(
        self,
        spec: SandboxSpec,
        *,
        sandbox_id: str,
        job_id: str,
        task_status: trio.TaskStatus[Sandbox] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        run = partial(self._runtime.run, spec, sandbox_id=sandbox_id, job_id=job_id)
        async with trio.open_nursery() as nursery:
            sandbox: Sandbox = await nursery.start(run)
            task_status.started(_WatchedSandbox(sandbox, self._recorder))


class _WatchedSandbox:
    """Tells every call when it has ended."""

    def __init__(self, sandbox: Sandbox, recorder: Recorder) -> None:
        self._sandbox = sandbox
        self._recorder = recorder

    @property
    def sandbox_id(self) -> str:
        return self._sandbox.sandbox_id

    @property
    def workdir(self) -> str:
        return self._sandbox.workdir

    async def bash(self, command: str, *, limit_s: float = 30.0) -> CommandResult:
        return await self._run("bash", command, limit_s)

    async def python(self, code: str, *, limit_s: float = 30.0) -> CommandResult:
        return await self._run("python", code, limit_s)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        try:
            data = await self._sandbox.read_file(path, max_bytes=max_bytes)
        except Exception as exc:
            self._recorder.on_call(SandboxCall(kind="read_file", text=path, error=repr(exc)))
            raise
        self._recorder.on_call(SandboxCall(kind="read_file", text=path, size=len(data)))
        return data

    async def write_file(self, path: str, data: bytes) -> None:
        try:
            await self._sandbox.write_file(path, data)
        except Exception as exc:
            self._recorder.on_call(SandboxCall(kind="write_file", text=path, error=repr(exc)))
            raise
        self._recorder.on_call(SandboxCall(kind="write_file", text=path, size=len(data)))

    async def upload(self, source: Path, path: str) -> None:
        try:
            await self._sandbox.upload(source, path)
        except Exception as exc:
            self._recorder.on_call(SandboxCall(kind="upload", text=path, error=repr(exc)))
            raise
        self._recorder.on_call(SandboxCall(kind="upload", text=path))

    async def download(self, path: str, target: Path, *, max_bytes: int = 1 << 30) -> None:
        try:
            await self._sandbox.download(path, target, max_bytes=max_bytes)
        except Exception as exc:
            self._recorder.on_call(SandboxCall(kind="download", text=path, error=repr(exc)))
            raise
        self._recorder.on_call(SandboxCall(kind="download", text=path))

    async def _run(self, kind: Literal["bash", "python"], text: str, limit_s: float) -> CommandResult:
        call = self._sandbox.bash if kind == "bash" else self._sandbox.python
        try:
            result = await call(text, limit_s=limit_s)
        except Exception as exc:
            self._recorder.on_call(SandboxCall(kind=kind, text=text, error=repr(exc)))
            raise
        self._recorder.on_call(SandboxCall(kind=kind, text=text, result=result))
        return result
