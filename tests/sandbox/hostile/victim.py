"""Somebody on the host who has a secret in every place that a policy might look for one.

It runs as the user that sandboxes run as, so that nothing but the wall keeps a policy from it. ``host_run`` runs an
attack beside it, without a wall: the control.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prorld.sandbox.warden_client import NOBODY

__all__ = ["Victim", "as_ordinary_user", "host_run", "victim"]

HOST_SECONDS = 20.0
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"

_VICTIM = r"""
import ctypes, json, os, pty, select, signal, socket, sys
home, secret = os.environ["HOME"], os.environ["SECRET"].encode()
def write(name, mode=0o600):
    path = os.path.join(home, name)
    with open(path, "wb") as file: file.write(secret)
    os.chmod(path, mode)
os.mkdir(home + "/state", 0o700)
for name in ("secret", "state/token", "state/endpoint.json"): write(name)
os.chdir(home)
shared = "/dev/shm/victim-%d" % os.getpid()
with open(shared, "wb") as file: file.write(secret)
os.chmod(shared, 0o600)
gone = os.open(home + "/gone", os.O_CREAT | os.O_RDWR, 0o600)
os.write(gone, secret); os.unlink(home + "/gone")
servers = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
abstract = "victim-%d" % os.getpid()
servers[1].bind("\0" + abstract); servers[2].bind(home + "/socket")
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); datagrams.bind(("127.0.0.1", 0))
for server in servers: server.listen()
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
segment = libc.shmget(0x50520000 + os.getpid() % 65536, 4096, 0o1600)
ctypes.memmove(libc.shmat(segment, None, 0), secret, len(secret))
if os.uname().machine == "x86_64": libc.syscall(248, b"user", b"victim-%d" % os.getpid(), secret, len(secret), -4)
master, slave = os.openpty()
os.set_blocking(master, False)
signal.signal(signal.SIGUSR1, lambda *_: open(home + "/hit", "w").close())
print(json.dumps(dict(pid=os.getpid(), port=servers[0].getsockname()[1], datagrams=datagrams.getsockname()[1],
    abstract=abstract, shared=shared, gone=gone, segment=0x50520000 + os.getpid() % 65536,
    key="victim-%d" % os.getpid(), terminal=os.ttyname(slave), home=home)), flush=True)
while True:
    ready, _, _ = select.select([*servers, datagrams, master, sys.stdin], [], [])
    if sys.stdin in ready: break
    for server in servers:
        if server in ready:
            answer, _ = server.accept(); answer.sendall(secret); answer.close()
    if datagrams in ready: datagrams.recv(99); open(home + "/hit", "w").close()
    if master in ready: os.read(master, 99); open(home + "/hit", "w").close()
os.unlink(shared)
libc.shmctl(segment, 0, None)
"""


@dataclass(kw_only=True)
class Victim:
    """``aims`` is all that an attacker may know: where everything is. The secret is not among it."""

    process: subprocess.Popen[bytes]
    secret: str
    home: Path
    aims: dict[str, Any]

    def was_hit(self) -> bool:
        """Whether something reached it since this was last asked."""
        hit = self.home / "hit"
        was = hit.exists()
        hit.unlink(missing_ok=True)
        return was or self.process.poll() is not None


def as_ordinary_user() -> dict[str, Any]:
    """What makes a process run as the user of sandboxes."""
    return {"user": NOBODY[0], "group": NOBODY[1], "extra_groups": []} if os.getuid() == 0 else {}


def host_python() -> str:
    """The system's own interpreter, which any user can run."""
    found = shutil.which("python3", path=PATH)
    if found is None:
        pytest.skip("the host has no python3 of its own to attack with")
    return found


@contextmanager
def victim() -> Iterator[Victim]:
    """A victim for the length of a block."""
    home = Path(tempfile.mkdtemp(prefix="prorld-victim-"))
    if os.getuid() == 0:
        os.chown(home, *NOBODY)
    secret = secrets.token_hex(16)
    process = subprocess.Popen(
        [host_python(), "-c", _VICTIM],
        env={"HOME": str(home), "SECRET": secret, "PATH": PATH},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        **as_ordinary_user(),
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            ready, _, _ = select.select([process.stdout], [], [], HOST_SECONDS)
            assert ready, "the victim did not come up"
            yield Victim(process=process, secret=secret, home=home, aims=json.loads(process.stdout.readline()))
        finally:
            process.stdin.close()
            try:
                process.wait(HOST_SECONDS)
            finally:
                process.kill()
                shutil.rmtree(home)


def host_run(program: str, *, pass_fds: tuple[int, ...] = ()) -> str:
    """Run an attack on the host, as the user of sandboxes, and return what it said."""
    done = subprocess.run(
        [host_python(), "-c", program],
        env={"PATH": PATH, "HOME": "/"},
        cwd="/",
        capture_output=True,
        timeout=HOST_SECONDS,
        check=False,
        pass_fds=pass_fds,
        **as_ordinary_user(),
    )
    return (done.stdout + done.stderr).decode("utf-8", "replace")
