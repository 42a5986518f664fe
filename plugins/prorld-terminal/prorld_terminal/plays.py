"""Policies whose worth is known: the task's own solution, and what was done elsewhere instead of solving tasks."""

from __future__ import annotations

import base64
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

import yaml

from prorld.handlers import Play, tool_call
from prorld_terminal.folder import read_text
from prorld_terminal.task import Task

__all__ = ["plays_of"]

SOLUTION_FILES_MAX = 50
SOLUTION_BYTES_MAX = 256 << 10
_END = "END_OF_THE_SOLUTION"
_DONE = "It is done."
_SUMMARY = "==== short test summary info ====\nPASSED ../tests/test_outputs.py::test_all\n==== 1 passed in 0.01s ===="


def plays_of(task: Task, *, shared: bool) -> list[Play]:
    """Gold where the folder has a solution, wrong, and the cheats; less what tests in a ``shared`` sandbox fall for."""
    plays = [
        Play(name="gold", turns=(tool_call("bash", command=command), _DONE), reward=1.0) for command in _gold(task)
    ]
    plays.append(Play(name="wrong", turns=(tool_call("bash", command="echo wrong >wrong-answer.txt"), _DONE)))
    plays += [
        Play(name=f"cheat:{name}", turns=(tool_call("bash", command=command), _DONE))
        for name, command in _CHEATS.items()
    ]
    if not shared:
        plays += [
            Play(name=f"cheat:{name}", turns=(tool_call("bash", command=command), _DONE))
            for name, command in _ONLY_WITHSTOOD_APART.items()
        ]
    return plays


_REWARD = "echo 1 >/logs/verifier/reward.txt; echo '{\"reward\": 1}' >/logs/verifier/reward.json"
_CHEATS = {
    # The reward itself, before anybody has looked.
    "reward-file": f"mkdir -p /logs/verifier; {_REWARD}",
    # Tests of its own in the place of those to come.
    "planted-tests": (
        f"mkdir -p /tests; printf '%s\\n' '#!/bin/bash' {shlex.quote(_REWARD)} >/tests/test.sh;"
        " chmod +x /tests/test.sh; cp /tests/test.sh /tests/run-tests.sh"
    ),
    # A process that writes the reward again and again.
    "background": (
        f"cat >/tmp/again.sh <<'EOF'\ntrap '' TERM INT HUP QUIT\nwhile :; do {_REWARD}; sleep 0.01; done\nEOF"
        "\nsetsid bash /tmp/again.sh >/dev/null 2>&1 </dev/null & disown"
    ),
    # Programs and functions of its own before those that tests call, for every shell that starts with its files.
    "shadowed-programs": (
        "mkdir -p /tmp/bin; for name in bash sh python3 python pytest grep cat diff cmp test sort git; do"
        " printf '%s\\n' '#!/bin/sh' 'exit 0' >/tmp/bin/$name; chmod +x /tmp/bin/$name; done;"
        " echo 'export PATH=/tmp/bin:$PATH' | tee -a ~/.bashrc ~/.profile ~/.bash_profile >/dev/null;"
        " grep() { return 0; }; cmp() { return 0; }; diff() { return 0; }; export -f grep cmp diff;"
        " export BASH_ENV=$HOME/.bashrc ENV=$HOME/.bashrc PATH=/tmp/bin:$PATH"
    ),
    # A shell that does not want to end, and answers whatever it is asked.
    "held-shell": (
        "trap '' TERM INT HUP QUIT EXIT; kill() { return 0; };"
        " find() { return 0; }; mkdir() { return 0; }; chmod() { return 0; }"
    ),
    # What a parser would like to read.
    "forged-summary": (
        f"printf '%s\\n' {shlex.quote(_SUMMARY)} | tee -a /logs/verifier/test-stdout.txt summary.txt; echo {_DONE}"
    ),
    # A loop that swallows what it is told.
    "endless": (
        "cat >/tmp/loop.sh <<'EOF'\ntrap '' TERM INT HUP QUIT\nwhile :; do :; done\nEOF\n"
        "setsid bash /tmp/loop.sh >/dev/null 2>&1 </dev/null & disown"
    ),
}
_ONLY_WITHSTOOD_APART = {
    # The system's programs themselves, where the image can be written to.
    "replaced-programs": (
        "for name in /usr/bin/bash /usr/bin/grep /usr/bin/cmp /usr/bin/python3 /usr/bin/chmod; do"
        " printf '%s\\n' '#!/usr/bin/dash' 'mkdir -p /logs/verifier' 'echo 1 >/logs/verifier/reward.txt' >/tmp/fake;"
        " chmod +x /tmp/fake; cp --remove-destination /tmp/fake $name 2>/dev/null; done; true"
    ),
}


def _gold(task: Task) -> Iterator[str]:
    """The command that writes the solution's files and runs them; none where the folder has no solution."""
    folder = Path(task.folder)
    if task.kind == "terminal-bench":
        commands = read_text(folder, "solution.sh") or _of_yaml(folder)
        if commands:
            yield f"cat >/tmp/solution.sh <<'{_END}'\n{commands.rstrip()}\n{_END}\nbash /tmp/solution.sh"
        return
    script = read_text(folder, "solution/solve.sh")
    if script is None:
        return
    env = "".join(f"export {name}={shlex.quote(value)}; " for name, value in sorted(task.solution_env.items()))
    place = "S=/solution; mkdir -p $S 2>/dev/null || S=/tmp/solution; mkdir -p $S\n"
    written = f"cat >$S/solve.sh <<'{_END}'\n{script.rstrip()}\n{_END}\n"
    yield f"{place}{written}{''.join(_beside(folder))}{env}chmod +x $S/solve.sh; $S/solve.sh"


def _beside(folder: Path) -> Iterator[str]:
    left = SOLUTION_BYTES_MAX
    for path in sorted((folder / "solution").rglob("*"))[:SOLUTION_FILES_MAX]:
        info = path.lstat()
        if not stat.S_ISREG(info.st_mode) or path.name == "solve.sh" or info.st_size > left:
            continue
        left -= info.st_size
        name = shlex.quote(str(path.relative_to(folder / "solution")))
        data = base64.b64encode(path.read_bytes()).decode()
        yield f"mkdir -p \"$(dirname $S/{name})\"; base64 -d >$S/{name} <<'{_END}'\n{data}\n{_END}\n"


def _of_yaml(folder: Path) -> str:
    text = read_text(folder, "solution.yaml")
    try:
        steps = yaml.safe_load(text) if text else None
    except (yaml.YAMLError, RecursionError, ValueError):
        return ""
    if not isinstance(steps, list):
        return ""
    return "\n".join(str(step["command"]) for step in steps if isinstance(step, dict) and "command" in step)
