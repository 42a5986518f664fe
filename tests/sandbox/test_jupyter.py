"""Kernels of Jupyter behind the same face as the other sessions: the one of Python, and one that is not Python."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prorld.errors import SandboxError
from prorld.sandbox.contract import Sandbox, SandboxSpec
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.session import NO_END
from prorld.testing.sandbox_contract import open_sandbox

pytestmark = pytest.mark.slow

ENV = {"JUPYTER_PATH": "/work/share"}
KERNEL = (Path(__file__).parent / "shout_kernel.py").read_bytes()


async def install(sandbox: Sandbox, argv: list[str]) -> None:
    """Put a kernel where Jupyter looks for one."""
    spec = {"argv": argv, "display_name": "Shout", "language": "shout", "interrupt_mode": "message"}
    await sandbox.write_file("share/kernels/shout/kernel.json", json.dumps(spec).encode())
    await sandbox.write_file("share/kernels/shout/shout_kernel.py", KERNEL)


@pytest.fixture
async def shouting(runtime: Runtime) -> AsyncIterator[Sandbox]:
    """A sandbox whose cells are words to shout."""
    async with open_sandbox(runtime, SandboxSpec(kernel="jupyter", jupyter_kernel="shout", env=ENV)) as opened:
        await install(opened, ["python3", "{resource_dir}/shout_kernel.py", "{connection_file}"])
        yield opened


@pytest.fixture
async def python(runtime: Runtime) -> AsyncIterator[Sandbox]:
    """A sandbox with ipykernel."""
    async with open_sandbox(runtime, SandboxSpec(kernel="jupyter")) as opened:
        yield opened


async def test_another_language(shouting: Sandbox) -> None:
    """Values, failures without colours, silence and forged messages: each cell gets its own answer."""
    for code, exit_code, output in (
        ("hello", 0, b"HELLO\n"),
        ("fail", 1, b"no colours\n"),
        ("quiet", 0, b""),
        ("", 0, b""),
        ("forge", 0, b"FORGE\n"),
        ("again", 0, b"AGAIN\n"),
    ):
        result = await shouting.python(code)
        assert (result.exit_code, result.output) == (exit_code, output), code
        assert not result.restarted


async def test_interrupt_by_message(shouting: Sandbox) -> None:
    """A kernel that takes interrupts as messages gets one, and lives on."""
    result = await shouting.python("hang", limit_s=0.3)
    assert (result.exit_code, result.output, result.timed_out, result.restarted) == (124, b"stopped\n", True, False)
    assert (await shouting.python("on")).output == b"ON\n"


async def test_death(shouting: Sandbox) -> None:
    """A kernel that ends is noticed, with its exit code, and another one takes the next cell."""
    for code, exit_code in (("die 3", 3), ("die 0", NO_END)):
        result = await shouting.python(code)
        assert (result.exit_code, result.restarted) == (exit_code, True)
        assert (await shouting.python("on")).output == b"ON\n"


async def test_death_between_cells(shouting: Sandbox) -> None:
    """A cell that finds its kernel dead runs in the next one."""
    await shouting.python("on")
    await shouting.bash(
        "p=$(pgrep -f [s]hout_kernel.py); kill -9 $p; while kill -0 $p; do sleep 0.01; done 2>/dev/null"
    )
    result = await shouting.python("on")
    assert (result.exit_code, result.output, result.restarted) == (0, b"ON\n", True)


async def test_kernel_missing(runtime: Runtime) -> None:
    """A kernel that is not there is said to be missing, and the sandbox goes on."""
    async with open_sandbox(runtime, SandboxSpec(kernel="jupyter", jupyter_kernel="no-such")) as sandbox:
        with pytest.raises(SandboxError, match="no-such") as caught:
            await sandbox.python("1")
        assert caught.value.stable_code == "kernel_missing"
        assert not caught.value.may_retry
        assert (await sandbox.bash("echo on")).output == b"on\n"


async def test_jupyter_missing(runtime: Runtime) -> None:
    """Where a sandbox's interpreter has no jupyter_client, no kernel of Jupyter can be had, and that is said."""
    spec = SandboxSpec(kernel="jupyter", env={"PATH": "/usr/bin:/bin"})
    async with open_sandbox(runtime, spec) as sandbox:
        with pytest.raises(SandboxError, match="jupyter_client") as caught:
            await sandbox.python("1")
        assert caught.value.stable_code == "kernel_missing"


async def test_kernel_that_does_not_start(runtime: Runtime) -> None:
    """A kernel that ends before it answers is told with its last words, and that is no missing kernel."""
    async with open_sandbox(runtime, SandboxSpec(kernel="jupyter", jupyter_kernel="shout", env=ENV)) as sandbox:
        await install(sandbox, ["/bin/sh", "-c", "echo broken >&2; exit 7"])
        with pytest.raises(SandboxError, match=r"ended with 7.*broken") as caught:
            await sandbox.python("1")
        assert caught.value.stable_code != "kernel_missing"
        await install(sandbox, ["python3", "{resource_dir}/shout_kernel.py", "{connection_file}"])
        assert (await sandbox.python("on")).output == b"ON\n"


async def test_ipykernel(python: Sandbox) -> None:
    """What the interpreter of Jupyter shows is what the others show: output, values, errors without colours."""
    for code, exit_code, output in (
        ("x = 2\nx * 3", 0, b"6\n"),
        ("print('a'); import os; os.system('echo b'); print('c')", 0, b"a\nb\nc\n"),
        ("import sys; print('e', file=sys.stderr)", 0, b"e\n"),
        ("from IPython.display import display\ndisplay(5)", 0, b"5\n"),
        ("import os; os.mkdir('d'); os.chdir('d')", 0, b""),
    ):
        result = await python.python(code)
        assert (result.exit_code, sorted(result.output.split())) == (exit_code, sorted(output.split())), result
    result = await python.python("1 / 0")
    assert result.exit_code == 1
    assert b"ZeroDivisionError: division by zero" in result.output
    assert b"\x1b" not in result.output
    result = await python.python("import os; os._exit(9)")
    assert (result.exit_code, result.restarted) == (9, True)
    assert (await python.python("import os; os.getcwd()")).output == b"'/work/d'\n"


async def test_ipykernel_over_a_limit(python: Sandbox) -> None:
    """A limit interrupts and keeps the names; what swallows the interrupt costs the kernel, and no process is left."""
    await python.python("kept = 1")
    result = await python.python("import time\nprint('first')\ntime.sleep(1000)", limit_s=0.5)
    assert (result.exit_code, result.timed_out, result.restarted) == (124, True, False)
    assert result.output.startswith(b"first\n")
    assert (await python.python("kept")).output == b"1\n"
    swallow = "while True:\n  try: time.sleep(1)\n  except KeyboardInterrupt: pass"
    result = await python.python(swallow, limit_s=0.5)
    assert (result.exit_code, result.timed_out, result.restarted) == (124, True, True)
    assert (await python.python("'kept' in globals()")).output == b"False\n"
    assert (await python.bash("ps -eo args | grep -c '[i]pykernel_launcher'")).output == b"1\n"
