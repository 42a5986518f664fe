"""A runtime without processes: scripted answers, virtual time, a live set to check, faults on demand.

It passes the same contract suite as the real runtimes, and it works with the autojump clock. What it cannot do is run a
program: by default it understands the handful of commands and cells in ``toy_answer``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path
from posixpath import join, normpath
from typing import Literal

import msgspec
import trio

from prorld.errors import SandboxError
from prorld.sandbox.contract import CommandResult, Sandbox, SandboxInfo, SandboxSpec

__all__ = ["After", "Answer", "FakeRuntime", "FakeSandbox", "SessionName", "toy_answer"]

SessionName = Literal["bash", "python"]


class After(msgspec.Struct, frozen=True):
    """An answer that takes its time; a limit that passes first makes it a timed-out one."""

    seconds: float
    answer: CommandResult | Exception = CommandResult(exit_code=0, output=b"")


Answer = CommandResult | Exception | After | float

_TOYS: tuple[tuple[SessionName, str], ...] = (
    ("bash", r"(?P<do>echo) (?P<text>.*)"),
    ("bash", r"(?P<do>exit) (?P<code>\d+)"),
    ("bash", r"(?P<do>sleep) (?P<seconds>[\d.]+)"),
    ("bash", r"(?P<do>true)"),
    ("bash", r"(?P<do>false)"),
    ("python", r"(?P<do>)"),
    ("python", r"(?P<do>print)\('(?P<text>.*)'\)"),
    ("python", r"(?P<do>print)\((?P<text>[0-9]+)\)"),
    ("python", r"import os; os\._(?P<do>exit)\((?P<code>\d+)\)"),
    ("python", r"import time; time\.(?P<do>sleep)\((?P<seconds>[\d.]+)\)"),
)


def toy_answer(session: SessionName, code: str) -> Answer:
    """What the contract suite needs of a shell and an interpreter; anything else is an unknown command."""
    for kind, pattern in _TOYS:
        match = re.fullmatch(pattern, code)
        if kind != session or match is None:
            continue
        said = match.groupdict()
        if said["do"] == "exit":
            return CommandResult(exit_code=int(said["code"]), output=b"", restarted=True)
        if said["do"] == "sleep":
            return After(float(said["seconds"]))
        return CommandResult(exit_code=int(said["do"] == "false"), output=_line(said.get("text")))
    return CommandResult(exit_code=127, output=f"{session}: {code}: not understood\n".encode())


def _line(text: str | None) -> bytes:
    return b"" if text is None else f"{text}\n".encode()


class FakeSandbox:
    """A live sandbox of ``FakeRuntime``. ``calls`` is what was asked of its sessions, in order."""

    def __init__(self, runtime: FakeRuntime, spec: SandboxSpec, sandbox_id: str, job_id: str) -> None:
        self.spec = spec
        self.sandbox_id = sandbox_id
        self.job_id = job_id
        self.workdir = spec.workdir
        self.files: dict[str, bytes] = {}
        self.calls: list[tuple[SessionName, str]] = []
        self.made_at = trio.current_time()
        self.up = False
        self._runtime = runtime
        self._locks: dict[SessionName, trio.Lock] = {"bash": trio.Lock(), "python": trio.Lock()}

    def adopt(self, sandbox_id: str, job_id: str) -> None:
        """Be another job's from now on, in ``FakeRuntime.live`` too."""
        self._runtime.live[sandbox_id] = self._runtime.live.pop(self.sandbox_id)
        self.sandbox_id, self.job_id = sandbox_id, job_id

    def rss_bytes(self) -> int:
        """Nothing."""
        return 0

    async def bash(self, command: str, *, limit_s: float = 30.0) -> CommandResult:
        """What the script answers to a command."""
        return await self._run("bash", command, limit_s)

    async def python(self, code: str, *, limit_s: float = 30.0) -> CommandResult:
        """What the script answers to a cell."""
        return await self._run("python", code, limit_s)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """A file that was written before."""
        await self._checkpoint()
        place = self._place(path)
        if place == self.workdir or any(name.startswith(f"{place}/") for name in self.files):
            raise IsADirectoryError(f"a directory: {path}")
        if place not in self.files:
            raise FileNotFoundError(f"no such file: {path}")
        if len(self.files[place]) > max_bytes:
            raise ValueError(f"{path}: larger than {max_bytes} bytes")
        return self.files[place]

    async def write_file(self, path: str, data: bytes) -> None:
        """Keep a file."""
        await self._checkpoint()
        place = self._place(path)
        if place == self.workdir or any(name.startswith(f"{place}/") for name in self.files):
            raise IsADirectoryError(f"a directory: {path}")
        if len(data) > self.spec.limits.scratch_bytes:
            raise OSError(f"{path}: no space left")
        self.files[place] = data

    async def upload(self, source: Path, path: str) -> None:
        """Keep the files of a tree, or one."""
        await self._checkpoint()
        place = self._place(path)
        files = _files_below(source)
        inside = [name for name in self.files if name.startswith(f"{place}/")]
        if "" not in files and inside:
            raise FileExistsError(f"a directory that is not empty: {path}")
        if "" in files and inside:
            raise IsADirectoryError(f"a directory: {path}")
        self.files.update({f"{place}/{name}" if name else place: data for name, data in files.items()})

    async def download(self, path: str, target: Path, *, max_bytes: int = 1 << 30) -> None:
        """Write the files of a tree, or one."""
        await self._checkpoint()
        place = self._place(path)
        if place in self.files:
            files = {"": self.files[place]}
        else:
            start = f"{place}/"
            files = {name.removeprefix(start): data for name, data in self.files.items() if name.startswith(start)}
            if not files:
                raise FileNotFoundError(f"no such file: {path}")
        if sum(len(data) for data in files.values()) > max_bytes:
            raise ValueError(f"{path}: larger than {max_bytes} bytes")
        _write_below(target, files)

    def _place(self, path: str) -> str:
        return normpath(join(self.workdir, path))

    async def _checkpoint(self) -> None:
        await trio.lowlevel.checkpoint()
        self._runtime.meet_call()
        self._check_live()

    def _check_live(self) -> None:
        if self.sandbox_id not in self._runtime.live:
            raise SandboxError(f"sandbox {self.sandbox_id} is gone")

    async def _run(self, session: SessionName, code: str, limit_s: float) -> CommandResult:
        async with self._locks[session]:
            await self._checkpoint()
            self.calls.append((session, code))
            started_at = trio.current_time()
            answer = self._runtime.answer(session, code)
            if isinstance(answer, float | int):
                answer = After(answer)
            if isinstance(answer, After):
                await trio.sleep(min(answer.seconds, limit_s))
                self._check_live()
                if answer.seconds > limit_s:
                    return CommandResult(exit_code=124, output=b"", timed_out=True, duration_s=limit_s)
                answer = answer.answer
            if isinstance(answer, Exception):
                raise answer
            return msgspec.structs.replace(answer, duration_s=trio.current_time() - started_at)


