"""What a solution can't do in the grading sandbox, tried there; and what it still can, since good ones do it."""

from __future__ import annotations

import pytest

from prorld.sandbox.runtime import Runtime
from tests.tasks import code_support
from tests.tasks.code_support import block, check, function, graded, program, why

runtime, runtime_dir = code_support.runtime, code_support.runtime_dir

# Each of these has to fail. What succeeds is printed, and the test wants nothing printed but the end.
FORBIDDEN = """
import ctypes, mmap, os, resource, signal, socket, subprocess, threading
parent = os.getppid()
libc = ctypes.CDLL(None, use_errno=True)
def called(value):
    if value < 0:
        raise OSError(ctypes.get_errno(), "refused")
def call(number, *arguments):
    called(libc.syscall(number, *arguments))
def others():
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
def memory():
    found = []
    for pid in others():
        try:
            with open("/proc/%d/mem" % pid, "rb") as file:
                found.append(pid)
        except OSError:
            pass
    if parent in found:
        raise SystemExit("the memory of the parent can be read")
    raise OSError
attempts = {
    "fork": os.fork,
    "forkpty": os.forkpty,
    "vfork": lambda: call(58),
    "clone": lambda: call(56, 17, 0, 0, 0, 0),
    "clone3": lambda: call(435, bytes(88), 88),
    "spawn": lambda: subprocess.run(["true"]),
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "setsid": os.setsid,
    "setpgid": lambda: os.setpgid(0, 0),
    "kill the parent": lambda: os.kill(parent, signal.SIGKILL),
    "stop the parent": lambda: os.kill(parent, signal.SIGSTOP),
    "kill all": lambda: os.kill(-1, signal.SIGKILL),
    "kill the parent's group": lambda: os.killpg(os.getpgid(parent), signal.SIGKILL),
    "a thread of the parent": lambda: call(200, parent, 9),
    "queue a signal": lambda: call(129, parent, 9, bytes(128)),
    "pidfd": lambda: call(434, parent, 0),
    "own a pipe for the parent": lambda: __import__("fcntl").fcntl(0, 8, parent),
    "outlive the parent": lambda: called(libc.prctl(1, 0)),
    "limit the parent": lambda: resource.prlimit(parent, resource.RLIMIT_CPU, (0, 0)),
    "slow the parent down": lambda: os.setpriority(os.PRIO_PROCESS, parent, 19),
    "pin the parent": lambda: os.sched_setaffinity(parent, {0}),
    "ptrace": lambda: call(101, 16, parent, 0, 0),
    "process_vm_readv": lambda: call(310, parent, 0, 0, 0, 0, 0),
    "memory": memory,
    "environment of the parent": lambda: open("/proc/%d/environ" % parent).read(),
    "descriptors of the parent": lambda: os.listdir("/proc/%d/fd" % parent),
    "write": lambda: open("/tmp/x", "w"),
    "append": lambda: open("/work/x", "a"),
    "change": lambda: open("/tmp/prorld-code/runner.zip", "r+b"),
    "creat": lambda: call(85, b"/tmp/x", 0o600),
    "a file without a name": lambda: os.open("/tmp", os.O_TMPFILE | os.O_RDWR),
    "memfd": lambda: os.memfd_create("x"),
    "shm": lambda: open("/dev/shm/x", "w"),
    "mkdir": lambda: os.mkdir("/tmp/d"),
    "remove": lambda: os.unlink("/tmp/prorld-code/runner.zip"),
    "rename": lambda: os.rename("/tmp/prorld-code", "/tmp/other"),
    "link": lambda: os.link("/tmp/prorld-code/runner.zip", "/tmp/l"),
    "symlink": lambda: os.symlink("/etc", "/tmp/s"),
    "mkfifo": lambda: os.mkfifo("/tmp/f"),
    "chmod": lambda: os.chmod("/tmp/prorld-code", 0),
    "times": lambda: os.utime("/tmp/prorld-code/runner.zip"),
    "truncate": lambda: os.truncate("/tmp/prorld-code/runner.zip", 0),
    "grow the input": lambda: os.write(0, b"x"),
    "socket": socket.socket,
    "unix socket": lambda: socket.socket(socket.AF_UNIX),
    "shared memory": lambda: call(29, 0, 1 << 12, 0o1600),
    "message queue": lambda: call(68, 0, 0o1600),
    "io_uring": lambda: call(425, 8, bytes(120)),
    "unshare": lambda: call(272, 0x10000000),
}
for name, attempt in attempts.items():
    try:
        child = attempt()
        if "fork" in name and child == 0:
            os._exit(0)
    except (OSError, subprocess.SubprocessError, ValueError):
        continue
    except SystemExit as exc:
        print(exc)
    print(name, "is possible")
print("end of list", len(attempts) > 40)
"""

