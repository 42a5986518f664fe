"""The memory of a whole sandbox: what is counted, and what happens over the limit."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from prorld.errors import SandboxError, leaves
from prorld.sandbox.contract import SandboxLimits, SandboxSpec
from prorld.sandbox.memory import SURE_LOOKS, Gauge, held_bytes, process_tree, resident_bytes, unlinked_bytes
from prorld.sandbox.runtime import Runtime
from prorld.testing.sandbox_contract import open_sandbox

LIMIT = 256 << 20
SPEC = SandboxSpec(limits=SandboxLimits(memory_bytes=LIMIT))

BOMBS = {
    "shared": (
        "import mmap, time\n"
        "m = mmap.mmap(-1, 400 << 20)\n"
        "for _ in range(400): m.write(b'x' * (1 << 20))\n"
        "time.sleep(20)"
    ),
    "many processes": (
        "import os, time\n"
        "for _ in range(3):\n"
        "  if not os.fork():\n"
        "    x = b'x' * (120 << 20)\n"
        "    time.sleep(20)\n"
        "time.sleep(20)"
    ),
    "first threads that have ended": (
        "import ctypes, os, threading, time\n"
        "def hold(): time.sleep(0.5); x = b'x' * (120 << 20); time.sleep(20)\n"
        "for _ in range(3):\n"
        "  if not os.fork():\n"
        "    threading.Thread(target=hold).start()\n"
        "    ctypes.CDLL(None).pthread_exit(None)\n"
        "time.sleep(20)"
    ),
    "files": ("import time\nfor name in ('/tmp/f', 'f'): open(name, 'wb').write(b'x' * (150 << 20))\ntime.sleep(20)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
async def test_over_the_limit(runtime: Runtime, bomb: str) -> None:
    """A sandbox that holds too much is ended with a reason, for its owner and for its user; its neighbour goes on."""
    said: list[SandboxError] = []
    async with open_sandbox(runtime, sandbox_id="neighbour") as neighbour:
        with trio.fail_after(15):
            try:
                async with open_sandbox(runtime, SPEC) as sandbox:
                    try:
                        await sandbox.python(bomb, limit_s=30)
                    except SandboxError as exc:
                        said.append(exc)
                    await trio.sleep_forever()
            except* SandboxError as group:
                said += [exc for exc in leaves(group) if isinstance(exc, SandboxError)]
        assert (await neighbour.bash("echo on")).output == b"on\n"
    assert {exc.stable_code for exc in said} == {"sandbox_out_of_memory"}
    assert not any(exc.may_retry for exc in said)


@pytest.mark.slow
async def test_shared_pages_count_once(runtime: Runtime) -> None:
    """Processes that share what they hold, by a fork or by a file of the scratch, are no reason to end a sandbox."""
    async with open_sandbox(runtime, SPEC) as sandbox:
        result = await sandbox.python(
            "import mmap, os, time\n"
            "x = b'x' * (80 << 20)\n"
            "open('f', 'wb').write(b'x' * (80 << 20))\n"
            "f = open('f', 'rb')\n"
            "m = mmap.mmap(f.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)\n"
            "for _ in range(5):\n"
            "  if not os.fork():\n"
            "    m.find(b'y'); time.sleep(2.5); os._exit(0)\n"
            "while True:\n"
            "  try: os.wait()\n"
            "  except ChildProcessError: break",
            limit_s=20,
        )
        assert (result.exit_code, result.restarted) == (0, False), result.text


def test_what_is_held() -> None:
    """The exact count is below the quick one, which counts what is shared for each process."""
    with subprocess.Popen(
        [sys.executable, "-c", "x = b'x' * (30 << 20); print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        quick = Gauge([]).look([process.pid])
        exact = held_bytes([process.pid], [])
        process.communicate(b"\n")
    assert quick is not None
    assert 30 << 20 <= exact <= quick < 200 << 20


def test_processes_that_are_gone_count_nothing() -> None:
    """A process that ends while it is looked at is no error."""
    with subprocess.Popen(["/bin/true"]) as process:
        process.wait()
    assert held_bytes([process.pid], ["/tmp"]) == 0
    assert process_tree([process.pid]) == [process.pid]
    assert resident_bytes([process.pid]) == 0
    assert resident_bytes([os.getpid()]) > 1 << 20


def test_a_look_is_short() -> None:
    """What has many threads is not walked on the way."""
    code = (
        "import threading, time\n"
        "for _ in range(40): threading.Thread(target=time.sleep, args=(100,), daemon=True).start()\n"
        "print(flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        few = Gauge([]).look([process.pid])
        exact = held_bytes([process.pid], [])
        process.communicate(b"\n")
    assert few is None
    assert exact > 1 << 20


WAITS = "import os, sys, threading\nkept, SIZE = [], 30 << 20\nfor line in sys.stdin: exec(line); print(flush=True)\n"


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs what it is told, and nothing in between."""
    with subprocess.Popen([sys.executable, "-c", WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def tell(process: subprocess.Popen[bytes], line: str) -> None:
    """Have a line run, and see to it that the process waits again."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line.encode() + b"\n")
    process.stdin.flush()
    process.stdout.readline()


def looked(gauge: Gauge, pid: int) -> int:
    """What a gauge says when nothing has run for several looks."""
    for _ in range(4):
        gauge.look([pid])
        time.sleep(0.05)
    held = gauge.look([pid])
    assert held is not None
    return held


@pytest.mark.parametrize(
    "line",
    [
        "kept.append(b'x' * SIZE)",
        "r, w = os.pipe(); os.fork() or (kept.append(b'x' * SIZE), os.write(w, b'.'), os.read(0, 1)); os.read(r, 1)",
        "t = threading.Thread(target=lambda: kept.append(b'x' * SIZE)); t.start(); t.join()",
    ],
    ids=["itself", "a child", "a thread"],
)
def test_what_has_run_is_looked_at_again(waiting: subprocess.Popen[bytes], line: str) -> None:
    """However long nothing has changed, what is taken then is seen by the next look."""
    tell(waiting, "pass")
    gauge = Gauge([])
    before = looked(gauge, waiting.pid)
    tell(waiting, line)
    after = gauge.look([waiting.pid])
    assert after is not None
    assert after - before > 25 << 20
    assert looked(gauge, waiting.pid) - before > 25 << 20


@contextmanager
def written_by_somebody_else() -> Iterator[None]:
    """More in a directory that counts, by nobody whom the gauge could see run."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(b"x" * (64 << 20))
        file.flush()
        yield


def test_what_rests_is_not_looked_at_again(waiting: subprocess.Popen[bytes]) -> None:
    """What somebody else has written there shows once the gauge is told that there was somebody."""
    tell(waiting, "pass")
    gauge = Gauge(["/dev/shm"])
    before = looked(gauge, waiting.pid)
    with written_by_somebody_else():
        assert gauge.look([waiting.pid]) == before
        gauge.forget()
        after = gauge.look([waiting.pid])
    assert after is not None
    assert after - before > 32 << 20


def test_a_process_whose_first_thread_has_ended_holds_what_it_holds(tmp_path: Path) -> None:
    """Nothing is said of its memory, nor of its open files, under its own number."""
    code = (
        "import ctypes, sys, tempfile, threading\n"
        "def hold():\n"
        "  while open('/proc/self/stat').read().rpartition(')')[2].split()[0] != 'Z': pass\n"
        "  kept = b'x' * (30 << 20)\n"
        "  file = tempfile.TemporaryFile(dir=sys.argv[1])\n"
        "  file.write(kept); file.flush()\n"
        "  print(flush=True); sys.stdin.read()\n"
        "threading.Thread(target=hold).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        quick = Gauge([]).look([process.pid])
        exact = held_bytes([process.pid], [])
        unlinked = unlinked_bytes([process.pid], [], stop_at=1 << 40)
        process.kill()
    assert quick is not None
    assert 30 << 20 <= exact <= quick < 200 << 20
    assert unlinked >= 30 << 20


def test_what_rests_for_long_is_looked_at_in_any_case(waiting: subprocess.Popen[bytes]) -> None:
    """The kernel gives huge pages to those that sleep; a file that somebody else writes stands for that here."""
    tell(waiting, "pass")
    gauge = Gauge(["/dev/shm"])
    before = looked(gauge, waiting.pid)
    with written_by_somebody_else():
        seen = [gauge.look([waiting.pid]) for _ in range(SURE_LOOKS + 1)]
    assert seen[0] == before
    assert seen[-1] is not None
    assert seen[-1] - before > 32 << 20
