"""Attacks on the host from behind the wall. Each is shown to work beside it first: where nothing is in its way."""

from __future__ import annotations

import re

import pytest

from prorld.sandbox.contract import Sandbox
from tests.sandbox.hostile.attacks import ATTACKS, Attack, program_of
from tests.sandbox.hostile.victim import Victim, host_run, victim
from tests.sandbox.walls import Wall, wall_parameters

pytestmark = pytest.mark.slow

_THROUGH = re.compile(r"^THROUGH\b", re.MULTILINE)  # at the start of a line: a traceback quotes the program


@pytest.fixture(params=wall_parameters(isolating=True))
def wall(request: pytest.FixtureRequest) -> Wall:
    """The walls that promise to keep the host from a policy."""
    given: Wall = request.param
    return given


def _got_through(said: str, aim: Victim) -> bool:
    return aim.secret in said or _THROUGH.search(said) is not None or aim.was_hit()


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_attack(attack: Attack, sandbox: Sandbox) -> None:
    """What gets through on the host does not behind the wall."""
    with victim() as aim:
        program = program_of(attack, aim.aims)
        outside = host_run(program)
        if not _got_through(outside, aim):
            assert attack.host_may_refuse, f"the control failed: {outside}"
            pytest.skip(f"this host refuses it itself: {outside.strip()[-100:]}")
        await sandbox.write_file("attack.py", program.encode())
        result = await sandbox.bash("python3 attack.py 2>&1", limit_s=20)
        assert "TRIED" in result.text, result.text
        if "ModuleNotFoundError" in result.text:
            pytest.skip(f"the sandbox's Python lacks what it takes: {result.text.splitlines()[-1]}")
        assert not _got_through(result.text, aim), result.text
        assert not result.timed_out, result.text
