"""``prorld terminal``: look at trees of task folders, and write instances for the tasks in them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import trio

from prorld.errors import HandlerError
from prorld.handlers import Workshop
from prorld_terminal.environment import check_environment
from prorld_terminal.folder import digest_of
from prorld_terminal.handler import examples_dir
from prorld_terminal.instance import TerminalConfig
from prorld_terminal.task import Task, load_task

__all__ = ["SUMMARY", "add_arguments", "run", "task_folders"]

SUMMARY = "list tasks of Harbor and Terminal-Bench folders"
FOLDERS_MAX = 100_000
DEPTH_MAX = 8


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    data_source: str
    task_dir: str
    digest: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.description = "Walk directories for task folders, check each, and write one instance per task."
    parser.add_argument("action", choices=("list",), help="what to do")
    parser.add_argument("dirs", nargs="*", type=Path, metavar="DIR", help="trees of tasks; by default the examples")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write instances as JSON lines")
    parser.add_argument("--relative", action="store_true", help="name tasks below DIR, for the setting tasks_dir")
    parser.add_argument(
        "--run-steps", action="store_true", help="count tasks as usable whose RUN steps run in a sandbox"
    )


async def run(args: argparse.Namespace, workshop: Workshop) -> int:
    """Tell each task and what is wrong with those that can't be used; 1 where there was one."""
    rows: list[_Row] = []
    refused = 0
    config = TerminalConfig(run_steps=args.run_steps)
    for root in args.dirs or [examples_dir()]:
        for folder in await trio.to_thread.run_sync(_folders, root):
            workshop.progress(str(folder))
            try:
                task, digest = await trio.to_thread.run_sync(_looked_at, folder, config)
            except HandlerError as exc:
                refused += 1
                workshop.warn(f"{folder}: {exc.message}")
                continue
            name = str(folder.relative_to(root.resolve())) if args.relative else str(folder)
            source = "harbor" if task.kind == "harbor" else "terminal-bench"
            rows.append(_Row(data_source=source, task_dir=name, digest=digest))
            workshop.say(f"{task.name}  {task.kind}  {task.difficulty}  {task.image or _base(task)}")
    if args.output is not None:
        await trio.Path(args.output).write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    workshop.say(f"{len(rows)} tasks, {refused} folders that can't be used")
    return int(refused > 0 or not rows)


def task_folders(root: Path) -> Iterator[Path]:
    """The folders below a directory that hold a task, itself included, in order; links are not followed."""
    root = root.resolve()
    found = 0
    for place, directories, names in os.walk(root):
        if {"task.toml", "task.yaml"} & set(names):
            directories.clear()
            found += 1
            yield Path(place)
        elif len(Path(place).relative_to(root).parts) >= DEPTH_MAX or found >= FOLDERS_MAX:
            directories.clear()
        directories.sort()


def _folders(root: Path) -> list[Path]:
    return list(task_folders(root))


def _looked_at(folder: Path, config: TerminalConfig) -> tuple[Task, str]:
    task = load_task(folder)
    check_environment(task, config)
    return task, digest_of(folder)


def _base(task: Task) -> str:
    return f"on {task.recipe.base}" if task.recipe else "no image"
