"""``task_tracker``: a list of what is to be done, which the policy keeps for itself over one episode."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from prorld.agents.observation import Observation, clip, refusal
from prorld.agents.tools import Tool, make_tool

__all__ = ["TASKS_MAX", "task_tracker"]

TASKS_MAX = 100
TEXT_BYTES = 1000
_MARKS = {"todo": "[ ]", "in_progress": "[~]", "done": "[x]"}


class _Task(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    id: str | int = ""
    status: str = "todo"
    notes: str = ""


_ITEMS = {
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "title": {"type": "string"},
            "status": {"type": "string", "enum": list(_MARKS)},
            "notes": {"type": "string"},
        },
        "required": ["title"],
    }
}
_Command = Annotated[
    str,
    Meta(
        description="`view` shows the list, `plan` puts another in its place.",
        extra_json_schema={"enum": ["view", "plan"]},
    ),
]
_TaskList = Annotated[list[Any], Meta(description="For `plan`: the whole list.", extra_json_schema=_ITEMS)]


class _Tracker(msgspec.Struct, frozen=True, kw_only=True):
    command: _Command
    task_list: _TaskList | UnsetType = UNSET


def task_tracker() -> Tool:
    """The list of one episode."""
    tasks: list[_Task] = []

    def run(given: _Tracker) -> Observation:
        match given.command:
            case "plan":
                planned = _planned(given.task_list)
                if isinstance(planned, str):
                    return refusal(f"Nothing was planned: {planned}.", "bad_arguments")
                tasks[:] = planned
                return Observation(text=f"The list has {len(tasks)} tasks now.\n{_shown(tasks)}".rstrip())
            case "view":
                return Observation(text=_shown(tasks) or "The list is empty. Make one with `plan`.")
            case other:
                return refusal(f"There is no command {clip(other, 50)!r}; there are: view, plan.", "command")

    return make_tool("task_tracker", "Keep a list of the tasks of a larger piece of work.", _Tracker, run)


def _planned(given: list[Any] | UnsetType) -> list[_Task] | str:
    """The tasks, or what is wrong with them."""
    if isinstance(given, UnsetType):
        return "`plan` needs `task_list`"
    if len(given) > TASKS_MAX:
        return f"a list has at most {TASKS_MAX} tasks"
    try:
        tasks = msgspec.convert(given, list[_Task], strict=False)
    except msgspec.ValidationError as exc:
        return clip(str(exc), 300)
    if strange := [task.status for task in tasks if task.status not in _MARKS]:
        return f"no status {clip(strange[0], 50)!r}; there are {', '.join(_MARKS)}"
    return tasks


def _shown(tasks: list[_Task]) -> str:
    rows: list[str] = []
    for number, task in enumerate(tasks, 1):
        rows.append(f"{number}. {_MARKS[task.status]} {clip(task.title, TEXT_BYTES)}")
        if task.notes:
            rows.append(f"   {clip(task.notes, TEXT_BYTES)}")
    return clip("\n".join(rows))
