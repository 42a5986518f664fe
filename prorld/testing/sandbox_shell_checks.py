"""The promises of a sandbox that only a real shell, or only a wall, can keep; part of ``sandbox_contract``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import trio

from prorld.errors import SandboxError
from prorld.sandbox.contract import CommandResult, Kernel, SandboxLimits, SandboxRuntime, SandboxSpec
from prorld.testing.sandbox_opening import open_sandbox, put_tree, raises, same, tree_at

__all__ = ["SHELL", "WALLS"]

KERNELS: tuple[Kernel, ...] = get_args(Kernel)


async def keeps_the_state_of_a_session(runtime: SandboxRuntime) -> None:
    """Directory, variables, functions and background jobs of the shell stay; so do the interpreter's names."""
    async with open_sandbox(runtime) as sandbox:
        same(await sandbox.bash("mkdir -p d; cd d; x=1; f() { echo f$x; }"), 0, b"")
        assert (await sandbox.bash("sleep 1000 &")).exit_code == 0
        same(await sandbox.bash("f; pwd; kill -0 $! && echo alive"), 0, f"f1\n{sandbox.workdir}/d\nalive\n".encode())
        same(await sandbox.python("y = 20\ndef g(): return y + 1"), 0, b"")
        same(await sandbox.python("g()"), 0, b"21\n")


async def restores_the_directory(runtime: SandboxRuntime) -> None:
    """The shell that follows one that died starts where that one was."""
    async with open_sandbox(runtime) as sandbox:
        await sandbox.bash("mkdir -p deep/er && cd deep/er")
        assert (await sandbox.bash("kill -9 $$")).exit_code == 128 + 9
        same(await sandbox.bash("pwd"), 0, f"{sandbox.workdir}/deep/er\n".encode())


async def notices_a_death_behind_a_background_job(runtime: SandboxRuntime) -> None:
    """What a shell leaves running, its output still open, does not hide that the shell has ended."""
    async with open_sandbox(runtime) as sandbox:
        for die, exit_code in (("sleep 1000 & exit 3", 3), ("setsid sleep 1000 & kill -9 $$", 128 + 9)):
            result = await sandbox.bash(die, limit_s=60)
            assert (result.exit_code, result.restarted, result.timed_out) == (exit_code, True, False), result
            same(await sandbox.bash("echo on"), 0, b"on\n")


async def bounds_output(runtime: SandboxRuntime) -> None:
    """Of too much output the head and the tail are kept, and how much is missing is said."""
    spec = SandboxSpec(limits=SandboxLimits(output_bytes=4096))
    for which, code in (("bash", "seq 100000"), ("python", "for i in range(100000): print(i + 1)")):
        async with open_sandbox(runtime, spec) as sandbox:
            result = await getattr(sandbox, which)(code)
            assert result.output.startswith(b"1\n2\n"), result.output[:20]
            assert result.output.endswith(b"99999\n100000\n"), result.output[-20:]
            assert len(result.output) < 4096 + 100
            assert result.omitted_bytes == sum(len(f"{i + 1}\n") for i in range(100000)) - 4096


async def shares_files_between_its_faces(runtime: SandboxRuntime) -> None:
    """Shell, interpreter and file transfer see the same files."""
    async with open_sandbox(runtime) as sandbox:
        await sandbox.write_file("one", b"1")
        same(await sandbox.bash("cat one; printf 2 > two"), 0, b"1")
        same(await sandbox.python("open('two').read()"), 0, b"'2'\n")
        assert await sandbox.read_file("two") == b"2"


