"""The sandboxes that the benches measure: a runtime for each wall, all on one warden that notes what it is asked for.

``open_runtimes`` is the one place that knows how runtimes are made.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

import msgspec
import trio

from prorld.bench.processes import BenchFailed
from prorld.bench.spawner import Order
from prorld.errors import ProrldError, SandboxError, chain, leaves
from prorld.ops.users import sandbox_user
from prorld.sandbox.contract import SandboxRuntime, SandboxSpec
from prorld.sandbox.kinds import WallSettings, make_wall
from prorld.sandbox.link import Child
from prorld.sandbox.reaper import remove_place
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.wall import HOLDER
from prorld.sandbox.warden_client import Warden, run_warden
from prorld.testing.leftovers import children
from prorld.testing.sandbox_contract import open_sandbox

__all__ = ["BOOT_ID", "WALLS", "Recipe", "Spawned", "World", "open_runtimes"]

WALLS = ("bare", "bubblewrap", "apptainer")
USER = "nobody"
BOOT_ID = "bench"
NOTED_MAX = 4096
_WARDEN = b"prorld.sandbox.warden"
_PATH = "/usr/local/bin:/usr/bin:/bin"


class Spawned(msgspec.Struct, frozen=True, kw_only=True):
    """A process that the warden was asked for. ``place`` is a copy of the sandbox's directory as it was."""

    argv: tuple[str, ...]
    wish: dict[str, Any]
    pid: int
    place: tuple[str, str] | None = None

    @property
    def outermost(self) -> bool:
        """Whether it is the first process of a sandbox."""
        return self.argv[-len(HOLDER) :] == HOLDER


class NotingWarden(Warden):
    """A warden that is asked through this one, which notes it all."""

    def __init__(self, inner: Warden, runtime_dir: Path) -> None:
        super().__init__(inner.uid, inner.gid)
        self._inner = inner
        self._copies = runtime_dir / "copies"
        self._place = re.compile(re.escape(f"{runtime_dir}/sandboxes/{BOOT_ID}/") + r"[^/:,]+")
        self.spawned: deque[Spawned] = deque(maxlen=NOTED_MAX)
        self.sessions: set[int] = set()
        self._numbers = count()
        self.keeps_places = False

    @property
    def is_up(self) -> bool:
        """Whether there is a warden process now."""
        return self._inner.is_up

    @property
    def deaths(self) -> int:
        """How often it has died so far."""
        return self._inner.restarts_total

    async def spawn(self, argv: Sequence[str], **wish: Any) -> Child:
        """As the warden's own."""
        place = self._copied([*argv, *wish["env"].values()]) if self.keeps_places and "marker" in wish else None
        child = await self._inner.spawn(argv, **wish)
        self.sessions.add(child.pid)
        self.spawned.append(Spawned(argv=tuple(argv), wish=wish, pid=child.pid, place=place))
        return child

    def _copied(self, words: Sequence[str]) -> tuple[str, str] | None:
        found = next(filter(None, map(self._place.search, words)), None)
        if found is None:
            return None
        copy = self._copies / str(next(self._numbers))
        copy_tree(Path(found[0]), copy)
        return found[0], str(copy)


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How a wall starts the first process of a sandbox, to be done again without the daemon."""

    order: Order
    place: tuple[str, str] | None

    @contextmanager
    def prepared(self, where: Path, command: str | None = None) -> Iterator[Order]:
        """The same order on a directory of its own; with ``command``, that is what runs behind the wall."""
        argv, env = list(self.order.argv), dict(self.order.env)
        if command is not None:
            if argv[-2] != "-c":
                raise BenchFailed(f"the first process of a sandbox is no `bash -c`: {argv[-3:]}")
            argv[-1] = command
        if self.place is not None:
            original, copy = self.place
            copy_tree(Path(copy), where)
            argv = [word.replace(original, str(where)) for word in argv]
            env = {name: word.replace(original, str(where)) for name, word in env.items()}
        until: Literal["byte", "end"] = "byte" if command is None else "end"
        try:
            yield msgspec.structs.replace(self.order, argv=argv, env=env, until=until)
        finally:
            if where.exists():
                remove_place(where)


class World(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to measure on. ``missing`` says why a wall is not among the runtimes."""

    runtimes: Mapping[str, SandboxRuntime]
    missing: Mapping[str, str]
    warden: NotingWarden
    runtime_dir: Path
    image: str | None

    @property
    def warden_pid(self) -> int:
        """The warden of this moment: one that died has been replaced."""
        for pid in children():
            with suppress(OSError):
                if _WARDEN in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        raise BenchFailed("there is no warden")

    @property
    def sessions(self) -> frozenset[int]:
        """The leaders of all sessions that the warden has started."""
        return frozenset(self.warden.sessions)

    def spec(self, wall: str, **changes: Any) -> SandboxSpec:
        """A sandbox behind this wall; behind none there is no image, and the same interpreter as without one."""
        if wall != "bare":
            return SandboxSpec(image=self.image, **changes)
        return SandboxSpec(trusted=True, env={"PATH": f"{sys.prefix}/bin:{_PATH}"}, **changes)

    async def recipe(self, wall: str) -> Recipe:
        """How this wall starts a sandbox, seen by making one."""
        self.warden.spawned.clear()
        self.warden.keeps_places = True
        try:
            async with open_sandbox(self.runtimes[wall], self.spec(wall), sandbox_id=f"{wall}-recipe"):
                pass
        finally:
            self.warden.keeps_places = False
        first = next((one for one in self.warden.spawned if one.outermost), None)
        if first is None:
            raise BenchFailed(f"{wall} started nothing that the warden knows of")
        order = Order(
            argv=first.argv,
            env=first.wish["env"],
            cwd=first.wish.get("cwd", "/"),
            data=first.wish.get("data", ()),
            until="byte",
        )
        return Recipe(order=order, place=first.place)