ALLOWED = """
import asyncio, atexit, collections, heapq, io, json, os, random, re, sys, tempfile, threading, time
sys.setrecursionlimit(10 ** 6)
threading.stack_size(1 << 27)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
def main():
    data = os.read(0, os.fstat(0).st_size)
    print(data.decode().strip(), depth(50000))
    print(open("/dev/stdin").readline().strip() in ("", data.decode().strip()))
    time.sleep(0.01)
thread = threading.Thread(target=main)
thread.start()
thread.join()
async def soon():
    await asyncio.sleep(0)
    return 3
print(asyncio.run(soon()), input.__name__, __name__, sys.argv[1:], os.getcwd(), len(os.environ) < 12)
atexit.register(lambda: os.write(1, b"at exit\\n"))
threading.Thread(target=lambda: (time.sleep(0.05), sys.stdout.write("a thread of its own\\n"))).start()
"""
# What is buffered comes last, as from any interpreter.
ALLOWED_OUTPUT = "at exit\n7 50000\nTrue\n3 input __main__ [] / True\na thread of its own\n"

# Finds what the tests hold without holding it itself.
SEARCH = r"""
import ctypes, os, re
# It may look into itself, too: nothing that it should not know was in its parent when that forked.
ctypes.CDLL(None).prctl(4, 1)
needle = re.compile(rb"NEE[D]LE-[0-9]{6}")
def search(data):
    return bool(needle.search(data))
def in_memory(pid):
    with open("/proc/%s/maps" % pid) as maps, open("/proc/%s/mem" % pid, "rb", 0) as memory:
        for line in maps:
            words = line.split()
            start, end = (int(word, 16) for word in words[0].split("-"))
            if "r" in words[1] and end - start < 1 << 26 and "[v" not in line:
                try:
                    memory.seek(start)
                    if search(memory.read(end - start)):
                        return True
                except (OSError, ValueError, OverflowError):
                    pass
    return False
def in_files():
    for top in ("/tmp", "/work", "/dev/shm"):
        for path, _, names in os.walk(top):
            for name in names:
                with open(os.path.join(path, name), "rb") as file:
                    if search(file.read()):
                        return True
    return False
def f(x):
    found = []
    if in_files():
        found.append("files")
    looked = 0
    for pid in [name for name in os.listdir("/proc") if name.isdigit()]:
        for part in ("environ", "cmdline"):
            try:
                with open("/proc/%s/%s" % (pid, part), "rb") as file:
                    if search(file.read()):
                        found.append(part)
            except OSError:
                pass
        try:
            if in_memory(pid):
                found.append("memory of " + pid)
            looked += 1
        except OSError:
            pass
    return [found, looked > 0]
"""


@pytest.mark.slow
async def test_what_a_solution_can_not_do(runtime: Runtime) -> None:
    """Start, signal, see, write: each attempt fails, and the rest of the program goes on."""
    run = await graded(runtime, program(("", "end of list True\n")), block(FORBIDDEN), test_s=10.0)
    assert run.grade.reward == 1.0, why(run)


@pytest.mark.slow
async def test_what_a_solution_can_do(runtime: Runtime) -> None:
    """Threads, deep recursion, the size of its input, an event loop, last words."""
    run = await graded(runtime, program(("7\n", ALLOWED_OUTPUT)), block(ALLOWED), test_s=10.0)
    assert run.grade.reward == 1.0, why(run)


@pytest.mark.slow
async def test_a_solution_does_not_find_the_tests(runtime: Runtime) -> None:
    """Not in files, environments or the memory of any process; the judge that waits for it holds them all the time."""
    instance = check("# NEEDLE-123456\nassert candidate('NEEDLE-654321'[:3]) == [[], True]")
    run = await graded(runtime, instance, block(SEARCH), test_s=20.0)
    assert run.grade.reward == 1.0, why(run)


@pytest.mark.slow
async def test_a_solution_would_find_what_it_is_given(runtime: Runtime) -> None:
    """The search itself works: an argument is in its memory."""
    instance = check("assert 'memory' in str(candidate('NEEDLE-654321'))")
    run = await graded(runtime, instance, block(SEARCH), test_s=20.0)
    assert run.grade.reward == 1.0, why(run)


