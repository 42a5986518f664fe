"""Bombs, as data: those that meet a bound, which the host does not have, and those that a neighbour feels."""

from __future__ import annotations

from dataclasses import dataclass

from prorld.sandbox.contract import SandboxLimits

__all__ = ["BOMBS", "BOUNDS", "Bomb", "Bound"]


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A program that takes more and more of something, up to ``{most}``, and says how much it got.

    On the host it gets all of that; in a sandbox of these limits it gets less than ``bound``, which is less than that.
    """

    name: str
    program: str
    limits: SandboxLimits
    bound: int
    most: int


@dataclass(frozen=True, kw_only=True)
class Bomb:
    """A command that a sandbox runs while its neighbour is timed."""

    name: str
    command: str


_MIB = 1 << 20

BOUNDS = (
    Bound(
        name="processes",
        program="import os, time\n"
        "got = []\n"
        "try:\n"
        " while len(got) < {most}:\n"
        "  got.append(os.fork())\n"
        "  if not got[-1]: time.sleep(3); os._exit(0)\n"
        "except OSError: pass\n"
        "print(len(got))\n"
        "for pid in got: os.kill(pid, 9)",
        limits=SandboxLimits(processes=64),
        bound=64,
        most=100,
    ),
    Bound(
        name="threads",
        program="import threading, time\n"
        "got = 0\n"
        "try:\n"
        " while got < {most}: threading.Thread(target=time.sleep, args=(1,), daemon=True).start(); got += 1\n"
        "except RuntimeError: pass\n"
        "print(got, flush=True)\n"
        "import os; os._exit(0)",
        limits=SandboxLimits(processes=64),
        bound=64,
        most=100,
    ),
    Bound(
        name="memory",
        program="got = []\n"
        "try:\n"
        " while len(got) < {most}: got.append(bytearray(1 << 20))\n"
        "except MemoryError: pass\n"
        "print(len(got))",
        limits=SandboxLimits(memory_bytes=128 * _MIB),
        bound=128,
        most=160,
    ),
    Bound(
        name="descriptors",
        program="import os\n"
        "got = []\n"
        "try:\n"
        " while len(got) < {most}: got.append(os.dup(0))\n"
        "except OSError: pass\n"
        "print(len(got))",
        limits=SandboxLimits(open_files=128),
        bound=128,
        most=200,
    ),
    Bound(
        name="the size of a file",
        program="import os, signal, tempfile\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "file, got = tempfile.TemporaryFile(buffering=0), 0\n"
        "try:\n"
        " while got < {most} and file.write(bytes(1 << 16)) == 1 << 16: got += 1 << 16\n"
        "except OSError: pass\n"
        "print(got)",
        limits=SandboxLimits(file_bytes=_MIB),
        bound=_MIB + 1,
        most=2 * _MIB,
    ),
    Bound(
        name="scratch",
        program="import tempfile\n"
        "files, got = [], 0\n"
        "try:\n"
        " while got < {most}:\n"
        "  files.append(tempfile.TemporaryFile(buffering=0, dir='/tmp'))\n"
        "  for _ in range(16): got += files[-1].write(bytes(1 << 16))\n"
        "except OSError: pass\n"
        "print(got)",
        limits=SandboxLimits(scratch_bytes=4 * _MIB),
        bound=4 * _MIB + 1,
        most=8 * _MIB,
    ),
    Bound(
        name="shared memory",
        program="import tempfile\n"
        "file, got = tempfile.TemporaryFile(buffering=0, dir='/dev/shm'), 0\n"
        "try:\n"
        " while got < {most}: got += file.write(bytes(1 << 20))\n"
        "except OSError: pass\n"
        "print(got)",
        limits=SandboxLimits(),
        bound=64 * _MIB + 1,
        most=80 * _MIB,
    ),
)

BOMBS = (
    Bomb(name="busy processes", command="for i in {1..50}; do while :; do :; done & done; wait"),
    Bomb(name="a fork storm", command=":(){ :|:& };:; sleep 9"),
    Bomb(name="short processes", command="while :; do /bin/true & /bin/true; done"),
    Bomb(
        name="threads",
        command="python3 -c 'import threading\n"
        "def spin():\n"
        "  while 1: pass\n"
        "for _ in range(100): threading.Thread(target=spin).start()'",
    ),
    Bomb(
        name="memory, taken and given",
        command="for i in 1 2 3 4; do python3 -c 'while 1: bytearray(300 << 20)' & done; wait",
    ),
    Bomb(
        name="memory, until it is refused",
        command="python3 -c 'x = []\nwhile 1: x.append(bytearray(1 << 20))'; sleep 9",
    ),
    Bomb(
        name="scratch, filled over and over", command="cd /tmp; while :; do head -c 700000000 /dev/zero > f; rm f; done"
    ),
    Bomb(
        name="shared memory, filled over and over",
        command="while :; do head -c 80000000 /dev/zero > /dev/shm/f; rm /dev/shm/f; done 2>/dev/null",
    ),
    Bomb(name="many small files", command="mkdir m; cd m; i=0; while :; do : > $((i++)); done"),
    Bomb(name="output", command="yes"),
    Bomb(name="output of forty", command="for i in {1..40}; do yes & done; wait"),
    Bomb(name="marks", command="while :; do printf '\\0%s 0 /\\0\\0%s<\\0' x x; done"),
    Bomb(name="the terminal", command="cat /dev/zero > /dev/tty"),
    Bomb(name="descriptors", command="python3 -c 'import os\nwhile 1:\n try: os.dup(0)\n except OSError: pass'"),
    Bomb(
        name="descriptors on their way",
        command="python3 -c 'import array, socket\n"
        "a, b = socket.socketpair(); b.setblocking(0); a.setblocking(0)\n"
        'r = array.array("i", [0] * 200)\n'
        "while 1:\n"
        ' try: a.sendmsg([b"x"], [(1, 1, r)])\n'
        " except OSError: pass'",
    ),
    Bomb(name="namespaces in namespaces", command="while :; do unshare -Urm true 2>/dev/null & done"),
    Bomb(
        name="pipes",
        command="python3 -c 'import os\nwhile 1:\n"
        " try: w = os.pipe()[1]; os.set_blocking(w, 0); os.write(w, bytes(65536))\n"
        " except OSError: pass'",
    ),
    Bomb(name="stops of its own", command="while :; do (kill -STOP $BASHPID) & done"),
    Bomb(name="shells that die", command="exit 3"),
)
