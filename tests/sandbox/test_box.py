"""What a sandbox keeps of what was in it, without processes."""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast

import pytest
import trio

from prorld.sandbox.box import Box
from prorld.sandbox.contract import SandboxSpec
from prorld.sandbox.wall import Build, Holder
from prorld.sandbox.warden_client import Warden


class Helper:
    """A program that says nothing and ends well."""

    running = False

    def __init__(self) -> None:
        self.control, other = trio.socket.socketpair()
        other.close()

    async def wait(self) -> int:
        return 0

    def close(self) -> None:
        self.control.close()


class Helpers:
    """Stands for a warden, and for a holder that runs. Keeps nothing of what it starts alive."""

    running, first, pid = True, None, 0

    def __init__(self) -> None:
        self.started: list[weakref.ref[Helper]] = []

    async def spawn(self, *_: Any, **__: Any) -> Helper:
        await trio.lowlevel.checkpoint()
        helper = Helper()
        self.started.append(weakref.ref(helper))
        return helper


@pytest.mark.parametrize("served", [False, True])
async def test_helpers_that_have_ended_are_forgotten(*, served: bool) -> None:
    """Where the next look at its memory asks for them, that has to come; where none asks, at once."""
    warden = Helpers()
    box = Box(cast("Warden", warden), SandboxSpec(), sandbox_id="box-1", job_id="job-1", seccomp=b"")
    build = Build(argv=[], session_env={"PATH": ""}, workdir="/", has_namespaces=False, helpers=served)
    box.hold(cast("Holder", warden), build)
    for _ in range(3):
        assert await box.read_file("file") == b""
    gc.collect()
    kept = [ref for ref in warden.started if ref() is not None]
    assert len(kept) == (0 if served else 3)
