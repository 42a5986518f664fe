"""The checks that every sandbox runtime passes: what ``prorld.sandbox.contract`` promises, as code.

The author of a runtime runs them against it::

    @pytest.mark.parametrize("check", sandbox_checks(), ids=lambda check: check.name)
    async def test_contract(check, runtime):
        await check.run(runtime)

A check makes its own sandboxes, raises ``AssertionError`` where the runtime breaks a promise, and leaves nothing
behind. A runtime that runs no programs leaves out what only a real shell can answer, with ``shell=False``, one that
promises no isolation what only a wall can, with ``walls=False``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import msgspec
import trio

from prorld.errors import SandboxError
from prorld.sandbox.contract import CommandResult, Kernel, Sandbox, SandboxLimits, SandboxRuntime, SandboxSpec

__all__ = ["SandboxCheck", "open_sandbox", "sandbox_checks"]

START_SECONDS = 60.0
CHECK_SECONDS = 120.0
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
_JOB = "contract"


class SandboxCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One promise. ``run`` takes the runtime."""

    name: str
    run: Callable[[SandboxRuntime], Awaitable[None]]
    needs_shell: bool


def sandbox_checks(*, shell: bool = True, walls: bool = True) -> tuple[SandboxCheck, ...]:
    """All checks, or those that can be answered without running programs, or without walls."""
    plain = [SandboxCheck(name=check.__name__, run=_bounded(check), needs_shell=False) for check in _PLAIN]
    asked = [*_SHELL, *(_WALLS if walls else ())] if shell else []
    return (*plain, *(SandboxCheck(name=check.__name__, run=_bounded(check), needs_shell=True) for check in asked))


@asynccontextmanager
async def open_sandbox(
    runtime: SandboxRuntime, spec: SandboxSpec | None = None, *, sandbox_id: str = "contract-1"
) -> AsyncIterator[Sandbox]:
    """A sandbox for the length of a block; it is gone when the block has been left."""
    async with trio.open_nursery() as nursery:
        with trio.fail_after(START_SECONDS):
            sandbox = await _start(runtime, nursery, spec or SandboxSpec(), sandbox_id)
        yield sandbox
        nursery.cancel_scope.cancel("the block has ended")


async def _start(runtime: SandboxRuntime, nursery: trio.Nursery, spec: SandboxSpec, sandbox_id: str) -> Sandbox:
    async def run(*, task_status: trio.TaskStatus[Sandbox] = trio.TASK_STATUS_IGNORED) -> None:
        await runtime.run(spec, sandbox_id=sandbox_id, job_id=_JOB, task_status=task_status)

    sandbox: Sandbox = await nursery.start(run, name=f"sandbox {sandbox_id}")
    return sandbox


def _bounded(check: Callable[[SandboxRuntime], Awaitable[None]]) -> Callable[[SandboxRuntime], Awaitable[None]]:
    async def run(runtime: SandboxRuntime) -> None:
        with trio.fail_after(CHECK_SECONDS):
            await check(runtime)
        assert not [row for row in runtime.list() if row.job_id == _JOB], "a sandbox is left over"

    return run


def _untroubled(result: CommandResult) -> bool:
    return not result.timed_out and not result.restarted


def _same(result: CommandResult, exit_code: int, output: bytes) -> None:
    assert (result.exit_code, result.output) == (exit_code, output), result


# --- what any runtime can answer --------------------------------------------------------------------------------------


async def is_listed_while_it_lives(runtime: SandboxRuntime) -> None:
    """A sandbox shows in the list from its start to its end, and not a moment longer."""
    async with open_sandbox(runtime) as sandbox:
        assert sandbox.sandbox_id == "contract-1"
        assert sandbox.workdir.startswith("/")
        (row,) = [row for row in runtime.list() if row.job_id == _JOB]
        assert (row.sandbox_id, row.state, row.runtime) == ("contract-1", "up", runtime.name)
        assert row.age_s >= 0
    assert not [row for row in runtime.list() if row.job_id == _JOB]


async def runs_commands(runtime: SandboxRuntime) -> None:
    """A command's output and exit code come back as they are."""
    async with open_sandbox(runtime) as sandbox:
        result = await sandbox.bash("echo hello")
        _same(result, 0, b"hello\n")
        assert _untroubled(result), result
        assert not result.omitted_bytes
        _same(await sandbox.bash("false"), 1, b"")
        _same(await sandbox.python("print('hello')"), 0, b"hello\n")


