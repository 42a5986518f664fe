"""A program that works on images, run to its end with its lines handed on as they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import trio

from prorld.errors import SandboxError
from prorld.kit.process import Child, child

__all__ = ["Said", "run_lines"]

# A line of what a program says.
Said = Callable[[str], None]

LAST_LINES = 12
LINE_CHARS_MAX = 1000

_RECEIVE_BYTES = 1 << 14


async def run_lines(
    argv: Sequence[str], *, env: Mapping[str, str], said: Said, lifeline: bool = False
) -> tuple[int, list[str]]:
    """Run it; the exit code and the last lines of what it said. Cancelled, its whole group is gone first."""
    failure: OSError | None = None
    code = 1
    last: deque[str] = deque(maxlen=LAST_LINES)
    async with trio.open_nursery() as nursery:
        start = partial(child, argv, env=env, cwd="/", stdout="pipe", stderr="stdout", lifeline=lifeline)
        try:
            handle: Child = await nursery.start(start, name=argv[0])
        except OSError as exc:  # raised below, so that it does not come out as a group
            failure = exc
        else:
            rest = b""
            while data := await handle.stdout.receive_some(_RECEIVE_BYTES):
                *lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
                rest = rest[-_RECEIVE_BYTES:]
                for line in lines:
                    _hand_on(line, last, said)
            _hand_on(rest, last, said)
            code = await handle.wait()
    if failure is not None:
        raise SandboxError(f"{argv[0]} could not be started: {failure.strerror}") from failure
    return code, [*last]


def _hand_on(line: bytes, last: deque[str], said: Said) -> None:
    text = line.decode("utf-8", "replace").strip()[:LINE_CHARS_MAX]
    if text:
        last.append(text)
        said(text)
