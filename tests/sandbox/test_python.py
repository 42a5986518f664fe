"""The persistent interpreter: order of output, interrupts, deaths, and what a cell may do to its own process."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio

from prorld.errors import SandboxError
from prorld.kit.lanes import Lane
from prorld.sandbox.contract import Kernel, Sandbox, SandboxSpec, SessionKind
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.session import NO_END
from prorld.sandbox.tiny_image import make_tiny_image
from prorld.sandbox.warden_client import Warden
from prorld.testing.sandbox_contract import open_sandbox
from tests.sandbox.support import open_descriptors


@pytest.fixture(params=["plain", "ipython"])
async def sandbox(runtime: Runtime, request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    """A sandbox with each of the two interpreters: they do the same wherever no magic is asked for."""
    kernel: Kernel = request.param
    async with open_sandbox(runtime, SandboxSpec(kernel=kernel)) as opened:
        yield opened


PLAIN = [
    ("value of the last expression", "x = 2\nx * 3", 0, b"6\n"),
    ("no value", "None", 0, b""),
    ("underscore", "40 + 2\n", 0, b"42\n"),
    ("empty", "", 0, b""),
    ("comment", "# nothing", 0, b""),
    ("exit", "import sys; print('bye'); sys.exit(3)", 3, b"bye\n"),
    ("exit with a text", "raise SystemExit('why')", 1, b"why\n"),
    ("quit", "exit()", 0, b""),
    ("binary", r"import os; os.write(1, b'\0\xff'); None", 0, b"\0\xff"),
    ("surrogates", r"print('\udc80')", 0, b"\\udc80\n"),
    ("no trailing newline", "print('a', end='')", 0, b"a"),
    ("reads stdin", "try:\n  input()\nexcept EOFError:\n  print('end')", 0, b"end\n"),
    ("main module", "import __main__; y = 5\n__main__.y", 0, b"5\n"),
    (
        "fork",
        "import os\nif os.fork() == 0:\n  print('child')\nelse:\n  os.wait(); print('parent')",
        0,
        b"child\nparent\n",
    ),
    ("stdout replaced", "import io, sys; sys.stdout = io.StringIO(); print('lost')", 0, b""),
    ("threads", "import threading; t = threading.Thread(target=print, args=(1,)); t.start(); t.join()", 0, b"1\n"),
    ("signal handler", "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); 1", 0, b"1\n"),
    ("no future of ours", "def f(a: int): pass\nf.__annotations__['a'] is int", 0, b"True\n"),
    ("sentinel look-alike", r"print('\0x 0 /\0')", 0, b"\0x 0 /\0\n"),
]


async def test_plain(sandbox: Sandbox) -> None:
    """Output and exit code are exact, the interpreter lives on, and the next cell is clean."""
    for name, code, exit_code, output in PLAIN:
        result = await sandbox.python(code, limit_s=10)
        assert (result.exit_code, result.output) == (exit_code, output), name
        assert (result.timed_out, result.restarted) == (False, False), name
        await sandbox.python("import sys; sys.stdout = sys.__stdout__")
        assert (await sandbox.python("print('RECOVERED')")).output == b"RECOVERED\n", name


async def test_output_keeps_its_order(sandbox: Sandbox) -> None:
    """Python's own output and that of child processes come in the order they were written."""
    result = await sandbox.python("import os\nfor i in range(20):\n  print(i); os.system(f'echo s{i}; echo e{i} >&2')")
    assert result.text.split() == [word for i in range(20) for word in (str(i), f"s{i}", f"e{i}")]


async def test_traceback(sandbox: Sandbox) -> None:
    """An error shows the cell's own lines and nothing of the machinery around it."""
    result = await sandbox.python("def f():\n  return 1 / 0\nf()")
    assert result.exit_code == 1
    assert "return 1 / 0" in result.text
    assert result.text.endswith("ZeroDivisionError: division by zero\n")
    assert "run_cell" not in result.text
    assert "<string>" not in result.text
    assert "SyntaxError" in (await sandbox.python("def")).text


async def test_standard_output_closed(sandbox: Sandbox) -> None:
    """A cell that closes the standard streams has them back in the next."""
    await sandbox.python("import sys; sys.stdout.close(); sys.stderr.close(); sys.stdin.close()")
    result = await sandbox.python("print('on'); 1 / 0")
    assert (result.exit_code, result.restarted) == (1, False)
    assert result.output.startswith(b"on\n")
    assert b"ZeroDivisionError" in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "restarted"),
    [
        ("print('first')\nwhile True: pass", False),
        ("print('first')\nimport time; time.sleep(1000)", False),
        ("print('first')\nimport subprocess; subprocess.run(['sleep', '1000'])", False),
        ("import time\nprint('first')\nwhile True:\n  try: time.sleep(1)\n  except KeyboardInterrupt: pass", True),
        ("print('first', flush=True)\nimport signal; signal.pthread_sigmask(0, [2])\nwhile True: pass", True),
    ],
    ids=["busy", "sleep", "child", "swallows", "blocks"],
)
async def test_hang(sandbox: Sandbox, code: str, restarted: bool) -> None:
    """A cell that hangs is interrupted and names stay; one that can't be interrupted costs the interpreter."""
    await sandbox.python("kept = 1")
    result = await sandbox.python(code, limit_s=0.5)
    assert (result.exit_code, result.timed_out, result.restarted) == (124, True, restarted), result
    assert result.output.startswith(b"first\n")
    assert result.duration_s < 4
    expected = b"False\n" if restarted else b"True\n"
    assert (await sandbox.python("'kept' in globals()")).output == expected