async def keeps_a_session_over_a_limit(runtime: SandboxRuntime) -> None:
    """A limit that passes returns in time, says so, and the session takes the next call."""
    async with open_sandbox(runtime) as sandbox:
        await sandbox.python("print('up')")
        for call, hang, after in (
            (sandbox.bash, "sleep 1000", "echo on"),
            (sandbox.python, "import time; time.sleep(1000)", "print('on')"),
        ):
            started_at = trio.current_time()
            result = await call(hang, limit_s=0.3)
            assert result.timed_out, result
            assert 0.299 <= trio.current_time() - started_at < 20  # clocks count in floats
            result = await call(after)
            _same(result, 0, b"on\n")
            assert _untroubled(result), result


async def notices_a_session_that_died(runtime: SandboxRuntime) -> None:
    """A shell or an interpreter that ends is started again, and the result says so, with the exit code."""
    async with open_sandbox(runtime) as sandbox:
        for call, die, after in (
            (sandbox.bash, "exit 3", "echo on"),
            (sandbox.python, "import os; os._exit(3)", "print('on')"),
        ):
            result = await call(die)
            assert (result.exit_code, result.restarted, result.timed_out) == (3, True, False), result
            result = await call(after)
            _same(result, 0, b"on\n")
            assert not result.restarted


async def queues_calls_of_a_session(runtime: SandboxRuntime) -> None:
    """Calls made at once run one after the other, and each gets its own answer."""
    answers: dict[str, CommandResult] = {}

    async with open_sandbox(runtime) as sandbox:

        async def ask(word: str) -> None:
            answers[word] = await sandbox.bash(f"echo {word}")

        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(ask, f"word{number}")
    for word, result in answers.items():
        _same(result, 0, f"{word}\n".encode())


async def moves_files(runtime: SandboxRuntime) -> None:
    """What is written comes back byte for byte, below directories that are made on the way."""
    content = bytes(range(256)) * 4096
    async with open_sandbox(runtime) as sandbox:
        await sandbox.write_file("a/b/data.bin", content)
        assert await sandbox.read_file(f"{sandbox.workdir}/a/b/data.bin", max_bytes=len(content)) == content
        await sandbox.write_file("a/b/data.bin", b"")
        assert await sandbox.read_file("a/b/data.bin") == b""


async def refuses_files_as_files_do(runtime: SandboxRuntime) -> None:
    """Missing, a directory, too large: each has its own error, and the sandbox goes on."""
    async with open_sandbox(runtime) as sandbox:
        await sandbox.write_file("some/file", b"12345")
        await _raises(FileNotFoundError, sandbox.read_file("nowhere"))
        await _raises(IsADirectoryError, sandbox.read_file("some"))
        await _raises(ValueError, sandbox.read_file("some/file", max_bytes=4))
        await _raises(OSError, sandbox.write_file("some", b"x"))
        assert await sandbox.read_file("some/file", max_bytes=5) == b"12345"


async def moves_trees(runtime: SandboxRuntime) -> None:
    """A tree of the host comes back as it went in; so does a file; what is in the way is not overwritten."""
    with TemporaryDirectory() as name:
        host = Path(name)
        given = {"a": b"1", "b/c": bytes(range(256)) * 4096, "b/d": b""}
        _put(host / "in", given)
        async with open_sandbox(runtime) as sandbox:
            await sandbox.upload(host / "in", "some/tree")
            assert await sandbox.read_file(f"{sandbox.workdir}/some/tree/b/d") == b""
            await sandbox.download("some/tree", host / "out")
            assert _got(host / "out") == given
            await sandbox.upload(host / "in/a", "some/tree/b/c")
            await sandbox.download("some/tree/b/c", host / "out/a")
            assert _got(host / "out") == given
            await _raises(FileExistsError, sandbox.upload(host / "in", "some/tree"))
            await _raises(IsADirectoryError, sandbox.upload(host / "in/a", "some/tree"))
            await _raises(FileExistsError, sandbox.download("some/tree", host / "out"))


async def refuses_trees_as_files_do(runtime: SandboxRuntime) -> None:
    """Missing on either side, too large: each has its own error, and nothing comes to the target."""
    with TemporaryDirectory() as name:
        host = Path(name)
        async with open_sandbox(runtime) as sandbox:
            await sandbox.write_file("some/file", b"12345")
            await _raises(FileNotFoundError, sandbox.download("nowhere", host / "out"))
            await _raises(FileNotFoundError, sandbox.upload(host / "nowhere", "x"))
            await _raises(ValueError, sandbox.download("some/file", host / "out", max_bytes=4))
            await _raises(ValueError, sandbox.download("some", host / "out", max_bytes=4))
            assert _got(host) == {}
            await sandbox.download("some", host / "out", max_bytes=5)
        assert _got(host) == {"out/file": b"12345"}


