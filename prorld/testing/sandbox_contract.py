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

from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import trio

from prorld.errors import SandboxError
from prorld.sandbox.contract import CommandResult, SandboxRuntime, SandboxSpec
from prorld.testing.sandbox_opening import JOB, open_sandbox, put_tree, raises, same, start_sandbox, tree_at, untroubled
from prorld.testing.sandbox_shell_checks import SHELL, WALLS

__all__ = ["SandboxCheck", "open_sandbox", "sandbox_checks"]

CHECK_SECONDS = 120.0


class SandboxCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One promise. ``run`` takes the runtime."""

    name: str
    run: Callable[[SandboxRuntime], Awaitable[None]]
    needs_shell: bool


def sandbox_checks(*, shell: bool = True, walls: bool = True) -> tuple[SandboxCheck, ...]:
    """All checks, or those that can be answered without running programs, or without walls."""
    plain = [SandboxCheck(name=check.__name__, run=_bounded(check), needs_shell=False) for check in _PLAIN]
    asked = [*SHELL, *(WALLS if walls else ())] if shell else []
    return (*plain, *(SandboxCheck(name=check.__name__, run=_bounded(check), needs_shell=True) for check in asked))


def _bounded(check: Callable[[SandboxRuntime], Awaitable[None]]) -> Callable[[SandboxRuntime], Awaitable[None]]:
    async def run(runtime: SandboxRuntime) -> None:
        with trio.fail_after(CHECK_SECONDS):
            await check(runtime)
        assert not [row for row in runtime.list() if row.job_id == JOB], "a sandbox is left over"

    return run


async def is_listed_while_it_lives(runtime: SandboxRuntime) -> None:
    """A sandbox shows in the list from its start to its end, and not a moment longer."""
    async with open_sandbox(runtime) as sandbox:
        assert sandbox.sandbox_id == "contract-1"
        assert sandbox.workdir.startswith("/")
        (row,) = [row for row in runtime.list() if row.job_id == JOB]
        assert (row.sandbox_id, row.state, row.runtime) == ("contract-1", "up", runtime.name)
        assert row.age_s >= 0
    assert not [row for row in runtime.list() if row.job_id == JOB]


async def runs_commands(runtime: SandboxRuntime) -> None:
    """A command's output and exit code come back as they are."""
    async with open_sandbox(runtime) as sandbox:
        result = await sandbox.bash("echo hello")
        same(result, 0, b"hello\n")
        assert untroubled(result), result
        assert not result.omitted_bytes
        same(await sandbox.bash("false"), 1, b"")
        same(await sandbox.python("print('hello')"), 0, b"hello\n")
        same(await sandbox.python(""), 0, b"")


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
            same(result, 0, b"on\n")
            assert untroubled(result), result


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
            same(result, 0, b"on\n")
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
        same(result, 0, f"{word}\n".encode())


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
        await raises(FileNotFoundError, sandbox.read_file("nowhere"))
        await raises(IsADirectoryError, sandbox.read_file("some"))
        await raises(ValueError, sandbox.read_file("some/file", max_bytes=4))
        await raises(OSError, sandbox.write_file("some", b"x"))
        assert await sandbox.read_file("some/file", max_bytes=5) == b"12345"


async def moves_trees(runtime: SandboxRuntime) -> None:
    """A tree of the host comes back as it went in; so does a file; what is in the way is not overwritten."""
    with TemporaryDirectory() as name:
        host = Path(name)
        given = {"a": b"1", "b/c": bytes(range(256)) * 4096, "b/d": b""}
        put_tree(host / "in", given)
        async with open_sandbox(runtime) as sandbox:
            await sandbox.upload(host / "in", "some/tree")
            assert await sandbox.read_file(f"{sandbox.workdir}/some/tree/b/d") == b""
            await sandbox.download("some/tree", host / "out")
            assert tree_at(host / "out") == given
            await sandbox.upload(host / "in/a", "some/tree/b/c")
            await sandbox.download("some/tree/b/c", host / "out/a")
            assert tree_at(host / "out") == given
            await raises(FileExistsError, sandbox.upload(host / "in", "some/tree"))
            await raises(IsADirectoryError, sandbox.upload(host / "in/a", "some/tree"))
            await raises(FileExistsError, sandbox.download("some/tree", host / "out"))


async def refuses_trees_as_files_do(runtime: SandboxRuntime) -> None:
    """Missing on either side, too large: each has its own error, and nothing comes to the target."""
    with TemporaryDirectory() as name:
        host = Path(name)
        async with open_sandbox(runtime) as sandbox:
            await sandbox.write_file("some/file", b"12345")
            await raises(FileNotFoundError, sandbox.download("nowhere", host / "out"))
            await raises(FileNotFoundError, sandbox.upload(host / "nowhere", "x"))
            await raises(ValueError, sandbox.download("some/file", host / "out", max_bytes=4))
            await raises(ValueError, sandbox.download("some", host / "out", max_bytes=4))
            assert tree_at(host) == {}
            await sandbox.download("some", host / "out", max_bytes=5)
        assert tree_at(host) == {"out/file": b"12345"}


async def is_gone_when_its_scope_is(runtime: SandboxRuntime) -> None:
    """Whoever holds on to a sandbox that has ended gets ``SandboxError``."""
    async with open_sandbox(runtime) as sandbox:
        pass
    await raises(SandboxError, sandbox.bash("echo hello"))
    await raises(SandboxError, sandbox.python("print('hello')"))
    await raises(SandboxError, sandbox.read_file("x"))
    await raises(SandboxError, sandbox.write_file("x", b""))
    await raises(SandboxError, sandbox.download("x", Path("/nowhere/x")))


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
                await start_sandbox(runtime, nursery, SandboxSpec(), "contract-1")
            nursery.cancel_scope.cancel("given up")
        assert not [row for row in runtime.list() if row.job_id == JOB], seconds


async def refuses_an_id_twice(runtime: SandboxRuntime) -> None:
    """A second sandbox of the same id is refused, and the first one lives on."""
    async with open_sandbox(runtime) as sandbox:
        await raises(SandboxError, runtime.run(SandboxSpec(), sandbox_id="contract-1", job_id=JOB))
        same(await sandbox.bash("echo on"), 0, b"on\n")


async def gives_the_session_back_after_a_cancelled_call(runtime: SandboxRuntime) -> None:
    """A caller that gives up on a call does not take the session from the next one."""
    async with open_sandbox(runtime) as sandbox:
        with trio.move_on_after(0.2):
            await sandbox.bash("sleep 1000")
        same(await sandbox.bash("echo on"), 0, b"on\n")


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