async def keeps_what_a_tree_is(runtime: SandboxRuntime) -> None:
    """Modes, symbolic links and odd names survive both ways; what is no part of a tree does not come out."""
    with TemporaryDirectory() as name:
        host = Path(name)
        put_tree(host / "in", {"run": b"#!/bin/sh\necho ran\n", "odd \n name": b"x"})
        (host / "in/run").chmod(0o751)
        (host / "in/link").symlink_to("run")
        async with open_sandbox(runtime) as sandbox:
            await sandbox.upload(host / "in", "tree")
            same(await sandbox.bash("tree/link; stat -c %a tree/run; ls -A | grep upload"), 1, b"ran\n751\n")
            await sandbox.download("tree", host / "out")
            assert (host / "out/link").readlink() == Path("run")
            assert (host / "out/run").stat().st_mode & 0o7777 == 0o751
            assert tree_at(host / "out").keys() == {"run", "link", "odd \n name"}
            for spoil in ("ln -s / tree/away", "ln -s ../.. tree/away", "mkfifo tree/away", "truncate -s 1M tree/away"):
                await sandbox.bash(f"rm -f tree/away; {spoil}")
                await raises(ValueError, sandbox.download("tree", host / "refused", max_bytes=1 << 19))
        assert not (host / "refused").exists()


async def runs_cells_with_the_wanted_kernel(runtime: SandboxRuntime) -> None:
    """Every kernel shows output and values alike; one that the sandbox lacks is said to be missing."""
    for kernel in KERNELS:
        async with open_sandbox(runtime, SandboxSpec(kernel=kernel)) as sandbox:
            result = await _answer_or_missing(sandbox.python("x = 20\nprint('out')\nx + 1"))
            if result is None:
                assert kernel in ("ipython", "jupyter"), kernel
                same(await sandbox.bash("echo on"), 0, b"on\n")
                continue
            same(result, 0, b"out\n21\n")
            assert (await sandbox.python("1 / 0")).exit_code == 1
            result = await sandbox.python("import time; time.sleep(1000)", limit_s=0.5)
            assert (result.exit_code, result.timed_out) == (124, True), result
            result = await sandbox.python("import os; os._exit(3)")
            assert (result.exit_code, result.restarted) == (3, True), result
            same(await sandbox.python("2 + 2"), 0, b"4\n")


async def _answer_or_missing(call: Awaitable[CommandResult]) -> CommandResult | None:
    """The answer, or nothing where the kernel is missing."""
    try:
        return await call
    except SandboxError as exc:
        if exc.stable_code != "kernel_missing":
            raise
    return None


async def has_no_network(runtime: SandboxRuntime) -> None:
    """Without a network there is nothing but a loopback, and nothing of the host listens on it."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        port = listener.socket.getsockname()[1]
        async with open_sandbox(runtime, SandboxSpec(network="none")) as sandbox:
            same(await sandbox.bash(f"(: </dev/tcp/127.0.0.1/{port}) 2>/dev/null"), 1, b"")
            same(await sandbox.bash("(: </dev/tcp/192.0.2.1/80) 2>/dev/null", limit_s=10), 1, b"")
            same(await sandbox.bash("tail -n +3 /proc/net/dev | grep -v '^ *lo:'"), 1, b"")
        stream = await trio.open_tcp_stream("127.0.0.1", port)  # it could be reached from here all the time
        await stream.aclose()


async def shows_the_wanted_environment(runtime: SandboxRuntime) -> None:
    """The variables of the spec are there, in both sessions."""
    async with open_sandbox(runtime, SandboxSpec(env={"WANTED": "a b"})) as sandbox:
        same(await sandbox.bash('echo "$WANTED"'), 0, b"a b\n")
        same(await sandbox.python("import os; os.environ['WANTED']"), 0, b"'a b'\n")


async def keeps_output_before_a_limit(runtime: SandboxRuntime) -> None:
    """What was said before the limit passed is returned."""
    async with open_sandbox(runtime) as sandbox:
        same(await sandbox.bash("echo early; sleep 1000", limit_s=0.3), 124, b"early\n")
        result = await sandbox.python("print('early'); import time; time.sleep(1000)", limit_s=0.5)
        assert result.timed_out
        assert result.output.startswith(b"early\n"), result


SHELL: tuple[Callable[[SandboxRuntime], Awaitable[None]], ...] = (
    keeps_the_state_of_a_session,
    restores_the_directory,
    notices_a_death_behind_a_background_job,
    bounds_output,
    shares_files_between_its_faces,
    keeps_what_a_tree_is,
    runs_cells_with_the_wanted_kernel,
    shows_the_wanted_environment,
    keeps_output_before_a_limit,
)
WALLS: tuple[Callable[[SandboxRuntime], Awaitable[None]], ...] = (has_no_network,)
