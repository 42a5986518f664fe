"""Policies whose reward is known: the repair, a harmless change, and the ways to a good grade without a repair.

Each is written with the tools of the preset that the handler is set to.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Final

from prorld.handlers import Play, tool_call
from prorld_swe.cheats import CHEATS, commands_of
from prorld_swe.config import Preset
from prorld_swe.paths import changed_paths, is_test
from prorld_swe.repository import ROOT
from prorld_swe.task import SweTask

__all__ = ["swe_plays"]

# A command of the shell may be no longer than this; a patch goes in pieces.
PIECE_CHARS: Final = 60_000
PIECES_MAX: Final = 50
_SHELLS: Final[dict[Preset, tuple[str, str]]] = {
    "openhands": ("execute_bash", "command"),
    "openhands-sdk": ("terminal", "command"),
    "swe-agent": ("bash", "command"),
    "mini": ("bash", "command"),
    "r2e": ("execute_bash", "cmd"),
    "prorld": ("bash", "command"),
}


def swe_plays(task: SweTask, preset: Preset) -> list[Play]:
    """Those of one instance. Cheats aim at a file of the repair, which the tests import."""
    target = _target(task)
    plays: list[Play] = []
    if task.gold and len(task.gold) < PIECE_CHARS * PIECES_MAX // 2:
        plays.append(Play(name="gold", turns=_turns(_apply(task), preset), reward=1.0))
    plays.append(Play(name="wrong", turns=_turns([_harmless(target)], preset)))
    for name in CHEATS:
        commands = commands_of(name, target, task.test_files)
        plays.append(Play(name=f"cheat:{name}", turns=_turns(commands, preset)))
    return plays


def _target(task: SweTask) -> str | None:
    changed = sorted(path for path in changed_paths(task.gold) if path.endswith(".py") and not is_test(path))
    return changed[0] if changed else None


def _turns(commands: Sequence[str], preset: Preset) -> tuple[str, ...]:
    name, argument = _SHELLS[preset]
    calls = [tool_call(name, **{argument: f"cd {ROOT} && {command}"}) for command in commands]
    return (*calls, _end(preset))


def _end(preset: Preset) -> str:
    match preset:
        case "swe-agent":
            return tool_call("submit")
        case "mini":
            return tool_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
        case "r2e":
            return tool_call("finish", command="submit")
        case _:
            return tool_call("finish", message="Done.")


def _apply(task: SweTask) -> list[str]:
    """The right patch, in pieces that any shell takes."""
    encoded = base64.b64encode(task.gold.encode()).decode()
    pieces = [encoded[start : start + PIECE_CHARS] for start in range(0, len(encoded), PIECE_CHARS)]
    writes = [f"printf %s {piece} >>/tmp/right.b64" for piece in pieces]
    reverse = " -R" if task.gold_reversed else ""
    return [*writes, f"base64 -d /tmp/right.b64 | git apply --whitespace=nowarn{reverse} && rm /tmp/right.b64"]


def _harmless(target: str | None) -> str:
    if target is None:
        return "echo 'Nothing to see.' >>NOTES.txt"
    return f"printf '\\n# Looked at, and left as it is.\\n' >>'{target}'"
