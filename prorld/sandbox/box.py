"""A live sandbox as its users see it: two sessions and the files, in whatever wall a runtime has put around them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.errors import SandboxError
from prorld.kit.lanes import Lane
from prorld.sandbox.bash import BashDialect
from prorld.sandbox.cgroups import held_in, ran_out
from prorld.sandbox.contract import CommandResult, SandboxInfo, SandboxSpec
from prorld.sandbox.files import Files
from prorld.sandbox.link import Child
from prorld.sandbox.memory import Gauge, held_bytes, process_tree, resident_bytes
from prorld.sandbox.python_session import dialect_of
from prorld.sandbox.session import Session, keep_empty
from prorld.sandbox.transfer import Transfers
from prorld.sandbox.wall import Build, Holder
from prorld.sandbox.warden_client import Warden
from prorld.sandbox.watchdog import Rounds, over_disk, over_memory, over_served_memory, without_helper

__all__ = ["SPARE_PROCESSES", "Box"]

log: FilteringBoundLogger = structlog.get_logger()

T = TypeVar("T")

# Quiet tools, no pagers, no questions: nobody sits at this terminal.
_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "USER": "agent",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "NO_COLOR": "1",
    "PYTHONUNBUFFERED": "1",
    "PIP_PROGRESS_BAR": "off",
    "TQDM_DISABLE": "1",
    "MPLBACKEND": "Agg",
    "GIT_TERMINAL_PROMPT": "0",
    "SSH_ASKPASS": "/bin/false",
    "DEBIAN_FRONTEND": "noninteractive",
}
# A file transfer must get through while the sandbox's own processes have used up their number.
SPARE_PROCESSES = 16
_TELL_SECONDS = 3.0


class Box:
    """One sandbox. Its runtime calls ``hold``, ``furnish``, ``mind`` and ``end``; others what ``Sandbox`` has."""

    def __init__(
        self,
        warden: Warden,
        spec: SandboxSpec,
        *,
        sandbox_id: str,
        job_id: str,
        seccomp: bytes,
    ) -> None:
        self.spec = spec
        self.sandbox_id = sandbox_id
        self.job_id = job_id
        self.workdir = spec.workdir
        self._warden = warden
        self.cgroup: Path | None = None
        self._has_own_warden = False
        self._build: Build | None = None
        self._seccomp = seccomp
        self.limits: Mapping[str, int] = {
            name: getattr(spec.limits, name) for name in ("memory_bytes", "processes", "open_files", "file_bytes")
        }
        self._made_at = trio.current_time()
        self._state: Literal["starting", "up", "closing"] = "starting"
        self._holder: Holder | None = None
        self._bash: Session | None = None
        self._python: Session | None = None
        self._failure: SandboxError | None = None
        self._visitors: set[Child] = set()
        self._files = Files(self._spawn_helper, spec.workdir)
        self._transfers = Transfers(self._spawn_helper, spec.workdir)

    def hold(self, holder: Holder, build: Build, *, warden: Warden | None = None) -> None:
        """Own the sandbox's outermost process from here on; ``warden`` is the one within, where there is one."""
        self._holder, self._build = holder, build
        self._warden, self._has_own_warden = warden or self._warden, warden is not None
        self.workdir = build.workdir
        self._files = Files(self._spawn_helper, build.workdir)
        self._transfers = Transfers(self._spawn_helper, build.workdir)

    async def furnish(self, nursery: trio.Nursery) -> None:
        """Let it be used. Its first session comes up meanwhile, the other one when it is asked for.

        ``nursery`` lasts as long as the sandbox.
        """
        holder, build = await self._check_up(), self._made
        if isinstance(holder, Child):
            nursery.start_soon(keep_empty, holder.tty, name=f"tty of {self.sandbox_id}")
        if build.furnish:
            await self._put_furniture(build)
        make = partial(
            Session, self._spawn, nursery=nursery, output_bytes=self.spec.limits.output_bytes, workdir=self.workdir
        )
        self._bash = make(BashDialect(), name="bash")
        self._python = make(dialect_of(self.spec), name="python")
        first = self._python if self.spec.first == "python" else self._bash
        nursery.start_soon(self._bring_up, first, name=f"first session of {self.sandbox_id}")
        self._state = "up"

    async def _bring_up(self, session: Session) -> None:
        try:
            await session.start()
        except SandboxError as exc:
            # Whoever uses it first tries again, and is told when that fails, too.
            log.info("sandbox.late", sandbox_id=self.sandbox_id, why=exc.message)

    async def _put_furniture(self, build: Build) -> None:
        argv = ("/bin/bash", "--norc", "--noprofile", "-c", ":")
        child = await self._enter(argv, {}, {}, furnish=build.furnish)
        with closing(child):
            if await child.wait() != 0:
                raise SandboxError(f"sandbox {self.sandbox_id} could not be furnished")

    async def mind(self, lane: Lane, rounds: Rounds) -> None:
        """End the sandbox when all of it together holds more than its limits, or when it has lost its helpers."""
        holder, build = await self._check_up(), self._made
        limits, roots = self.spec.limits, partial(self._roots, holder)
        gauge = Gauge(build.scratch)
        async with trio.open_nursery() as nursery:

            async def until(trouble: Callable[[], Awaitable[SandboxError]]) -> None:
                failure = await trouble()
                self._failure = self._failure or failure
                nursery.cancel_scope.cancel(failure.message)

            def look() -> int | None:
                if self._is_visited():
                    gauge.forget()
                return gauge.look(roots())

            def exact() -> Callable[[], int]:
                return partial(held_bytes, roots(), build.scratch)

            if build.on_disk:
                # Of a file that a helper serves, it is the helper that has it open.
                disk = partial(over_disk, lane, lambda: [*roots(), holder.pid], build.on_disk, build.scratch)
                nursery.start_soon(until, partial(disk, limits.disk_bytes))
            if build.helpers and holder.first is not None:
                nursery.start_soon(until, partial(without_helper, holder.pid, holder.first))
            if build.helpers:
                await until(partial(over_served_memory, lane, roots, build.scratch, limits.memory_bytes))
            else:
                nursery.start_soon(rounds.go, name="rounds of all sandboxes")
                await until(partial(over_memory, lane, rounds, look, exact, limits.memory_bytes))
        self.leave()
        await holder.end()

    @property
    def failure(self) -> SandboxError | None:
        """Why it was ended, where that was not its user's wish."""
        if self._failure is None and self.cgroup is not None and ran_out(self.cgroup):
            words = f"sandbox {self.sandbox_id} held more memory than its limit, and the kernel ended it"
            self._failure = SandboxError(words, code="sandbox_out_of_memory", retryable=False)
        return self._failure or (None if self._holder is None else self._holder.failure)

    def leave(self) -> None:
        """Take no calls from here on: the nursery that ``furnish`` was given is about to end."""
        self._state = "closing"

    async def end(self) -> None:
        """End every process and wait until all are gone. The caller shields and bounds it."""
        self.leave()
        for session in (self._bash, self._python):
            if session is not None:
                session.close()
        if self._holder is not None:
            await self._holder.end()

    def adopt(self, sandbox_id: str, job_id: str) -> None:
        """Belong to this job from now on; its directory keeps the name it was made under."""
        self.sandbox_id, self.job_id = sandbox_id, job_id

    async def bash(self, command: str, *, limit_s: float = 30.0) -> CommandResult:
        """Run a command in the persistent shell."""
        return await (await self._session(self._bash)).run(command, limit_s=limit_s)

    async def python(self, code: str, *, limit_s: float = 30.0) -> CommandResult:
        """Run a cell in the persistent interpreter."""
        return await (await self._session(self._python)).run(code, limit_s=limit_s)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """A file's content."""
        return await self._transfer(partial(self._files.read, path, max_bytes=max_bytes))

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file, making its directories."""
        await self._transfer(partial(self._files.write, path, data))

    async def upload(self, source: Path, path: str) -> None:
        """Put a file or a directory of this host in place."""
        await self._transfer(partial(self._transfers.upload, source, path))

    async def download(self, path: str, target: Path, *, max_bytes: int = 1 << 30) -> None:
        """Take a file or a directory out to this host."""
        await self._transfer(partial(self._transfers.download, path, target, max_bytes=max_bytes))

    def info(self, runtime: str) -> SandboxInfo:
        """Its row in a listing."""
        return SandboxInfo(
            sandbox_id=self.sandbox_id,
            job_id=self.job_id,
            runtime=runtime,
            image=self.spec.image,
            state=self._state,
            age_s=trio.current_time() - self._made_at,
            rss_bytes=self.rss_bytes(),
        )

    def rss_bytes(self) -> int:
        """What its cgroup counts; elsewhere the resident pages of its processes, those it shares counted for each."""
        held = None if self.cgroup is None else held_in(self.cgroup)
        if held is not None:
            return held
        roots = [] if self._holder is None else self._roots(self._holder)
        return resident_bytes(process_tree(roots) or [])

    async def _transfer(self, transfer: Callable[[], Awaitable[T]]) -> T:
        """A transfer that fails because the sandbox ends meanwhile is the sandbox's error, not the file's."""
        await self._check_up()
        try:
            return await transfer()
        except OSError as exc:
            failure = exc
        await self._check_up()
        raise failure

    async def _session(self, session: Session | None) -> Session:
        await self._check_up()
        assert session is not None
        return session

    async def _check_up(self) -> Holder:
        if self._state == "closing" or self._holder is None or not self._holder.running:
            # Where one cancellation ends both the sandbox and its user, the user must not take that for an error.
            await trio.lowlevel.checkpoint_if_cancelled()
            raise self.failure or SandboxError(f"sandbox {self.sandbox_id} is gone")
        return self._holder

    @property
    def _made(self) -> Build:
        assert self._build is not None
        return self._build

    async def _spawn(self, argv: Sequence[str]) -> Child:
        return await self._enter(argv, {**_ENVIRONMENT, **self._made.session_env}, self.limits)

    async def _spawn_helper(self, argv: Sequence[str]) -> Child:
        limits = {**self.limits, "processes": self.limits["processes"] + SPARE_PROCESSES}
        child = await self._enter(argv, {"PATH": self._made.session_env["PATH"], "LANG": "C.UTF-8"}, limits)
        if not self._made.helpers:  # the others' memory is walked each time, and nobody asks who was there
            self._visitors.add(child)
        return child

    def _is_visited(self) -> bool:
        """Whether a helper has been in there since this was asked the last time. None is below the sandbox's roots."""
        was_visited = bool(self._visitors)
        self._visitors = {child for child in self._visitors if child.running}
        return was_visited

    async def _enter(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        limits: Mapping[str, int],
        *,
        furnish: Mapping[str, object] | None = None,
    ) -> Child:
        holder, build = await self._check_up(), self._made
        if build.has_namespaces:
            assert isinstance(holder, Child)
            shared = self.spec.network == "host"
            child = await self._warden.spawn(
                argv,
                env=env,
                enter=holder,
                share_network=shared,
                furnish=furnish,
                limits=limits,
                seccomp=self._seccomp,
                apart=build.bare,
                cgroup=self.cgroup,
            )
        else:
            child = await self._spawn_beside(argv, env, limits, holder=holder, build=build)
        if self._state == "closing":
            child.close()
            await self._check_up()
        return child

    async def _spawn_beside(
        self, argv: Sequence[str], env: Mapping[str, str], limits: Mapping[str, int], *, holder: Holder, build: Build
    ) -> Child:
        # The limit of processes would count those of all sandboxes, and of whatever else this user runs.
        beside = {name: value for name, value in limits.items() if name != "processes"}
        try:
            return await self._warden.spawn(
                argv,
                env={**env, **dict([build.marker.split("=", 1)])} if build.marker else env,
                cwd="/" if self._has_own_warden else build.workdir,
                limits=beside,
                seccomp=self._seccomp if build.filtered else b"",
                cgroup=self.cgroup,
            )
        except SandboxError as exc:
            failure = exc
        await self._blame_the_end(holder)
        raise failure

    async def _blame_the_end(self, holder: Holder) -> None:
        """A warden within goes before it is told why: raise that, where it has gone."""
        if self._has_own_warden and not self._warden.is_up:
            with trio.move_on_after(_TELL_SECONDS):
                await holder.wait()
            await self._check_up()

    def _sessions(self) -> list[int]:
        pids = [session.pid for session in (self._bash, self._python) if session is not None]
        # What a warden within calls its children means nothing here; they are below its first process.
        return [pid for pid in pids if pid is not None and not self._has_own_warden]

    def _roots(self, holder: Holder) -> list[int]:
        """The processes that all others of the sandbox are below; the first is in its own file systems."""
        return [holder.first or holder.pid, *self._sessions()]
