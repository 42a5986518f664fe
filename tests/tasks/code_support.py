"""What the tests of prorld-code share: real sandboxes, instances in a line, one rollout and its grade."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from prorld.domain.messages import ToolCall
from prorld.handlers import Play, Turn
from prorld.handlers.registry import decode_instance
from prorld.sandbox.bubblewrap import Bubblewrap
from prorld.sandbox.contract import SandboxRuntime
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.warden_client import Warden, run_warden
from prorld.testing.jobs import HandlerRun, run_handler
from prorld_code.handler import CodeConfig, CodeHandler
from prorld_code.instance import CodeInstance

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A directory that an ordinary user can pass through, which pytest's own is not."""
    place = Path(tempfile.mkdtemp(prefix="prorld-code-test-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.fixture
async def runtime(runtime_dir: Path) -> AsyncIterator[Runtime]:
    """Real sandboxes without an image: this host's programs and this interpreter, read-only."""
    async with trio.open_nursery() as nursery:
        warden: Warden = await nursery.start(run_warden)
        yield Runtime(Bubblewrap(), warden, runtime_dir=runtime_dir, boot_id="boot-of-the-test")
        nursery.cancel_scope.cancel("the test has ended")


def block(source: str) -> str:
    """An answer that hands a solution in."""
    return f"```python\n{source}\n```"


def program(*tests: tuple[str, str], **fields: Any) -> dict[str, Any]:
    """An instance whose solution is a program."""
    sides = {"inputs": [given for given, _ in tests], "outputs": [wanted for _, wanted in tests]}
    return {"question": "q", "input_output": sides, **fields}


def function(*tests: tuple[list[Any], Any], **fields: Any) -> dict[str, Any]:
    """An instance whose solution is a function ``f``."""
    sides = {"fn_name": "f", "inputs": [given for given, _ in tests], "outputs": [[wanted] for _, wanted in tests]}
    return {"question": "q", "input_output": sides, **fields}


def check(tests: str, prompt: str = "def f(x):\n    pass\n") -> dict[str, Any]:
    """An instance whose tests are the body of ``check(candidate)``."""
    body = "".join(f"    {line}\n" for line in tests.splitlines())
    return {"prompt": prompt, "entry_point": "f", "test": f"def check(candidate):\n{body}"}


async def graded(runtime: SandboxRuntime, instance: Mapping[str, Any], *turns: Turn | str, **config: Any) -> HandlerRun:
    """One rollout, graded in a real sandbox."""
    handler = CodeHandler(CodeConfig(**{"test_s": 2.0, **config}))
    async with handler.open():
        return await run_handler(handler, instance, turns=turns, runtime=runtime)


def why(run: HandlerRun) -> Any:
    """What the events say of the first test that went wrong."""
    return next(facts.get("why") for what, facts in run.events if what == "graded")


def plays(instance: Mapping[str, Any], **config: Any) -> Sequence[Play]:
    """The handler's own."""
    handler = CodeHandler(CodeConfig(**config))
    decoded = decode_instance(handler, instance)
    assert isinstance(decoded, CodeInstance)
    return handler.plays(decoded)


def turns_of(play: Play) -> list[Turn | str]:
    """Its turns, the calls in them read as an engine would."""
    turns: list[Turn | str] = []
    for number, text in enumerate(play.turns):
        try:
            call = json.loads(text.partition(OPEN)[2].partition(CLOSE)[0])
            made = ToolCall(id=str(number), name=call["name"], arguments=call["arguments"])
        except (ValueError, KeyError):
            turns.append(text)
        else:
            turns.append(Turn(content="", tool_calls=(made,), sampled=1))
    return turns
