"""When to say that a job will soon want a sandbox to be graded in."""

from __future__ import annotations

from collections.abc import Callable

from prorld.inference.contract import Turn
from prorld.sandbox.contract import SandboxSpec

__all__ = ["GradingHint"]

# The tools that end an episode, by the names that they have in the presets.
ENDING = frozenset({"finish", "submit", "exit_forfeit"})


class GradingHint:
    """Told at what looks like the policy's last turn, or when RUN has ended.

    A turn without a call is no end where calls are written as text, or where it was a sub-agent's: the first such hint
    that was wrong is the last one, and at the end it is said again. Nothing is held for the job. It may wait for long
    at the gate of EVAL, and takes whatever is ready then.
    """

    def __init__(self, spec: SandboxSpec | None, *, max_turns: int, expect: Callable[[SandboxSpec], None]) -> None:
        self.spec = spec
        self._max_turns = max_turns
        self._expect = expect
        self._given = False
        self._silence_ends = True

    def spoke(self, turn: int, said: Turn) -> None:
        """The policy took a turn; the first one is number 0."""
        if self._given:
            self._given = self._silence_ends = False
        ends = any(call.name in ENDING for call in said.tool_calls) or (self._silence_ends and not said.tool_calls)
        if ends or turn + 1 >= self._max_turns:
            self.give()

    def give(self) -> None:
        """Say it now, unless it was said since the last turn."""
        if self.spec is not None and not self._given:
            self._given = True
            self._expect(self.spec)
