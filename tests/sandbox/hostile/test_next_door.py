"""Sandboxes of one user against each other, and against what holds them up: files, environments, sockets, ends."""

from __future__ import annotations

import json
import secrets
from contextlib import suppress

import pytest
import trio

from prorld.errors import SandboxError
from prorld.sandbox.contract import SandboxRuntime
from prorld.testing.sandbox_contract import open_sandbox
from tests.sandbox.hostile.victim import host_run
from tests.sandbox.support import children, descendants
from tests.sandbox.walls import Wall, wall_parameters

pytestmark = pytest.mark.slow

LOOK = """
for pid in {pids}:
    for name in ("root/work/secret", "environ", "cwd/secret"):
        try: print(open("/proc/%d/%s" % (pid, name), "rb").read(65536).decode("latin-1"))
        except OSError: pass
"""
# pidfd_open and pidfd_getfd have one number everywhere.
STEAL = """
for my $pid (@{{ {pids} }}) {{ my $held = syscall(434, $pid, 0); next if $held < 0;
  for my $n (9, 64 .. 80) {{ my $fd = syscall(438, $held, $n, 0); next if $fd < 0;
    print "SOCKET\\n" if readlink("/proc/self/fd/$fd") =~ /^socket/; }} }}
"""
# Takes the first process's control socket and shuts it.
SHUT = (
    'perl -e \'my $fd = syscall(438, syscall(434, 1, 0), 9, 0); die "refused\\n" if $fd < 0; '
    'open(my $s, "+<&=", $fd) or die "no\\n"; shutdown($s, 2) or die "kept\\n"; print "shut\\n"\''
)


@pytest.fixture(params=wall_parameters(isolating=True))
def wall(request: pytest.FixtureRequest) -> Wall:
    """The walls that keep sandboxes apart."""
    given: Wall = request.param
    return given


def _as_program(perl: str) -> str:
    return f"import subprocess; print(subprocess.run(['perl', '-e', {perl!r}], stdout=-1).stdout.decode())"


async def test_a_neighbour_and_the_warden(wall: Wall, runtime: SandboxRuntime) -> None:
    """Neither a neighbour's files nor its environment nor anybody's sockets can be had; on the host all can."""
    secret = secrets.token_hex(16)
    async with (
        open_sandbox(runtime, wall.spec(env={"SECRET": secret}), sandbox_id="neighbour") as neighbour,
        open_sandbox(runtime, wall.spec(), sandbox_id="attacker") as attacker,
    ):
        await neighbour.write_file("secret", secret.encode())
        own = {int(word) for word in (await attacker.bash("ls /proc")).text.split() if word.isdigit()}
        pids = json.dumps(sorted({pid for warden in children() for pid in {warden, *descendants(warden)}} - own))
        for program, word in ((LOOK.format(pids=pids), secret), (_as_program(STEAL.format(pids=pids)), "SOCKET")):
            assert word in host_run(program), "the control failed"
            await attacker.write_file("attack.py", program.encode())
            result = await attacker.bash("python3 attack.py", limit_s=10)
            assert word not in result.text
            assert result.exit_code == 0, result.text
        assert (await neighbour.bash("cat secret")).text == secret


async def test_a_policy_can_end_nothing_but_its_own_sandbox(wall: Wall, runtime: SandboxRuntime) -> None:
    """Whoever takes his own first process away hears that the sandbox is gone; his neighbour hears nothing."""
    async with open_sandbox(runtime, wall.spec(), sandbox_id="neighbour") as neighbour:
        said = None
        try:
            async with open_sandbox(runtime, wall.spec(), sandbox_id="attacker") as attacker:
                with suppress(SandboxError), trio.fail_after(5):
                    while b"shut" in (await attacker.bash(SHUT)).output:
                        await attacker.bash("sleep 0.05")
        except* SandboxError as group:
            said = str(group.exceptions[0])
        assert said is None or "ended by itself" in said
        assert (await neighbour.bash("echo on")).output == b"on\n"
        async with open_sandbox(runtime, wall.spec(), sandbox_id="next") as fresh:
            assert (await fresh.bash("echo on")).output == b"on\n"
