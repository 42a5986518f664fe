"""What the tests of this plugin share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from prorld.domain.messages import ToolCall
from prorld.handlers import Play, Turn
from prorld.handlers.registry import decode_instance
from prorld.sandbox.contract import SandboxRuntime
from prorld.testing.jobs import HandlerRun, run_handler
from prorld_code.handler import CodeConfig, CodeHandler
from prorld_code.instance import CodeInstance

OPEN, CLOSE = "<tool_call>", "</tool_call>"


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
