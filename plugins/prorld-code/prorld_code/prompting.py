"""What the policy is told, and the examples that it finds as files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final, Literal

from prorld.domain.messages import Message
from prorld_code.instance import CodeInstance
from prorld_code.problem import Problem

__all__ = ["opening", "shown_files"]

SHOWN_MAX: Final = 8
SHOWN_BYTES: Final = 64 << 10

_RULES: Final = (
    "Solve the programming problem in Python 3. You may use the tools you are offered to write and to try code. The"
    " solution is judged by hidden tests, each with limits of time and memory, in another place: without a network,"
    " without starting processes, and with nothing of the files that you leave here. "
)
_KIND: Final = {
    "program": "It is a whole program that reads standard input and writes standard output. ",
    "function": "It defines the function {name}, or a class Solution with the method {name}; it reads no input. ",
    "check": "It defines the function {name} in whole, imports included. ",
}
_WHERE: Final = {
    "block": "Put it into a ```python block at the end of your last message; the last such block counts.",
    "file": "Save it as solution.py in the working directory, /work; that file counts.",
    "either": (
        "Put it into a ```python block at the end of your last message; the last such block counts. Without one, the"
        " file /work/solution.py does."
    ),
}
_EXAMPLES: Final = " Examples are in /work/tests."


def opening(instance: CodeInstance, problem: Problem, answer: Literal["block", "file", "either"]) -> Sequence[Message]:
    """The rules and the problem; a system message of the conversation's own comes before the rules."""
    rules = _RULES + _KIND[problem.kind].format(name=problem.name) + _WHERE[answer]
    rules += _EXAMPLES if problem.public else ""
    messages = [Message(role=message.role, content=message.content) for message in instance.conversation]
    if messages[0].role == "system":
        rules = f"{messages.pop(0).content}\n\n{rules}"
    if instance.starter_code and instance.starter_code not in messages[-1].content:
        last = messages.pop()
        content = f"{last.content}\n\nBegin with this:\n\n```python\n{instance.starter_code}\n```"
        messages.append(Message(role="user", content=content))
    if problem.kind == "check":
        last = messages.pop()
        content = f"Complete the function {problem.name}:\n\n```python\n{last.content.rstrip()}\n```"
        messages.append(Message(role="user", content=content))
    return [Message(role="system", content=rules), *messages]


def shown_files(problem: Problem) -> dict[str, bytes]:
    """Public tests as files; hidden ones never."""
    files: dict[str, bytes] = {}
    for number, test in enumerate(problem.public[:SHOWN_MAX], 1):
        if test.size > SHOWN_BYTES:
            continue
        if problem.kind == "program":
            files[f"tests/{number}.in"] = str(test.given).encode("utf-8", "replace")
            files[f"tests/{number}.out"] = str(test.wanted).encode("utf-8", "replace")
        else:
            told = {"arguments": test.given, "returns": test.wanted}
            files[f"tests/{number}.json"] = json.dumps(told).encode()
    return files
