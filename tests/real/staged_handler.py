"""A task that has its sandbox in every stage and takes its time in each, for tests that kill what holds it up.

Its reward says what became of its file: 1 where all is as it was written, ``SHELL_DIED`` where the policy was told that
its shell had ended, and 0 for anything else, which no kill may bring about.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from prorld.domain.messages import Message
from prorld.errors import SandboxError
from prorld.handlers import AgentHandler, Grade, JobContext, RunResult, SandboxSpec

__all__ = ["SHELL_DIED", "TURNS", "WRITTEN", "StagedHandler"]

SHELL_DIED = 0.5
LIMIT_SECONDS = 5.0
WRITTEN = "seed\nmade\n"
_STRAYS = "setsid sleep 4321 & nohup sleep 4321 >/dev/null & (trap '' HUP TERM; sleep 4321) & "
_MAKE = _STRAYS + "sleep 0.3; echo made >> file; sleep 0.2"
TURNS = (
    f'<tool_call>{{"name": "bash", "arguments": {{"command": "{_MAKE}"}}}}</tool_call>',
    '<tool_call>{"name": "python", "arguments": {"code": "import time; time.sleep(0.2)"}}</tool_call>',
    "done",
)
_RESTARTED = "had ended and was started again"


class StagedInstance(msgspec.Struct, frozen=True):
    """Nothing to say."""


class StagedHandler(AgentHandler[StagedInstance]):
    """Half a second in each stage."""

    name = "staged"
    instance_type = StagedInstance
    default_tools: ClassVar[tuple[str, ...]] = ("bash", "python")
    tool_limit_s = LIMIT_SECONDS
    grades_in_sandbox = True

    def sandbox_spec(self, instance: StagedInstance) -> SandboxSpec | None:
        """The default one."""
        return SandboxSpec()

    def prompt(self, instance: StagedInstance) -> Sequence[Message]:
        """Anything."""
        return [Message(role="user", content="go on")]

    async def init(self, job: JobContext[StagedInstance]) -> None:
        """The file's first line, after a while."""
        await super().init(job)
        await _steady(job, "sleep 0.4; echo seed > file")

    async def evaluate(self, job: JobContext[StagedInstance], result: RunResult) -> Grade:
        """Look at the file, after a while and by two ways."""
        seen = await _steady(job, "sleep 0.3; cat file; sleep 0.1")
        read = (await job.sandbox.read_file("file")).decode()
        if seen == read == WRITTEN:
            return Grade(reward=1.0)
        told = any(_RESTARTED in (message.content or "") for message in job.transcript)
        return Grade(reward=SHELL_DIED if told and read == "seed\n" else 0.0)


async def _steady(job: JobContext[StagedInstance], command: str) -> str:
    """A command of the task's own, which must not be cut short."""
    result = await job.sandbox.bash(command, limit_s=LIMIT_SECONDS)
    if result.exit_code or result.restarted:
        raise SandboxError(f"the shell ended in {command!r} with {result.exit_code}")
    return result.text
