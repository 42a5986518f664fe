"""IPython in a sandbox: magics, commands, awaiting cells, and what a broken event loop may do to the next cell."""

from __future__ import annotations

import ast
from collections.abc import AsyncIterator
from importlib.resources import files

import pytest

from prorld.errors import SandboxError
from prorld.sandbox.contract import Sandbox, SandboxLimits, SandboxSpec
from prorld.sandbox.runtime import Runtime
from prorld.testing.sandbox_contract import open_sandbox

STUBBORN = """\
import asyncio
async def stubborn():
    while True:
        try: await asyncio.sleep(0.01)
        except asyncio.CancelledError: pass
await stubborn()
"""
WITHOUT_IPYTHON = {"PATH": "/usr/bin:/bin"}

CELLS = [
    ("command", "!echo out; echo err >&2", 0, b"out\nerr\n"),
    ("order of a command", "print('a')\n!echo b\nprint('c')", 0, b"a\nb\nc\n"),
    ("captured command", "x = !echo a; echo b\nlist(x)", 0, b"['a', 'b']\n"),
    ("cell of bash", "%%bash\necho one", 0, b"one\n"),
    ("unknown magic", "%nosuch", 1, b"UsageError: Line magic function `%nosuch` not found.\n"),
    ("directory", "%cd /tmp", 0, b"/tmp\n"),
    ("directory back", "%cd -q /work", 0, b""),
    ("await", "import asyncio\nawait asyncio.sleep(0.001, 5)", 0, b"5\n"),
    ("run a loop", "asyncio.run(asyncio.sleep(0.001, 6))", 0, b"6\n"),
    ("await after a loop", "await asyncio.sleep(0.001, 7)", 0, b"7\n"),
    ("display", "from IPython.display import display, HTML\ndisplay({'a': 1})", 0, b"{'a': 1}\n"),
    ("last value", "_", 0, b"7\n"),
    ("no value", "5;", 0, b""),
    ("long value", "{'a' * 50: 1, 'b' * 50: 2}", 0, b"{'" + b"a" * 50 + b"': 1,\n '" + b"b" * 50 + b"': 2}\n"),
    ("exit", "exit", 0, b""),
    ("exit with a code", "import sys; sys.exit(4)", 4, b""),
    ("first cell", "In[1]", 0, b"\"get_ipython().system('echo out; echo err >&2')\"\n"),
    ("backend", "import os; os.environ['MPLBACKEND']", 0, b"'Agg'\n"),
    ("interrupt itself", "import os, signal; os.kill(os.getpid(), signal.SIGINT)", 130, None),
]


@pytest.fixture
async def ipython(runtime: Runtime) -> AsyncIterator[Sandbox]:
    """A sandbox with IPython."""
    async with open_sandbox(runtime, SandboxSpec(kernel="ipython")) as opened:
        yield opened


async def test_cells(ipython: Sandbox) -> None:
    """What IPython adds to the language works, and shows as plain text without prompts or colours."""
    for name, code, exit_code, output in CELLS:
        result = await ipython.python(code)
        assert result.exit_code == exit_code, (name, result)
        assert output is None or result.output == output, (name, result)
        assert b"\x1b" not in result.output, name
        assert not result.restarted, name
    result = await ipython.python("%timeit -n1 -r1 1")
    assert b"per loop" in result.output


async def test_traceback(ipython: Sandbox) -> None:
    """An error shows the cell and its line, and nothing of the machinery."""
    result = await ipython.python("def f():\n  return 1 / 0\nf()")
    assert "return 1 / 0" in result.text
    assert "Cell In[1], line 3" in result.text
    assert "<string>" not in result.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import asyncio\nwhile True:\n  await asyncio.sleep(0.01)",
        "import asyncio\nawait asyncio.sleep(1000)",
        STUBBORN,
        "!sleep 1000",
        "%%bash\nsleep 1000",
        "x = !sleep 1000",
    ],
    ids=["await", "sleep", "stubborn", "command", "cell of bash", "captured"],
)
async def test_hang(ipython: Sandbox, code: str) -> None:
    """What hangs in a loop or in a child is interrupted; names stay, and the next cell that awaits is clean."""
    await ipython.python("kept = 1")
    result = await ipython.python(code, limit_s=0.5)
    assert (result.exit_code, result.timed_out, result.restarted) == (124, True, False), result
    result = await ipython.python("import asyncio\nawait asyncio.sleep(0.001, kept)")
    assert (result.exit_code, result.output) == (0, b"1\n"), result


async def test_broken_loop(ipython: Sandbox) -> None:
    """A loop that a cell has closed, stopped or taken away is replaced for the next."""
    await ipython.python("import asyncio\nawait asyncio.sleep(0)")
    for code in (
        "asyncio.get_event_loop().close()",
        "asyncio.set_event_loop(None)",
        "async def f(): asyncio.get_running_loop().stop()\nawait f()",
    ):
        await ipython.python(code, limit_s=2)
        result = await ipython.python("await asyncio.sleep(0.001, 8)", limit_s=5)
        assert (result.output, result.restarted) == (b"8\n", False), (code, result)


async def test_big_value(runtime: Runtime) -> None:
    """A value too big to show is shown in part, and how much is missing is said."""
    spec = SandboxSpec(kernel="ipython", limits=SandboxLimits(output_bytes=4096))
    async with open_sandbox(runtime, spec) as sandbox:
        result = await sandbox.python("'x' * (1 << 20)")
        assert result.omitted_bytes == (1 << 20) + 3 - 4096
        assert (await sandbox.python("1")).output == b"1\n"


async def test_late_output(ipython: Sandbox) -> None:
    """What a thread prints after its cell is never taken for a later cell's mark, and never wedges one."""
    await ipython.python(
        "import threading, time\ndef late():\n  for i in range(300): print('late'); time.sleep(0.001)\n"
        "t = threading.Thread(target=late); t.start()"
    )
    for number in range(50):
        result = await ipython.python(f"print('n{number}')")
        assert f"n{number}\n" in result.text
        assert set(result.text.split()) <= {"late", f"n{number}"}
    await ipython.python("t.join()")
    assert (await ipython.python("print('end')")).output == b"end\n"


async def test_which_kernel(runtime: Runtime) -> None:
    """``auto`` takes IPython where it is; ``plain`` never does; ``ipython`` without it is an error that says so."""
    for spec, magic in (
        (SandboxSpec(), True),
        (SandboxSpec(kernel="plain"), False),
        (SandboxSpec(env=WITHOUT_IPYTHON), False),
    ):
        async with open_sandbox(runtime, spec) as sandbox:
            assert ((await sandbox.python("%pwd")).exit_code == 0) is magic, spec
    async with open_sandbox(runtime, SandboxSpec(kernel="ipython", env=WITHOUT_IPYTHON)) as sandbox:
        with pytest.raises(SandboxError, match="IPython") as caught:
            await sandbox.python("1")
        assert caught.value.stable_code == "kernel_missing"
        assert (await sandbox.bash("echo on")).output == b"on\n"


@pytest.mark.parametrize("name", ["pychild.py", "ipython_cells.py", "jupyter_cells.py"])
def test_old_interpreters(name: str) -> None:
    """What runs in sandboxes is in the language of the oldest interpreter that an image may have."""
    ast.parse(files("prorld.sandbox.guest").joinpath(name).read_text(), feature_version=(3, 8))
