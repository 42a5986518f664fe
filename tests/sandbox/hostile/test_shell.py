"""Hostile commands: the right result and the next command clean, or a restart that is noticed and said."""

from __future__ import annotations

import re
from typing import Any

import pytest
import trio

from prorld.sandbox.contract import CommandResult, Sandbox
from prorld.sandbox.session import TIMED_OUT
from tests.sandbox.hostile.shell_cases import TEXT_CASES, Case
from tests.sandbox.hostile.state_cases import STATE_CASES
from tests.sandbox.walls import Wall

pytestmark = pytest.mark.slow

CASES = (*TEXT_CASES, *STATE_CASES)
_SHELL = re.compile(rb"SHELL (\d+)$", re.MULTILINE)


def _parameters() -> list[Any]:
    return [
        pytest.param(
            case,
            id=case.name,
        )
        for case in CASES
    ]


def test_the_cases_are_many_and_have_names_of_their_own() -> None:
    """At least sixty, and none hides another."""
    assert len({case.name for case in CASES}) == len(CASES) >= 60


@pytest.mark.parametrize("case", _parameters())
async def test_command(case: Case, wall: Wall, sandbox: Sandbox) -> None:
    """A case gives what it should, what is said of restarts is true, and two commands later all is as ever."""
    if case.walled and not wall.isolates:
        pytest.skip("harms the host where there is no wall")
    if case.before:
        await sandbox.bash(case.before)
    first_shell = await _shell(sandbox)
    result = await sandbox.bash(case.command, limit_s=case.limit_s)
    _is_right(case, result)
    mended = await sandbox.bash(case.mend) if case.mend else result
    await trio.sleep(case.later_s)
    following = await sandbox.bash("echo RECOVERED", limit_s=1.0 if case.then in {"late", "any"} else 5.0)
    _is_as_told(case, following)
    last = await sandbox.bash("(exit 7)", limit_s=5)
    assert (last.exit_code, last.timed_out) == (7, False), last
    assert case.then == "any" or last.restarted == case.failures_kill, last
    told = any(each.restarted for each in (result, mended, following, last))
    last_shell = await _shell(sandbox)
    if first_shell and last_shell:
        assert (first_shell != last_shell) == told, "a restart that is not said, or said and not true"


def _is_right(case: Case, result: CommandResult) -> None:
    assert case.code in (None, result.exit_code), result
    assert case.output in (None, result.output), result
    assert case.has in result.output, result
    assert result.timed_out == case.timed_out, result
    assert case.restarted in (None, result.restarted), result
    assert result.duration_s < case.limit_s + 4, result


def _is_as_told(case: Case, following: CommandResult) -> None:
    said = (following.exit_code, following.output, following.timed_out, following.restarted)
    honest = {
        "clean": (0, case.after, False, False),
        "fresh": (0, b"RECOVERED\n", False, True),
        "late": (TIMED_OUT, b"", True, True),
    }
    assert said in (honest.values() if case.then == "any" else [honest[case.then]]), following


async def _shell(sandbox: Sandbox) -> bytes | None:
    """The shell's pid, where the shell still says what it is asked to."""
    found = _SHELL.search((await sandbox.bash('echo "SHELL $$"', limit_s=5)).output)
    return found and found[1]