@asynccontextmanager
async def open_runtimes(names: Sequence[str], image: str | None) -> AsyncIterator[World]:
    """The walls of these names for the length of a block, each one tried; nothing is left of them afterwards."""
    user = sandbox_user(USER)
    # Small and short-lived: its removal does not hold anybody up.
    with tempfile.TemporaryDirectory(prefix="prorld-bench-") as place:
        runtime_dir = _passable(Path(place))
        async with trio.open_nursery() as nursery:
            inner: Warden = await nursery.start(partial(run_warden, user=user), name="warden")
            warden = NotingWarden(inner, runtime_dir)
            runtimes, missing = _make(names, warden, runtime_dir, image)
            world = World(
                runtimes=runtimes,
                missing=missing,
                warden=warden,
                runtime_dir=runtime_dir,
                image=image,
            )
            for wall in list(runtimes):
                trouble = await _trouble(world, wall)
                if trouble is not None:
                    missing[wall] = f"{wall}: {trouble}"
                    del runtimes[wall]
            yield world
            nursery.cancel_scope.cancel("everything is measured")


def _passable(place: Path) -> Path:
    """A directory that the user of the sandboxes can go through, and not look into."""
    place.chmod(0o711)
    return place


def _make(
    names: Sequence[str], warden: Warden, runtime_dir: Path, image: str | None
) -> tuple[dict[str, SandboxRuntime], dict[str, str]]:
    runtimes: dict[str, SandboxRuntime] = {}
    missing: dict[str, str] = {}
    settings = WallSettings()
    for name in names:
        if name == "apptainer" and image is None:
            missing[name] = "apptainer: needs an image, `--image DIR`"
            continue
        wall = make_wall("local" if name == "bare" else name, settings)
        runtimes[name] = Runtime(wall, warden, runtime_dir=runtime_dir, boot_id=BOOT_ID)
    return runtimes, missing


async def _trouble(world: World, wall: str) -> str | None:
    """Why no sandbox can be made behind this wall; ``None`` where one could be."""
    said: str | None = None
    try:
        async with open_sandbox(world.runtimes[wall], world.spec(wall), sandbox_id=f"{wall}-probe") as sandbox:
            result = await sandbox.bash("echo works", limit_s=10.0)
            if result.output != b"works\n":
                raise SandboxError(f"a sandbox answers {result.output[:100]!r}")
    except* (ProrldError, OSError, trio.TooSlowError) as group:
        said = " ".join(chain(next(leaves(group))).split())
    return said


def copy_tree(source: Path, target: Path) -> None:
    """A directory with modes and owners as they are."""
    shutil.copytree(source, target, symlinks=True)
    for path in (source, *source.rglob("*")):
        found = path.lstat()
        copied = target / path.relative_to(source)
        os.chown(copied, found.st_uid, found.st_gid, follow_symlinks=False)
