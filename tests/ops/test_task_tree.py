"""The tree of tasks shows everybody, in order, with ages, within a bound."""

from __future__ import annotations

import trio
import trio.testing

from prorld.ops.task_tree import TaskAges, format_tree, task_tree
from prorld.wire.ops import TaskNode, TaskTree


def names(node: TaskNode) -> dict:
    """The tree by names alone."""
    return {child.name: names(child) for child in node.children}


async def parent() -> None:
    async with trio.open_nursery() as nursery:
        for name in ("b", "a"):
            nursery.start_soon(trio.sleep_forever, name=name)
        await trio.sleep_forever()


async def test_tasks_are_shown_below_who_started_them(autojump_clock: trio.testing.MockClock) -> None:
    """Names, who started whom, ages since birth, and the line in which each waits."""
    ages = TaskAges()
    trio.lowlevel.add_instrument(ages)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(parent, name="parent")
        await trio.sleep(5)
        nursery.start_soon(trio.sleep_forever, name="young")
        await trio.testing.wait_all_tasks_blocked()
        tree = task_tree(ages, root=trio.lowlevel.current_task())
        assert names(tree.root) == {"parent": {"a": {}, "b": {}}, "young": {}}
        old, young = tree.root.children
        assert (old.age_s, young.age_s) == (5.0, 0.0)
        assert "ops/test_task_tree.py" in old.waits_at
        assert "parent" in old.waits_at
        nursery.cancel_scope.cancel()
    trio.lowlevel.remove_instrument(ages)
    assert task_tree(ages, root=trio.lowlevel.current_task()).root.children == []


async def test_too_many_tasks_are_counted_and_left_out() -> None:
    """The bound holds over the whole tree, and the outer tasks win."""
    ages = TaskAges()
    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(parent, name=f"p{number}")
        await trio.testing.wait_all_tasks_blocked()
        tree = task_tree(ages, root=trio.lowlevel.current_task(), shown_max=5)
        assert names(tree.root) == {"p0": {"a": {}}, "p1": {}, "p2": {}}
        assert [child.left_out for child in tree.root.children] == [1, 2, 2]
        nursery.cancel_scope.cancel()


async def test_the_whole_tree_is_there_without_a_root() -> None:
    """By default it starts with trio's own root, and counts every living task."""
    tree = task_tree(TaskAges())
    assert tree.tasks == trio.lowlevel.current_statistics().tasks_living
    assert tree.root.children


def test_the_text_has_a_line_for_each_task() -> None:
    """Indentation says who started whom; what was left out is said."""
    leaf = TaskNode(name="leaf", age_s=0.25, waits_at="kit/gate.py:7 Gate.enter")
    middle = TaskNode(name="middle", age_s=2.0, waits_at="", children=[leaf], left_out=7)
    other = TaskNode(name="other", age_s=1.0, waits_at="")
    tree = TaskTree(tasks=11, root=TaskNode(name="root", age_s=3.0, waits_at="", children=[middle, other]))
    assert format_tree(tree).splitlines() == [
        "11 tasks",
        "root  3.0 s",
        "  middle  2.0 s",
        "    ... and 7 more",
        "    leaf  0.2 s  at kit/gate.py:7 Gate.enter",
        "  other  1.0 s",
    ]
