"""Real sandboxes for the plays of this plugin, and plays as turns of a scripted model."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import trio

from prorld.domain.messages import ToolCall
from prorld.handlers import Play, Turn
from prorld.sandbox.bubblewrap import Bubblewrap
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.warden_client import Warden, run_warden

_CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>", re.DOTALL)


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A directory that an ordinary user can pass through, which pytest's own is not."""
    place = Path(tempfile.mkdtemp(prefix="prorld-test-"))
    place.chmod(0o755)
    yield place
    left = [str(path) for path in place.glob("sandboxes/*/*") if path.is_dir()]
    shutil.rmtree(place)
    assert left == []


@pytest.fixture
async def runtime(runtime_dir: Path) -> AsyncIterator[Runtime]:
    """Real sandboxes of bubblewrap."""
    async with trio.open_nursery() as nursery:

        async def run(*, task_status: trio.TaskStatus[Warden] = trio.TASK_STATUS_IGNORED) -> None:
            await run_warden(exposed=[], task_status=task_status)

        warden: Warden = await nursery.start(run)
        yield Runtime(Bubblewrap(), warden, runtime_dir=runtime_dir, boot_id="boot-of-the-test")
        nursery.cancel_scope.cancel("the test has ended")


@pytest.fixture
def turns_of() -> Callable[[Play], list[Turn | str]]:
    """A play as the turns that a model samples; what is written as a call of a tool is one."""

    def turn(text: str) -> Turn | str:
        found = _CALL.fullmatch(text)
        if found is None:
            return text
        try:
            call = json.loads(found[1])
        except ValueError:
            return text
        made = ToolCall(id="1", name=call["name"], arguments=call["arguments"])
        return Turn(content="", tool_calls=(made,), sampled=len(text))

    return lambda play: [turn(text) for text in play.turns]
