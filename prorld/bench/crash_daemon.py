"""A daemon that is killed and started again, on the same port and the same state directory."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import trio

from prorld.bench.processes import BenchFailed
from prorld.kit.http_client import HttpClient, HttpError
from prorld.kit.process import Child, child
from prorld.testing.byte_tokenizer import write_byte_tokenizer

__all__ = ["Place", "Running", "SmallDisk", "free_port", "left_of", "small_disk"]

READY_S_MAX = 60.0
STOP_S_MAX = 60.0
POLL_S = 0.02
TAIL_BYTES = 4000
# A disk of this size is full soon; it has room for a journal of some hundred jobs.
DISK_BYTES = 24 << 20
# What is kept free for results; the default would be more than the small disk has.
RESERVE_BYTES = 2 << 20
MOUNT_S_MAX = 10.0


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class SmallDisk:
    """A small file system that only the processes in its mount namespace see."""

    def __init__(self, pid: int, mounted: Path) -> None:
        self._pid = pid
        # From here it is seen through the process that keeps the namespace alive.
        self._seen = Path(f"/proc/{pid}/root{mounted}")
        self._filler = self._seen / "filler"

    def entering(self) -> list[str]:
        """What stands before a command that is to run in there."""
        how = ["-m"] if os.geteuid() == 0 else ["-U", "-m", "--preserve-credentials"]
        return ["nsenter", "-t", str(self._pid), *how]

    @property
    def free_bytes(self) -> int:
        """Room that is left."""
        found = os.statvfs(self._seen)
        return found.f_bavail * found.f_frsize

    def fill(self) -> None:
        """Take all of it."""
        block = bytes(4096)
        with self._filler.open("ab", buffering=0) as filler, suppress(OSError):
            while True:
                filler.write(block)

    def make_room(self) -> None:
        """Give it back."""
        self._filler.unlink(missing_ok=True)

    def token(self) -> str:
        """The daemon's token, in the state directory."""
        return (self._seen / "token").read_text().strip()


@asynccontextmanager
async def small_disk(at: Path) -> AsyncIterator[SmallDisk]:
    """A file system of ``DISK_BYTES`` at this path, for a while. ``BenchFailed`` where nobody may mount one."""
    script = f'mkdir -p "{at}" && mount -t tmpfs -o size={DISK_BYTES},mode=700 none "{at}" && echo mounted && exec cat'
    flags = "-m" if os.geteuid() == 0 else "-Urm"
    async with trio.open_nursery() as nursery:
        run = partial(
            child, ["unshare", flags, "sh", "-c", script], env=_environment(), stdin="pipe", stdout="pipe",
            stderr="stdout",
        )  # fmt: skip
        holder: Child = await nursery.start(run, name="keeper of a small disk")
        said = b""
        with trio.move_on_after(MOUNT_S_MAX):
            said = await holder.stdout.receive_some(4096)
        if said != b"mounted\n":
            raise BenchFailed(f"no file system of its own can be had here: {said.decode('utf-8', 'replace')}")
        yield SmallDisk(holder.pid, at)
        nursery.cancel_scope.cancel("it is not needed any more")


class Place:
    """Where the daemon lives over all its lives: its port, its configuration, its state."""

    def __init__(self, directory: Path, engine: str, *, slots: int, disk: SmallDisk | None = None) -> None:
        """``disk`` is mounted at its state directory."""
        self.directory = directory
        self.state = directory / "state"
        self.log = directory / "daemon.log"
        self.disk = disk
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._config = directory / "prorld.toml"
        tokenizer = write_byte_tokenizer(directory / "tokenizer")
        self._config.write_text(
            _SETTINGS.format(engine=engine, port=self.port, slots=slots, tokenizer=tokenizer, reserve=RESERVE_BYTES)
        )

    def argv(self) -> list[str]:
        """The command line of one life."""
        serve = [sys.executable, "-m", "prorld.cli", "serve", "--config", str(self._config), "--state-dir"]
        serve.append(str(self.state))
        return serve if self.disk is None else [*self.disk.entering(), *serve]

    def token(self) -> str:
        """What the daemon asks for; the same over all its lives."""
        return (self.state / "token").read_text().strip() if self.disk is None else self.disk.token()

    def tail(self) -> str:
        """What the daemon said last."""
        return self.log.read_bytes()[-TAIL_BYTES:].decode("utf-8", "replace") if self.log.exists() else ""

    @asynccontextmanager
    async def alive(self) -> AsyncIterator[Running]:
        """One life, from its start; ended by SIGTERM unless it ended before."""
        with self.log.open("ab") as log:
            async with trio.open_nursery() as nursery:
                run = partial(
                    child, self.argv(), env=_environment(), stdout="pipe", stderr="stdout", term_seconds=STOP_S_MAX
                )
                process: Child = await nursery.start(run, name="daemon under test")
                # Not straight into the file: a limit on files would be one on what the daemon says of it.
                nursery.start_soon(_copy, process, log.fileno())
                yield Running(self, process)
                nursery.cancel_scope.cancel("this life is over")


class Running:
    """One life of it."""

    def __init__(self, place: Place, process: Child) -> None:
        self.place = place
        self.process = process

    async def ready(self) -> float:
        """Wait until it answers; how long that took. ``BenchFailed`` where it ends instead."""
        began = trio.current_time()
        http = HttpClient(self.place.address, connections_max=1)
        try:
            with trio.move_on_after(READY_S_MAX):
                await trio.lowlevel.checkpoint()
                while self.process.exit_code is None:
                    await trio.sleep(POLL_S)
                    if await _answers(http):
                        return trio.current_time() - began
        finally:
            http.close()
        raise BenchFailed(f"the daemon did not come back ({self.process.exit_code}):\n{self.place.tail()}")

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        os.kill(self.process.pid, signal.SIGKILL)
        with trio.fail_after(STOP_S_MAX):
            await self.process.wait()

    async def stop(self) -> int:
        """SIGTERM twice: end what runs, and go; its exit code."""
        for _ in range(2):
            if self.process.exit_code is None:
                os.kill(self.process.pid, signal.SIGTERM)
            await trio.sleep(0.2)
        with trio.fail_after(STOP_S_MAX):
            return await self.process.wait()

    def limit_files(self, bytes_max: int | None) -> None:
        """No file may grow beyond this: what comes instead is an I/O error. ``None`` lifts it, and so does a kill."""
        if self.process.exit_code is not None:
            return
        hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (hard if bytes_max is None else bytes_max, hard))


async def _answers(http: HttpClient) -> bool:
    try:
        return (await http.request("GET", "/healthz")).status == 200
    except HttpError:
        return False


async def _copy(process: Child, to: int) -> None:
    while said := await process.stdout.receive_some(65536):
        os.write(to, said)


def left_of(directory: Path) -> list[str]:
    """Processes that have this directory in their command line or environment, this one left out."""
    found: list[str] = []
    wanted = str(directory).encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            # It has gone, or is a stranger's.
            continue
        if wanted in words:
            found.append(f"{entry.name}: {words[:200].replace(bytes(1), b' ').decode('utf-8', 'replace')}")
    return found


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PRORLD")}


_SETTINGS = """\
backends = [{{ kind = "vllm", url = "{engine}" }}]

[server]
port = {port}

[stages]
init = {slots}
run = {slots}
eval = {slots}
ahead = {slots}

[admission]
enabled = false

[timeouts]
drain_s = 0.1

[handlers]
enabled = ["bench"]

[warm]
total = 0

[audit]
share = 0

[retention]
reserve_bytes = {reserve}

[log]
format = "json"
level = "info"

[policies.default]
tokenizer = "{tokenizer}"
"""