async def test_death(sandbox: Sandbox) -> None:
    """An interpreter that ends is noticed, with its exit code, and another one runs in the same directory."""
    await sandbox.python("import os; os.mkdir('d'); os.chdir('d')")
    for end, exit_code in (("os._exit(9)", 9), ("os.kill(os.getpid(), 9)", 137), ("os.abort()", 134)):
        result = await sandbox.python(f"import os; {end}")
        assert (result.exit_code, result.restarted) == (exit_code, True), end
        assert (await sandbox.python("import os; os.getcwd()")).output == b"'/work/d'\n", end


async def test_death_within_a_cell_is_no_success(sandbox: Sandbox) -> None:
    """A thread that a former cell has left can't end a later one with success, nor one that had not begun."""
    leave = "import os, threading, time\nthreading.Thread(target=lambda: (time.sleep({}), os._exit(0))).start()"
    await sandbox.python(leave.format(0.2))
    result = await sandbox.python("import time; time.sleep(10); assert False")
    assert (result.exit_code, result.restarted) == (NO_END, True)
    await sandbox.python(leave.format(0.1))
    await sandbox.bash("sleep 0.3")
    result = await sandbox.python("assert False")
    assert (result.exit_code, result.restarted) == (1, True)
    assert b"AssertionError" in result.output


async def test_interrupts_itself_after_the_end(sandbox: Sandbox) -> None:
    """An interrupt that comes when no cell runs does nothing."""
    await sandbox.python("import os; pid = os.getpid()")
    pid = (await sandbox.python("pid")).text.strip()
    for _ in range(5):
        assert (await sandbox.bash(f"kill -INT {pid}")).exit_code == 0
        result = await sandbox.python("1 + 1")
        assert (result.exit_code, result.restarted) in ((0, False), (130, False))
    assert (await sandbox.python("1 + 1")).output == b"2\n"


async def test_standard_library_alone(sandbox: Sandbox) -> None:
    """The daemon's own package can't be read from a sandbox, though it lies beside the interpreter's."""
    result = await sandbox.python("import prorld")
    assert "ModuleNotFoundError" in result.text


async def test_oversized_cell(sandbox: Sandbox) -> None:
    """A cell over the bound is answered with the bound, and the interpreter is untouched."""
    result = await sandbox.python("#" * (1 << 20))
    assert result.exit_code == 2
    assert (await sandbox.python("1")).output == b"1\n"


@pytest.mark.parametrize("first", ["bash", "python"])
async def test_the_first_session_is_there_before_it_is_used(runtime: Runtime, first: SessionKind) -> None:
    """The other one comes up when it is used, and each works whichever comes first."""
    async with open_sandbox(runtime, SandboxSpec(kernel="plain", first=first)) as opened:
        await trio.sleep(0.5)  # by then it has its number
        if first == "bash":
            cell = await opened.python("import os\nos.getpid()")
            command = await opened.bash("echo $$")
            assert int(command.output) < int(cell.output)
        else:
            command = await opened.bash("echo $$")
            cell = await opened.python("import os\nos.getpid()")
            assert int(cell.output) < int(command.output)
        assert not cell.restarted
        assert not command.restarted


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that whoever runs sandboxes can pass through."""
    with tempfile.TemporaryDirectory(prefix="prorld-image-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


async def test_an_image_without_an_interpreter_still_has_its_shell(
    place: Path, warden: Warden, runtime: Runtime
) -> None:
    """Where the interpreter was to come up first, too. Each use of it says that it did not, and leaves nothing."""
    image = await make_tiny_image(place / "image", (warden.uid, warden.gid), Lane("test", 1))
    async with open_sandbox(runtime, SandboxSpec(image=str(image), first="python")) as opened:
        assert (await opened.bash("echo on")).output == b"on\n"
        with pytest.raises(SandboxError, match="did not come up"):
            await opened.python("1")  # after the one that came up with the sandbox, which has ended then
        before = open_descriptors()
        for _ in range(3):
            with pytest.raises(SandboxError, match="did not come up"):
                await opened.python("1")
        assert open_descriptors() == before
        assert (await opened.bash("echo on")).output == b"on\n"