def _put(root: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def _got(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if not path.is_dir()}


async def is_gone_when_its_scope_is(runtime: SandboxRuntime) -> None:
    """Whoever holds on to a sandbox that has ended gets ``SandboxError``."""
    async with open_sandbox(runtime) as sandbox:
        pass
    await _raises(SandboxError, sandbox.bash("echo hello"))
    await _raises(SandboxError, sandbox.python("print('hello')"))
    await _raises(SandboxError, sandbox.read_file("x"))
    await _raises(SandboxError, sandbox.write_file("x", b""))
    await _raises(SandboxError, sandbox.download("x", Path("/nowhere/x")))


async def ends_while_a_command_runs(runtime: SandboxRuntime) -> None:
    """Cancelling does not wait for what runs."""
    started_at = trio.current_time()
    async with open_sandbox(runtime) as sandbox, trio.open_nursery() as nursery:
        nursery.start_soon(sandbox.bash, "sleep 1000")
        await trio.sleep(0.1)
        nursery.cancel_scope.cancel("enough")
    assert trio.current_time() - started_at < 30


async def can_be_cancelled_while_it_starts(runtime: SandboxRuntime) -> None:
    """A start that is given up leaves nothing."""
    for seconds in (0.0, 0.001, 0.004, 0.008, 0.016):
        async with trio.open_nursery() as nursery:
            with trio.move_on_after(seconds):
                await _start(runtime, nursery, SandboxSpec(), "contract-1")
            nursery.cancel_scope.cancel("given up")
        assert not [row for row in runtime.list() if row.job_id == _JOB], seconds


async def refuses_an_id_twice(runtime: SandboxRuntime) -> None:
    """A second sandbox of the same id is refused, and the first one lives on."""
    async with open_sandbox(runtime) as sandbox:
        await _raises(SandboxError, runtime.run(SandboxSpec(), sandbox_id="contract-1", job_id=_JOB))
        _same(await sandbox.bash("echo on"), 0, b"on\n")


async def gives_the_session_back_after_a_cancelled_call(runtime: SandboxRuntime) -> None:
    """A caller that gives up on a call does not take the session from the next one."""
    async with open_sandbox(runtime) as sandbox:
        with trio.move_on_after(0.2):
            await sandbox.bash("sleep 1000")
        _same(await sandbox.bash("echo on"), 0, b"on\n")


# --- what takes a shell -----------------------------------------------------------------------------------------------


async def keeps_the_state_of_a_session(runtime: SandboxRuntime) -> None:
    """Directory, variables, functions and background jobs of the shell stay; so do the interpreter's names."""
    async with open_sandbox(runtime) as sandbox:
        _same(await sandbox.bash("mkdir -p d; cd d; x=1; f() { echo f$x; }"), 0, b"")
        assert (await sandbox.bash("sleep 1000 &")).exit_code == 0
        _same(await sandbox.bash("f; pwd; kill -0 $! && echo alive"), 0, f"f1\n{sandbox.workdir}/d\nalive\n".encode())
        _same(await sandbox.python("y = 20\ndef g(): return y + 1"), 0, b"")
        _same(await sandbox.python("g()"), 0, b"21\n")


async def restores_the_directory(runtime: SandboxRuntime) -> None:
    """The shell that follows one that died starts where that one was."""
    async with open_sandbox(runtime) as sandbox:
        await sandbox.bash("mkdir -p deep/er && cd deep/er")
        assert (await sandbox.bash("kill -9 $$")).exit_code == 128 + 9
        _same(await sandbox.bash("pwd"), 0, f"{sandbox.workdir}/deep/er\n".encode())


async def notices_a_death_behind_a_background_job(runtime: SandboxRuntime) -> None:
    """What a shell leaves running, its output still open, does not hide that the shell has ended."""
    async with open_sandbox(runtime) as sandbox:
        for die, exit_code in (("sleep 1000 & exit 3", 3), ("setsid sleep 1000 & kill -9 $$", 128 + 9)):
            result = await sandbox.bash(die, limit_s=60)
            assert (result.exit_code, result.restarted, result.timed_out) == (exit_code, True, False), result
            _same(await sandbox.bash("echo on"), 0, b"on\n")


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
        _same(await sandbox.bash("cat one; printf 2 > two"), 0, b"1")
        _same(await sandbox.python("open('two').read()"), 0, b"'2'\n")
        assert await sandbox.read_file("two") == b"2"


async def keeps_what_a_tree_is(runtime: SandboxRuntime) -> None:
    """Modes, symbolic links and odd names survive both ways; what is no part of a tree does not come out."""
    with TemporaryDirectory() as name:
        host = Path(name)
        _put(host / "in", {"run": b"#!/bin/sh\necho ran\n", "odd \n name": b"x"})
        (host / "in/run").chmod(0o751)
        (host / "in/link").symlink_to("run")
        async with open_sandbox(runtime) as sandbox:
            await sandbox.upload(host / "in", "tree")
            _same(await sandbox.bash("tree/link; stat -c %a tree/run; ls -A | grep upload"), 1, b"ran\n751\n")
            await sandbox.download("tree", host / "out")
            assert (host / "out/link").readlink() == Path("run")
            assert (host / "out/run").stat().st_mode & 0o7777 == 0o751
            assert _got(host / "out").keys() == {"run", "link", "odd \n name"}
            for spoil in ("ln -s / tree/away", "ln -s ../.. tree/away", "mkfifo tree/away", "truncate -s 1M tree/away"):
                await sandbox.bash(f"rm -f tree/away; {spoil}")
                await _raises(ValueError, sandbox.download("tree", host / "refused", max_bytes=1 << 19))
        assert not (host / "refused").exists()


async def runs_cells_with_the_wanted_kernel(runtime: SandboxRuntime) -> None:
    """Every kernel shows output and values alike; one that the sandbox lacks is said to be missing."""
    for kernel in KERNELS:
        async with open_sandbox(runtime, SandboxSpec(kernel=kernel)) as sandbox:
            result = await _answer_or_missing(sandbox.python("x = 20\nprint('out')\nx + 1"))
            if result is None:
                assert kernel in ("ipython", "jupyter"), kernel
                _same(await sandbox.bash("echo on"), 0, b"on\n")
                continue
            _same(result, 0, b"out\n21\n")
            assert (await sandbox.python("1 / 0")).exit_code == 1
            result = await sandbox.python("import time; time.sleep(1000)", limit_s=0.5)
            assert (result.exit_code, result.timed_out) == (124, True), result
            result = await sandbox.python("import os; os._exit(3)")
            assert (result.exit_code, result.restarted) == (3, True), result
            _same(await sandbox.python("2 + 2"), 0, b"4\n")


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
            _same(await sandbox.bash(f"(: </dev/tcp/127.0.0.1/{port}) 2>/dev/null"), 1, b"")
            _same(await sandbox.bash("(: </dev/tcp/192.0.2.1/80) 2>/dev/null", limit_s=10), 1, b"")
            _same(await sandbox.bash("tail -n +3 /proc/net/dev | grep -v '^ *lo:'"), 1, b"")
        stream = await trio.open_tcp_stream("127.0.0.1", port)  # it could be reached from here all the time
        await stream.aclose()


async def shows_the_wanted_environment(runtime: SandboxRuntime) -> None:
    """The variables of the spec are there, in both sessions."""
    async with open_sandbox(runtime, SandboxSpec(env={"WANTED": "a b"})) as sandbox:
        _same(await sandbox.bash('echo "$WANTED"'), 0, b"a b\n")
        _same(await sandbox.python("import os; os.environ['WANTED']"), 0, b"'a b'\n")


async def keeps_output_before_a_limit(runtime: SandboxRuntime) -> None:
    """What was said before the limit passed is returned."""
    async with open_sandbox(runtime) as sandbox:
        _same(await sandbox.bash("echo early; sleep 1000", limit_s=0.3), 124, b"early\n")
        result = await sandbox.python("print('early'); import time; time.sleep(1000)", limit_s=0.5)
        assert result.timed_out
        assert result.output.startswith(b"early\n"), result


async def _raises(kind: type[Exception], call: Awaitable[object]) -> None:
    try:
        await call
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


_PLAIN: tuple[Callable[[SandboxRuntime], Awaitable[None]], ...] = (
    is_listed_while_it_lives,
    runs_commands,
    keeps_a_session_over_a_limit,
    notices_a_session_that_died,
    queues_calls_of_a_session,
    moves_files,
    moves_trees,
    refuses_trees_as_files_do,
    refuses_files_as_files_do,
    is_gone_when_its_scope_is,
    ends_while_a_command_runs,
    can_be_cancelled_while_it_starts,
    refuses_an_id_twice,
    gives_the_session_back_after_a_cancelled_call,
)
_SHELL: tuple[Callable[[SandboxRuntime], Awaitable[None]], ...] = (
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
_WALLS: tuple[Callable[[SandboxRuntime], Awaitable[None]], ...] = (has_no_network,)