def _files_below(source: Path) -> dict[str, bytes]:
    """The files of a tree by their names in it; of a file, itself without a name."""
    if source.is_dir():
        return {str(path.relative_to(source)): path.read_bytes() for path in source.rglob("*") if path.is_file()}
    return {"": source.read_bytes()}


def _write_below(target: Path, files: dict[str, bytes]) -> None:
    if target.is_dir() and any(target.iterdir()):
        raise FileExistsError(f"a directory that is not empty: {target}")
    for name, data in files.items():
        path = target / name if name else target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


class FakeRuntime:
    """Sandboxes that exist in name.

    ``live`` holds the ids of those that are not closed yet: a test asserts that it is empty. ``fail_starts`` and
    ``fail_calls`` count from 1 and name the starts and the calls, over all sandboxes, that raise ``SandboxError``.
    ``die_after_s`` ends each sandbox by itself.
    """

    def __init__(
        self,
        answer: Callable[[SessionName, str], Answer] = toy_answer,
        *,
        name: str = "fake",
        boot_s: float = 0.01,
        close_s: float = 0.01,
        die_after_s: float | None = None,
        fail_starts: Collection[int] = (),
        fail_calls: Collection[int] = (),
    ) -> None:
        self.answer = answer
        self.name = name
        self.live: dict[str, FakeSandbox] = {}
        self.starts = 0
        self.calls = 0
        self._boot_s = boot_s
        self._close_s = close_s
        self._die_after_s = die_after_s
        self._fail_starts = fail_starts
        self._fail_calls = fail_calls

    def list(self) -> tuple[SandboxInfo, ...]:
        """The live ones."""
        return tuple(
            SandboxInfo(
                sandbox_id=box.sandbox_id,
                job_id=box.job_id,
                runtime=self.name,
                image=box.spec.image,
                state="up" if box.up else "starting",
                age_s=trio.current_time() - box.made_at,
                rss_bytes=0,
            )
            for box in self.live.values()
        )

    def meet_call(self) -> None:
        """Count a call, and fail it when its turn has come."""
        self.calls += 1
        if self.calls in self._fail_calls:
            raise SandboxError(f"call {self.calls} fails on purpose")

    async def run(
        self,
        spec: SandboxSpec,
        *,
        sandbox_id: str,
        job_id: str,
        task_status: trio.TaskStatus[Sandbox] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Keep a sandbox in name until cancelled."""
        self.starts += 1
        number = self.starts
        if sandbox_id in self.live:
            raise SandboxError(f"there is a sandbox {sandbox_id} already", retryable=False)
        box = FakeSandbox(self, spec, sandbox_id, job_id)
        self.live[sandbox_id] = box
        try:
            await trio.sleep(self._boot_s)
            if number in self._fail_starts:
                raise SandboxError(f"start {number} fails on purpose")
            box.up = True
            task_status.started(box)
            if self._die_after_s is None:
                await trio.sleep_forever()
            else:
                await trio.sleep(self._die_after_s)
            raise SandboxError(f"sandbox {box.sandbox_id} ended by itself")
        finally:
            with trio.move_on_after(self._close_s + 1.0, shield=True):
                await trio.sleep(self._close_s)
            del self.live[box.sandbox_id]  # it may have been adopted
