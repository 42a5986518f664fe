"""Real sandboxes, and a small package of our own with a bug, as a distribution in a cache of packages."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from prorld.domain.messages import ToolCall
from prorld.handlers import Play, Turn
from prorld.sandbox.bubblewrap import Bubblewrap
from prorld.sandbox.host import needed_paths
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.warden_client import Warden, run_warden
from prorld.testing.jobs import HandlerRun, run_handler
from prorld_swe.config import SweConfig
from prorld_swe.handler import SweHandler
from prorld_swe.instance import SweInstance
from tests.tasks.tinycalc import row_of, write_sdist

LIMIT_S = 15.0


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The distribution, in a cache of packages of its own."""
    return write_sdist(tmp_path_factory.mktemp("packages"))


@pytest.fixture
def row(sdist: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An instance of the package with its bug."""
    monkeypatch.setenv("PRORLD_PACKAGES", str(sdist.parent.parent))
    return row_of(sdist)


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A directory that an ordinary user can pass through, which pytest's own is not."""
    place = Path(tempfile.mkdtemp(prefix="prorld-swe-test-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.fixture
async def runtime(runtime_dir: Path) -> AsyncIterator[Runtime]:
    """Real sandboxes."""
    async with trio.open_nursery() as nursery:
        warden: Warden = await nursery.start(_run_warden)
        yield Runtime(Bubblewrap(), warden, runtime_dir=runtime_dir, boot_id="boot-of-the-test")
        nursery.cancel_scope.cancel("the test has ended")


async def _run_warden(*, task_status: trio.TaskStatus[Warden] = trio.TASK_STATUS_IGNORED) -> None:
    await run_warden(exposed=needed_paths(), task_status=task_status)


_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


def _spoken(text: str) -> Turn:
    """A turn of a play, with the call that is written in it."""
    match = _CALL.search(text)
    try:
        call = json.loads(match.group(1)) if match else None
    except ValueError:
        call = None
    if call is None:
        return Turn(content=text, sampled=len(text))
    written = ToolCall(id="1", name=call["name"], arguments=call["arguments"])
    return Turn(content="", tool_calls=(written,), sampled=len(text))


@pytest.fixture
def played(runtime: Runtime) -> Callable[..., Awaitable[HandlerRun]]:
    """Runs a play, by its name or as it is given, and holds the grade to its reward."""

    async def play_it(row: dict[str, Any], play: str | Play, config: SweConfig | None = None) -> HandlerRun:
        handler = SweHandler(config or SweConfig(test_least_s=LIMIT_S, test_limit_s=LIMIT_S))
        if isinstance(play, str):
            play = {each.name: each for each in handler.plays(msgspec.convert(row, SweInstance))}[play]
        async with handler.open():
            run = await run_handler(handler, row, turns=[_spoken(turn) for turn in play.turns], runtime=runtime)
        assert run.grade.reward == play.reward, (play.name, run.grade, run.metrics, run.events)
        return run

    return play_it
