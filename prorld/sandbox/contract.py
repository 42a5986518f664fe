"""The sandbox contract: what a job asks for, what it gets, and what every runtime promises.

A runtime's ``run`` is an actor. It is started into the nursery that bounds the sandbox's life with ``nursery.start``;
the value it hands back is the live sandbox; when its scope is cancelled, every process, mount, socket and directory of
the sandbox is gone before ``run`` returns. Nothing else ends a sandbox.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Protocol, runtime_checkable

import msgspec
import trio
from msgspec import Meta

__all__ = [
    "USED_UP",
    "Adoptable",
    "CommandResult",
    "Kernel",
    "Network",
    "Sandbox",
    "SandboxInfo",
    "SandboxLimits",
    "SandboxRuntime",
    "SandboxSpec",
    "SessionKind",
]

# The codes of a sandbox that was ended for what ran in it: it reached a limit of all of it together.
USED_UP = frozenset({"sandbox_out_of_memory", "sandbox_out_of_disk"})


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one sandbox. All hold without root.

    ``memory_bytes`` is a hard limit of what each process keeps to itself. For all processes and the scratch directories
    together, shared memory included, it is looked after about once a second: a sandbox that holds more then is ended
    with the code ``sandbox_out_of_memory``. In between it can hold more, as much as it can touch in that time; it is
    the first that the kernel takes when the host runs out. Buffers in the kernel, those of pipes and sockets, are not
    counted. What a sandbox writes to its image's overlay on disk is looked after in the same way, with ``disk_bytes``
    and the code ``sandbox_out_of_disk``. Sandboxes run as one user of the host, and so share what it limits for a user:
    inotify instances, and descriptors on their way in sockets. One that uses these up harms the others in that alone.
    """

    memory_bytes: Annotated[int, Meta(ge=16 << 20)] = 2 << 30
    processes: Annotated[int, Meta(ge=4)] = 256
    open_files: Annotated[int, Meta(ge=32)] = 1024
    file_bytes: Annotated[int, Meta(ge=1 << 10)] = 1 << 30
    scratch_bytes: Annotated[int, Meta(ge=1 << 20)] = 512 << 20
    disk_bytes: Annotated[int, Meta(ge=1 << 20)] = 8 << 30
    output_bytes: Annotated[int, Meta(ge=1 << 10)] = 1 << 20


Network = Literal["none", "daemon", "host"]
Kernel = Literal["auto", "ipython", "plain", "jupyter"]
SessionKind = Literal["bash", "python"]


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sandbox a task wants.

    ``image`` is a root file system: a directory, a SIF file, or the name of an image in the store; ``None`` is the
    operator's choice, or the host's ``/usr`` and this interpreter, read-only. ``network`` is ``none``, a Unix socket of
    the daemon and nothing else (``daemon``), or the host's own where the operator allows it. ``kernel`` is what runs
    Python cells: IPython where the sandbox has it (``auto``), one of the two by name, or the Jupyter kernel that
    ``jupyter_kernel`` names.
    ``first`` is the session that comes up with the sandbox; the other one does when it is used for the first time.
    ``writable`` are further directories that are made where they are missing and can be written to, beside ``workdir``
    and ``/tmp``; without an image they lie in memory, each of ``limits.scratch_bytes`` at most.
    ``trusted`` says that what will run in there is the task's own and not a policy's: a runtime without walls takes
    nothing else.
    """

    image: str | None = None
    workdir: str = "/work"
    writable: Annotated[tuple[str, ...], Meta(max_length=16)] = ()
    env: dict[str, str] = {}
    network: Network = "none"
    kernel: Kernel = "auto"
    jupyter_kernel: str = "python3"
    first: SessionKind = "bash"
    trusted: bool = False
    limits: SandboxLimits = SandboxLimits()


class CommandResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a command or a Python cell did. Output is bytes as they came, head and tail kept when there was too much."""

    exit_code: int
    output: bytes
    omitted_bytes: int = 0
    timed_out: bool = False
    restarted: bool = False
    duration_s: float = 0.0

    @property
    def text(self) -> str:
        """The output for a reader: decoded once, NULs and invalid bytes made visible or dropped."""
        return self.output.decode("utf-8", "replace").replace("\0", "")


class SandboxInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One row of ``GET /v1/sandboxes``. An empty ``job_id`` is a sandbox that waits for a job."""

    sandbox_id: str
    job_id: str
    runtime: str
    image: str | None
    state: Literal["starting", "up", "closing"]
    age_s: float
    rss_bytes: int


class Sandbox(Protocol):
    """A live sandbox.

    A limit that passes interrupts what runs, keeps the session and returns what there was with ``timed_out``. A shell
    or interpreter that died is noticed at once, started again, and the result says ``restarted``; where it had died
    before it took the command, the fresh one runs it. A program that dies within a command never gives it exit code 0.
    A sandbox that is gone raises ``SandboxError``; a sandbox's own trouble is never presented as a command's output.
    One call per session at a time: concurrent calls of ``bash`` queue, and so do those of ``python``.

    A session runs what its user lets it run, and all that it answers afterwards, exit codes included, is the word of
    that: functions, aliases, traps and background processes stay. A grader that must not be lied to reads files, or
    runs its checks in a fresh sandbox.
    """

    @property
    def sandbox_id(self) -> str:
        """Its id; carries the daemon's boot id."""
        ...

    @property
    def workdir(self) -> str:
        """The writable directory where sessions start."""
        ...

    async def bash(self, command: str, *, limit_s: float = 30.0) -> CommandResult:
        """Run a command in the persistent shell: cwd, variables, functions and background jobs stay."""
        ...

    async def python(self, code: str, *, limit_s: float = 30.0) -> CommandResult:
        """Run a cell in the persistent interpreter; the value of a last expression is shown.

        Raises ``SandboxError`` with the code ``kernel_missing`` where the sandbox lacks what its spec names.
        """
        ...

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """A file's content; FileNotFoundError, IsADirectoryError or ValueError (too large) where it can't be had."""
        ...

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file, making its directories; OSError where the sandbox refuses."""
        ...

    async def upload(self, source: Path, path: str) -> None:
        """Put a file or a directory of this host at ``path``, which is complete from the moment it is there.

        Modes and symbolic links are kept. A file may replace a file; a directory may fill an empty one, and then its
        entries come one after the other. FileExistsError where there is a directory with something in it, ValueError
        for a source that holds what is no file, directory or link; OSError where the sandbox refuses.
        """
        ...

    async def download(self, path: str, target: Path, *, max_bytes: int = 1 << 30) -> None:
        """Take a file or a directory out to ``target`` on this host, which is complete from the moment it is there.

        Permissions and symbolic links are kept; the owner can always read and change what came. A file may replace a
        file, a directory an empty one. FileNotFoundError and the like where it can't be had; ValueError where it is
        too large, has too many entries or too long names, or holds what could leave the target or do harm there:
        absolute links, links upwards and out, devices, pipes. In that case nothing is at the target.
        """
        ...


@runtime_checkable
class Adoptable(Sandbox, Protocol):
    """What a live sandbox has beyond its users' needs where it can be made before there is a job for it."""

    def adopt(self, sandbox_id: str, job_id: str) -> None:
        """Belong to this job from now on: under this id in listings and errors. Its processes know nothing of it."""
        ...

    def rss_bytes(self) -> int:
        """The memory of its processes now."""
        ...


class SandboxRuntime(Protocol):
    """Makes sandboxes of one kind."""

    @property
    def name(self) -> str:
        """The kind, as it shows in status and in records."""
        ...

    async def run(
        self,
        spec: SandboxSpec,
        *,
        sandbox_id: str,
        job_id: str,
        task_status: trio.TaskStatus[Sandbox] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Make a sandbox, hand it out, keep it until cancelled, then leave nothing behind. Raises ``SandboxError``."""
        ...

    def list(self) -> tuple[SandboxInfo, ...]:
        """The live sandboxes of this runtime."""
        ...
