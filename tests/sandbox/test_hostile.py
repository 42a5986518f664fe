"""Sandboxes that attack the warden: all others go on."""

from __future__ import annotations

import os
import signal

import pytest
import trio

from prorld.errors import SandboxError
from prorld.sandbox import link
from prorld.sandbox.contract import Sandbox, SandboxLimits, SandboxSpec
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.warden_client import Warden
from prorld.testing.sandbox_contract import open_sandbox
from tests.sandbox.support import children

STOPPER = """python3 -c '
import os
while 1:
    try: os.kill(-1, 19)
    except Exception: pass
' & sleep 100"""

# Descriptors that are on their way in sockets and that nobody receives; counted for the user, over all sandboxes.
IN_FLIGHT = """
import array, socket
pairs = []
try:
    for _ in range(200):
        pairs.append(socket.socketpair())
        for _ in range(4):
            rights = array.array("i", [0] * 250)
            pairs[-1][0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
except OSError as exc:
    print(exc.errno)
"""

# A connection whose peer takes nothing, in a socket whose last holder has to wait for that, sent among the output.
LINGERING = """
import os, socket, struct, time
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
sender = socket.socket()
sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
sender.connect(listener.getsockname())
peer, _ = listener.accept()
sender.setblocking(False)
try:
    while True:
        sender.send(bytes(65536))
except BlockingIOError:
    pass
try:
    socket.send_fds(socket.socket(fileno=os.dup(1)), [b"sent\\n"], [sender.fileno()])
except OSError:
    print("refused")
sender.close()
time.sleep(100)
"""


@pytest.mark.slow
@pytest.mark.real
async def test_stopped_newcomers_stop_nobody_else(runtime: Runtime, warden: Warden) -> None:
    """A policy that stops every process it sees, newborn ones included, is held to its limit; others notice nothing."""
    ended = trio.Event()

    async def attack(sandbox: Sandbox) -> None:
        for _ in range(3):
            try:
                await sandbox.bash(STOPPER, limit_s=0.5)
            except SandboxError:
                continue
        ended.set()

    async with open_sandbox(runtime, sandbox_id="attacker") as attacker, open_sandbox(runtime) as victim:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(attack, attacker)
            number = 0
            while not ended.is_set():
                number += 1
                with trio.fail_after(2):
                    assert (await victim.bash("echo on")).output == b"on\n"
                    async with open_sandbox(runtime, sandbox_id=f"new{number}"):
                        await victim.write_file("file", b"x")
        assert number > 3
    assert warden.restarts_total == 0


async def test_descriptors_on_their_way(runtime: Runtime) -> None:
    """Whatever a sandbox has in its sockets, and whatever limit it asked for, another one can start."""
    spec = SandboxSpec(limits=SandboxLimits(open_files=1 << 20))
    async with open_sandbox(runtime, spec, sandbox_id="attacker") as attacker:
        assert (await attacker.python(IN_FLIGHT)).output == b"109\n"
        with trio.fail_after(5):
            async with open_sandbox(runtime) as sandbox:
                assert (await sandbox.bash("echo on")).output == b"on\n"


async def test_a_descriptor_that_is_slow_to_close(runtime: Runtime) -> None:
    """What a sandbox sends to the daemon among its output never holds up the loop."""
    async with open_sandbox(runtime) as sandbox:
        await sandbox.write_file("linger.py", LINGERING.encode())
        with trio.fail_after(20):  # the loop itself would stand still, and this would be seen when it goes on
            said = await sandbox.bash("python3 -u linger.py & sleep 0.5; echo on", limit_s=10)
            assert said.output.endswith((b"sent\non\n", b"refused\non\n"))
            assert (await sandbox.bash("echo on")).output == b"on\n"


async def test_a_child_that_can_not_be_handed_over(warden: Warden) -> None:
    """Where descriptors can't be sent, the request is refused, can be repeated, and nothing of the child is left."""
    (pid,) = children()
    own = await warden.spawn(["/usr/bin/python3", "-c", IN_FLIGHT + "\nimport time; time.sleep(100)"], env={})
    with trio.fail_after(5):
        assert await own.tty.receive_some(100)
        with pytest.raises(SandboxError, match="could not be sent") as caught:
            await warden.spawn(["/bin/sleep", "1000"], env={})
        assert caught.value.may_retry
        await own.end()
        while children(pid):  # noqa: ASYNC110 - the refused one goes by itself
            await trio.sleep(0.01)
        child = await warden.spawn(["/bin/true"], env={})
        assert await child.wait() == 0
        child.close()


@pytest.mark.slow
async def test_a_warden_that_does_not_answer(runtime: Runtime, warden: Warden, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed, whoever waited for it hears so, and another one takes over."""
    for name, seconds in (("SPAWN_SECONDS", 0.2), ("PING_SECONDS", 0.1), ("PONG_SECONDS", 0.4)):
        monkeypatch.setattr(link, name, seconds)
    (pid,) = children()
    os.kill(pid, signal.SIGSTOP)
    with trio.fail_after(20):
        with pytest.raises(SandboxError, match="did not answer"):
            await warden.spawn(["/bin/true"], env={})
        while warden.restarts_total < 1 or not warden.is_up:  # noqa: ASYNC110 - a process comes up
            await trio.sleep(0.01)
        assert children() != {pid}
        monkeypatch.undo()
        async with open_sandbox(runtime) as sandbox:
            assert (await sandbox.bash("echo on")).output == b"on\n"
