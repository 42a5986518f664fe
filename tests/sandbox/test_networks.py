"""Networks: none, the one socket of the daemon, or the host's own where the operator allows it."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import trio

from prorld.errors import SandboxError
from prorld.sandbox.bubblewrap import Bubblewrap
from prorld.sandbox.contract import SandboxSpec
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.wall import Wall
from prorld.sandbox.warden_client import Warden
from prorld.testing.sandbox_contract import open_sandbox
from tests.sandbox.support import BOOT_ID

_CONNECT = (
    "import os, socket\n"
    "s = socket.socket(socket.AF_UNIX); s.connect(os.environ['PRORLD_SOCKET']); s.sendall(b'ask')\n"
    "print(s.recv(10).decode())"
)


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A directory for one socket that the sandboxes' user may reach."""
    place = Path(tempfile.mkdtemp(prefix="prorld-socket-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


def _runtime(wall: Wall, warden: Warden, runtime_dir: Path) -> Runtime:
    return Runtime(wall, warden, runtime_dir=runtime_dir, boot_id=BOOT_ID)


@pytest.mark.parametrize("network", ["daemon", "host"])
async def test_not_without_the_operator(network: Literal["daemon", "host"], runtime: Runtime) -> None:
    """A network that the operator has not given is refused, for good, and named."""
    with pytest.RaisesGroup(pytest.RaisesExc(SandboxError, match=r"sandbox\.(socket_dir|host_network)")):
        async with open_sandbox(runtime, SandboxSpec(network=network)):
            pytest.fail("it was made")


async def test_the_daemons_socket_and_nothing_else(warden: Warden, runtime_dir: Path, socket_dir: Path) -> None:
    """A sandbox reaches the socket, can't put another in its place, and has no other network."""
    async with trio.open_nursery() as nursery:
        listener = trio.socket.socket(socket.AF_UNIX)
        with listener:
            await listener.bind(str(socket_dir / "daemon.sock"))
            (socket_dir / "daemon.sock").chmod(0o666)
            listener.listen()

            async def answer() -> None:
                peer, _ = await listener.accept()
                with peer:
                    assert await peer.recv(10) == b"ask"
                    await peer.send(b"answer")

            nursery.start_soon(answer)
            runtime = _runtime(Bubblewrap(socket_dir=socket_dir), warden, runtime_dir)
            async with open_sandbox(runtime, SandboxSpec(network="daemon")) as sandbox:
                assert (await sandbox.python(_CONNECT)).text == "answer\n"
                squat = "rm $PRORLD_SOCKET; touch /run/prorld/other; mv $PRORLD_SOCKET /run/prorld/moved"
                assert (await sandbox.bash(squat)).exit_code != 0
                assert (await sandbox.bash("grep -vc lo: /proc/net/dev")).output == b"2\n"  # the two lines of its head
    assert os.listdir(socket_dir) == ["daemon.sock"]  # noqa: PTH208 - nothing waits for it


async def test_the_hosts_own(warden: Warden, runtime_dir: Path) -> None:
    """Where it is allowed, and asked for, a sandbox talks to what listens on the host; its sessions do, too."""
    listener = socket.create_server(("127.0.0.1", 0))
    with listener:
        listen = f"exec 3<>/dev/tcp/127.0.0.1/{listener.getsockname()[1]} && echo through"
        runtime = _runtime(Bubblewrap(host_network=True), warden, runtime_dir)
        async with open_sandbox(runtime, SandboxSpec(network="host")) as sandbox:
            assert (await sandbox.bash(listen)).output == b"through\n"
        async with open_sandbox(runtime) as sandbox:
            assert (await sandbox.bash(listen)).exit_code != 0
