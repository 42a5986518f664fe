"""What the policy is told: the task, the rules, and how to end, in the words that the tools of its preset need."""

from __future__ import annotations

from typing import Final

from prorld.domain.messages import Message, system, user
from prorld_swe.config import Preset
from prorld_swe.repository import ROOT
from prorld_swe.task import SweTask

__all__ = ["opening"]

PROBLEM_CHARS: Final = 60_000

_ROLE: Final = (
    "You are a careful software engineer. You work in a Linux sandbox without network, on a repository that has a "
    "defect, by calling the tools you are offered."
)
_STEPS: Final = (
    "Find the cause, change the code so that the described behaviour is right, and check your change by running code. "
    "Change as little as is needed. Keep everything else working: existing tests will be run, and others that you do "
    "not see.\n\n"
    "Do not change tests or how tests are configured: such changes are taken out before your work is judged. The "
    "judgement is made in a fresh copy of the repository, with only your changes to its other files."
)
_ENDINGS: Final[dict[Preset, str]] = {
    "openhands": "Use execute_bash for commands and str_replace_editor for edits. When you are done, call finish.",
    "openhands-sdk": "Use terminal for commands and file_editor for edits. When you are done, call finish.",
    "swe-agent": "Use bash for commands and str_replace_editor for edits. When you are done, call submit.",
    "mini": (
        "You have one tool, bash; each command runs in a new shell that starts in the repository. When you are done, "
        "run a command whose first line of output is COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT:\n"
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    ),
    "r2e": (
        "Use search to find code, file_editor to read and change it, and execute_bash for commands. When you are done, "
        "call finish with the command submit."
    ),
    "prorld": "Use bash for commands and str_replace_editor for edits. When you are done, call finish.",
}


def opening(task: SweTask, preset: Preset) -> list[Message]:
    """The messages that open the conversation."""
    problem = task.problem.replace("\r\n", "\n").strip()[:PROBLEM_CHARS]
    words = f"The repository is in {ROOT}.\n\n<issue>\n{problem}\n</issue>\n\n{_STEPS}\n\n{_ENDINGS[preset]}"
    return [system(_ROLE), user(words)]