@pytest.mark.slow
async def test_no_run_leaves_anything_to_the_next(runtime: Runtime) -> None:
    """Neither modules, nor files, nor processes, nor state: each says that it is the first."""
    source = """
import builtins, os, sys
seen = [name for name in ("mark", "fd") if hasattr(builtins, name)]
seen += [name for name in os.listdir("/tmp") if name not in ("home", "prorld-code")]
builtins.mark = builtins.fd = sys.modules["mark"] = 1
for path in ("/tmp/mark", "/tmp/home/mark", "/work/mark", "/dev/shm/mark"):
    try:
        open(path, "w")
    except OSError:
        pass
processes = [name for name in os.listdir("/proc") if name.isdigit()]
assert not seen and len(processes) < 12, (seen, processes)
print("first")
"""
    tests = [(str(number), "first\n") for number in range(5)]
    run = await graded(runtime, program(*tests), block(source))
    assert run.grade.reward == 1.0, str(run.events)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("while True: pass", "time"),
        ("import time\ntime.sleep(60)", "time"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "time"),
        ("import os\nos.close(1)\nos.close(2)\nwhile True: pass", "time"),
        ("import sys\nwhile True: sys.stderr.write('x' * 9999)", "time"),
        ("while True: print('x' * 9999)", "output"),
        ("x = bytearray(10 ** 12)", "crashed"),
        ("x = [bytes(4096) for _ in range(10 ** 5)]\nprint(len(x))", "memory"),
        ("import os\nos.abort()", "crashed"),
        ("import ctypes\nctypes.string_at(0)", "crashed"),
        ("raise SystemExit(3)", "crashed"),
        ("import sys\nsys.exit('no')", "crashed"),
        ("import os\nos.kill(os.getpid(), 9)", "crashed"),
        ("def f(n): return f(n + 1)\nf(0)", "crashed"),
        ("print(2)", "wrong"),
        ("print(1); print(1)", "wrong"),
        ("import sys\nsys.stdout = None\nprint(1)", "wrong"),
        ("import sys\nsys.stdout.close()", "wrong"),
        ("x = " + "(" * 5000, "it does not compile: SyntaxError: too many nested parentheses (solution.py, line 1)"),
        ("x = " + "-" * 100_000 + "1", "it does not compile: "),
    ],
)
async def test_how_a_program_fails(source: str, kind: str, runtime: Runtime) -> None:
    """Always as a failed test of the kind that it is, never as an error."""
    run = await graded(runtime, program(("", "1\n")), block(source), test_s=1.0, memory_bytes=256 << 20)
    assert run.grade.reward == 0.0
    assert str(why(run)).startswith(kind)
    assert run.grade.parts["timeouts"] == float(kind == "time")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("def f(x): return 2", "wrong"),
        ("def g(x): return 1", "crashed"),
        ("def f(): return 1", "crashed"),
        ("def f(x): return object()", "crashed"),
        ("def f(x): return f", "crashed"),
        ("def f(x): return {1}", "wrong"),
        ("def f(x):\n    a = []\n    a.append(a)\n    return a", "crashed"),
        ("def f(x): return 'x' * 10 ** 7", "output"),
        ("import os\ndef f(x): os.write(3, b'{\"value\": 2}\\n'); os._exit(0)", "wrong"),
        ("def f(x): raise KeyboardInterrupt", "crashed"),
        ("def f(x): exit()", "crashed"),
    ],
)
async def test_how_a_function_fails(source: str, kind: str, runtime: Runtime) -> None:
    """What it returns has to be plain data, and the right ones."""
    run = await graded(runtime, function(([1], 1)), block(source))
    assert (run.grade.reward, why(run)) == (0.0, kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("def f(x): return x * 3", "failed"),
        ("def f(x): raise AssertionError", "failed"),
        ("def g(x): return x * 2", "failed"),
        ("def f(x): return iter([x])", "failed"),
        ("import os\nos._exit(0)", "crashed"),
        ("import os\ndef f(x): os._exit(0)", "crashed"),
        ("import os\ndef f(x): os.write(3, b'no JSON\\n')", "failed"),
        ("import os\ndef f(x): os.close(3)", "crashed"),
        ("def f(x): return 'x' * (1 << 23)", "failed"),
        ("def f(x):\n    while True: pass", "time"),
        ("import time\ndef f(x): time.sleep(60)", "time"),
    ],
)
async def test_how_a_solution_fails_tests_that_are_code(source: str, kind: str, runtime: Runtime) -> None:
    """Its process may end, lie or be silent; the judge is another one."""
    run = await graded(runtime, check("assert candidate(2) == 4"), block(source), test_s=1.0)
    assert (run.grade.reward, why(run)) == (0.0, kind)


@pytest.mark.slow
async def test_a_value_at_the_edge_of_depth_is_no_way_out(runtime: Runtime) -> None:
    """What it returned is as deep as may be, and comes back to it one list deeper."""
    source = "def f(x):\n    deep = []\n    for _ in range(199):\n        deep = [deep]\n    return deep"
    run = await graded(runtime, check("assert candidate([candidate(2)]) == 4"), block(source))
    assert (run.grade.reward, why(run)) == (0.0, "failed")
