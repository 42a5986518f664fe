"""When to say that a job will soon want a sandbox to be graded in."""

from __future__ import annotations

from collections.abc import Callable

from prorld.inference.contract import Turn
from prorld.sandbox.contract import SandboxSpec

__all__ = ["GradingHint"]

# The tool that ends an episode, by the name that it has everywhere.
FINISH = "finish"


class GradingHint:
    """Told once an attempt: at what looks like the policy's last turn, or when RUN has ended.

    Nothing is held for the job. It may wait for long at the gate of EVAL, and takes whatever is ready then.
    """

    def __init__(self, spec: SandboxSpec | None, *, max_turns: int, expect: Callable[[SandboxSpec], None]) -> None:
        self.spec = spec
        self._max_turns = max_turns
        self._expect = expect
        self._given = False

    def spoke(self, turn: int, said: Turn) -> None:
        """The policy took a turn; the first one is number 0."""
        ends = not said.tool_calls or any(call.name == FINISH for call in said.tool_calls)
        if ends or turn + 1 >= self._max_turns:
            self.give()

    def give(self) -> None:
        """Say it now, unless it was said."""
        if self.spec is not None and not self._given:
            self._given = True
            self._expect(self.spec)
