"""The tree of trio's tasks: who started whom, how old each is, and where it waits.

It only looks. Trio keeps no birthdays, so ``TaskAges`` is an instrument that notes them; a task that is older than the
instrument counts from then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import PurePath
from types import FrameType
from typing import Final

import msgspec
import trio

from prorld.wire.ops import TaskNode, TaskTree

__all__ = ["TASKS_SHOWN_MAX", "TaskAges", "format_tree", "task_tree"]

# Looking at a task costs about 20 us, and the loop stands still meanwhile.
TASKS_SHOWN_MAX: Final = 2000
_TRIO: Final = PurePath(trio.__file__).parent


class TaskAges(trio.abc.Instrument):
    """When each living task was started."""

    def __init__(self) -> None:
        self._since = trio.current_time()
        self._births: dict[trio.lowlevel.Task, float] = {}

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        """Called by trio."""
        self._births[task] = trio.current_time()

    def task_exited(self, task: trio.lowlevel.Task) -> None:
        """Called by trio."""
        self._births.pop(task, None)

    def age_s(self, task: trio.lowlevel.Task) -> float:
        """Seconds since the task was started."""
        return trio.current_time() - self._births.get(task, self._since)


def task_tree(ages: TaskAges, *, root: trio.lowlevel.Task | None = None, shown_max: int = TASKS_SHOWN_MAX) -> TaskTree:
    """The tasks below ``root``, by default all that live. Where there are too many, the outer ones are shown."""
    top = root or trio.lowlevel.current_root_task()
    assert top is not None, "outside of trio"
    top_node, shown = _node(top, ages), 1
    queue = deque([(top, top_node)])
    while queue:
        task, node = queue.popleft()
        children = list(_children(task))
        taken = children[: max(0, shown_max - shown)]
        shown += len(taken)
        for child in taken:
            below = _node(child, ages)
            node.children.append(below)
            queue.append((child, below))
        if len(taken) < len(children):
            msgspec.structs.force_setattr(node, "left_out", len(children) - len(taken))
    return TaskTree(tasks=trio.lowlevel.current_statistics().tasks_living, root=top_node)


def _children(task: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    """In an order that does not change from one look to the next."""
    for nursery in task.child_nurseries:
        yield from sorted(nursery.child_tasks, key=lambda child: child.name)


def _node(task: trio.lowlevel.Task, ages: TaskAges) -> TaskNode:
    return TaskNode(name=task.name, age_s=round(ages.age_s(task), 3), waits_at=_waits_at(task), children=[])


def _waits_at(task: trio.lowlevel.Task) -> str:
    found: FrameType | None = None
    line = 0
    for frame, number in task.iter_await_frames():
        if not PurePath(frame.f_code.co_filename).is_relative_to(_TRIO):
            found, line = frame, number
    if found is None:
        return ""
    path = PurePath(found.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{line} {found.f_code.co_qualname}"


def format_tree(tree: TaskTree) -> str:
    """The tree as text, one line a task, indented by who started whom."""
    lines = [f"{tree.tasks} tasks"]
    stack = [(tree.root, 0)]
    while stack:
        node, depth = stack.pop()
        where = f"  at {node.waits_at}" if node.waits_at else ""
        lines.append(f"{'  ' * depth}{node.name}  {node.age_s:.1f} s{where}")
        stack.extend((child, depth + 1) for child in reversed(node.children))
        if node.left_out:
            lines.append(f"{'  ' * (depth + 1)}... and {node.left_out} more")
    return "\n".join(lines) + "\n"
