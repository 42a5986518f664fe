"""Child processes die with their group, their output is bounded, their pipes never block. Real processes, real time."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import trio

from prorld.inference import lifeline_exec
from prorld.kit import process as process_module
from prorld.kit.process import Child, child, run_group

ENV = {"PATH": os.environ["PATH"]}


def lives(pid: int) -> bool:
    """Whether the process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in {b"Z", b"X"}
    except OSError:
        return False


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    """Each test gives back every descriptor."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def pids_in(path: Path) -> list[int]:
    """The process ids that a script has written so far, one a line."""
    whole_lines = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [int(line) for line in whole_lines.split()]


async def until(condition: Callable[[], object]) -> None:
    """Wait for something outside of trio."""
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.005)


async def sh(script: str, **options) -> process_module.ProcessResult:
    """Run a shell script within ten seconds."""
    with trio.fail_after(10):
        return await run_group(["bash", "-c", script], env=ENV, **options)


async def test_a_result_is_exit_code_and_both_outputs():
    """A failing program is a result like any other."""
    result = await sh("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr, result.drained) == (3, b"out\n", b"err\n", True)


async def test_a_signal_is_a_negative_exit_code():
    """Killed by a signal, the exit code is its negative number."""
    assert (await sh("kill -9 $$")).exit_code == -9


async def test_both_outputs_can_be_one():
    """Merged, they keep their order."""
    result = await sh("echo 1; echo 2 >&2; echo 3", merge_stderr=True)
    assert (result.stdout, result.stderr) == (b"1\n2\n3\n", b"")


async def test_input_of_any_size_goes_in_while_output_comes_out():
    """More than two pipes hold goes through, without a deadlock."""
    data = os.urandom(1 << 20)
    assert (await sh("cat", stdin=data, output_bytes_max=1 << 20)).stdout == data


async def test_without_input_there_is_end_of_file():
    """A program that reads its standard input gets nothing and goes on."""
    assert (await sh("cat; echo end")).stdout == b"end\n"


async def test_a_program_may_ignore_its_input():
    """Input that nobody reads is no error."""
    assert (await sh("exit 0", stdin=b"x" * (1 << 20))).exit_code == 0


async def test_output_is_read_to_the_end_and_kept_in_bounds():
    """A flood ends, both ends of it are kept, the number of dropped bytes is true."""
    result = await sh("echo first; head -c 5000000 /dev/zero; echo last", output_bytes_max=1000)
    assert result.stdout.startswith(b"first\n")
    assert result.stdout.endswith(b"last\n")
    assert result.stdout_omitted_bytes == 5_000_011 - 1000
    assert len(result.stdout) < 1100


async def test_the_environment_is_what_was_given():
    """Nothing of this process's environment reaches the child."""
    result = await run_group(["/usr/bin/env"], env={"A": "1"})
    assert result.stdout == b"A=1\n"


async def test_a_session_of_its_own():
    """The child leads a new session and group."""
    result = await run_group(
        [sys.executable, "-Sc", "import os; print(os.getpid() == os.getsid(0) == os.getpgid(0))"], env=ENV
    )
    assert result.stdout == b"True\n"


@pytest.mark.parametrize("argv", [["/no/such/program"], ["/etc/passwd"]])
async def test_what_can_not_be_started_is_an_os_error(argv: list[str]):
    """A missing or forbidden program raises, and leaves no descriptor (checked after each test)."""
    with pytest.raises(OSError, match=r"No such file|Permission denied"):
        await run_group(argv, env=ENV)
    async with trio.open_nursery() as nursery:
        with pytest.raises(OSError, match=r"No such file|Permission denied"):
            await nursery.start(partial(child, argv, env=ENV, stdin="pipe", stdout="pipe", lifeline=True))


async def test_nothing_starts_in_a_cancelled_scope(tmp_path: Path):
    """Cancelled before the start, the program never runs."""
    with trio.CancelScope() as scope:
        scope.cancel()
        await sh(f"touch {tmp_path}/ran")
    assert scope.cancelled_caught
    assert not (tmp_path / "ran").exists()


async def test_a_grandchild_that_holds_the_output_does_not_hold_the_result():
    """When the child ends, the rest of its group is killed and the result comes, whoever has the pipe open."""
    result = await sh("sleep 1000 & (trap '' TERM HUP; sleep 1000) & echo $!; exit 0")
    assert result.exit_code == 0
    assert result.drained
    assert not lives(int(result.stdout))


async def test_what_left_the_session_delays_the_result_only_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An escaped process with the pipe open costs the drain time, and the result says that more may have come."""
    monkeypatch.setattr(process_module, "DRAIN_SECONDS_MAX", 0.1)
    pids = tmp_path / "pids"
    result = await sh(f"setsid bash -c 'echo $$ >> {pids}; exec sleep 1000' & until [ -s {pids} ]; do sleep 0.01; done")
    os.kill(pids_in(pids)[0], signal.SIGKILL)
    assert not result.drained


@pytest.mark.parametrize("deaf", [False, True], ids=["listening", "deaf"])
async def test_cancel_kills_the_group(tmp_path: Path, deaf: bool):
    """Child and grandchildren are gone when the cancel returns, whether they heed SIGTERM or not."""
    trap = "trap '' TERM HUP INT;" if deaf else ""
    script = f"{trap} for i in 1 2 3; do (echo $BASHPID >> {tmp_path}/pids; sleep 1000; sleep 1000) & done; wait; wait"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(run_group, ["bash", "-c", script], env=ENV, term_seconds=0.1))
        await until(lambda: len(pids_in(tmp_path / "pids")) == 3)
        pids = pids_in(tmp_path / "pids")
        assert all(map(lives, pids))
        nursery.cancel_scope.cancel()
    assert not any(map(lives, pids))


async def test_sigterm_comes_first_and_leaves_time(tmp_path: Path):
    """A child that heeds SIGTERM may say a lot and finish its work before the cancel returns."""
    script = (
        f"trap 'head -c 500000 /dev/zero; touch {tmp_path}/tidy; exit' TERM; echo $$ >> {tmp_path}/pids;"
        "while :; do sleep 0.01; done"
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(run_group, ["bash", "-c", script], env=ENV, term_seconds=10))
        await until(lambda: pids_in(tmp_path / "pids"))
        nursery.cancel_scope.cancel()
    assert (tmp_path / "tidy").exists()


@pytest.mark.slow
async def test_cancel_at_any_moment_leaves_nothing(tmp_path: Path):
    """Cancelled after 0 to 38 ms, nothing of the group is left: what got to say its name has gone."""
    for number in range(20):
        with trio.move_on_after(number / 500):
            await run_group(
                ["bash", "-c", f"echo $$ >> {tmp_path}/pids; sleep 1000 & echo $! >> {tmp_path}/pids; wait"], env=ENV
            )
    pids = pids_in(tmp_path / "pids")
    assert pids
    assert not any(map(lives, pids))


async def start(nursery: trio.Nursery, script: str, **options) -> Child:
    """Start a shell script as a lasting child."""
    with trio.fail_after(10):
        handle = await nursery.start(partial(child, ["bash", "-c", script], env=ENV, **options))
    assert isinstance(handle, Child)
    return handle


async def test_a_child_is_talked_to():
    """What goes into its stdin comes back from its stdout while it lives."""
    async with trio.open_nursery() as nursery:
        handle = await start(nursery, "cat", stdin="pipe", stdout="pipe")
        for word in (b"one", b"two"):
            await handle.stdin.send_all(word)
            assert await handle.stdout.receive_some() == word
        assert handle.exit_code != 0
        handle.stdin.close()
        assert await handle.wait() == 0
        assert handle.exit_code == 0
        handle.stdout.close()


async def test_the_last_words_of_a_child_can_be_read():
    """After a child ended by itself its output is there, and who waits for it gets its exit code."""
    async with trio.open_nursery() as nursery:
        handle = await start(nursery, "echo last words; exit 7", stdout="pipe", stderr="stdout")
        assert await handle.wait() == 7
        assert await handle.stdout.receive_some() == b"last words\n"
        assert await handle.stdout.receive_some() == b""
        handle.stdout.close()


async def test_a_child_that_ends_takes_its_group_with_it():
    """wait() returns when the rest of the group has gone, too."""
    async with trio.open_nursery() as nursery:
        handle = await start(nursery, "(trap '' TERM; sleep 1000) & echo $!", stdout="pipe")
        grandchild = int(await handle.stdout.receive_some())
        assert await handle.wait() == 0
        assert not lives(grandchild)
        handle.stdout.close()


async def test_cancel_ends_a_child_before_it_returns():
    """A deaf child with a grandchild is gone when its scope has been left; whoever waits learns how it ended."""
    codes: list[int] = []

    async def watch(handle: Child) -> None:
        codes.append(await handle.wait())

    async with trio.open_nursery() as outer:
        async with trio.open_nursery() as nursery:
            script = "trap '' TERM; sleep 1000 & echo $! $$; wait; sleep 1000"
            handle = await start(nursery, script, stdout="pipe", term_seconds=0.1)
            pids = [int(pid) for pid in (await handle.stdout.receive_some()).split()]
            assert pids[1] == handle.pid
            outer.start_soon(watch, handle)
            nursery.cancel_scope.cancel()
        assert not any(map(lives, pids))
        handle.signal(signal.SIGTERM)
    assert codes == [-signal.SIGKILL]


async def test_a_signal_goes_to_the_group():
    """signal() reaches the child and its children."""
    async with trio.open_nursery() as nursery:
        handle = await start(
            nursery,
            "(trap 'echo inner; exit' USR1; while :; do sleep 0.01; done) & trap 'wait; exit 5' USR1; echo up; wait",
            stdout="pipe",
        )
        assert await handle.stdout.receive_some() == b"up\n"
        await trio.sleep(0.05)
        handle.signal(signal.SIGUSR1)
        assert await handle.wait() == 5
        assert await handle.stdout.receive_some() == b"inner\n"
        handle.stdout.close()


async def test_a_file_can_take_the_output(tmp_path: Path):
    """A descriptor of the caller's takes the output and stays the caller's."""
    with (tmp_path / "log").open("wb") as log:
        async with trio.open_nursery() as nursery:
            handle = await start(nursery, "echo out; echo err >&2", stdout=log.fileno(), stderr="stdout")
            await handle.wait()
        log.write(b"mine\n")
    assert (tmp_path / "log").read_bytes() == b"out\nerr\nmine\n"


async def test_without_a_pidfd_it_works_all_the_same(monkeypatch: pytest.MonkeyPatch):
    """Out of descriptors right after the start, the child is still watched and still killed."""

    def refuse(pid: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert (await sh("exit 4")).exit_code == 4
    async with trio.open_nursery() as nursery:
        handle = await start(nursery, "sleep 1000", term_seconds=0.1)
        nursery.cancel_scope.cancel()
    assert not lives(handle.pid)


PARENT = """
import os, sys, trio
from functools import partial
from prorld.kit.process import child

async def main():
    async with trio.open_nursery() as nursery:
        handle = await nursery.start(partial(
            child, ["bash", "-c", "trap '' TERM; read -u $LIFELINE_FD; exit 0"],
            env={"PATH": os.environ["PATH"]}, lifeline=True))
        print(handle.pid, flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.slow
async def test_the_lifeline_tells_a_child_that_its_parent_was_killed():
    """SIGKILL of the parent, which can clean up nothing, ends a child that reads its lifeline."""
    env = {**ENV, "PYTHONPATH": os.pathsep.join(sys.path)}
    async with trio.open_nursery() as nursery:
        parent: Child = await nursery.start(partial(child, [sys.executable, "-c", PARENT], env=env, stdout="pipe"))
        with trio.fail_after(20):
            grandchild = int(await parent.stdout.receive_some())
        assert lives(grandchild)
        assert os.getsid(grandchild) == grandchild
        os.kill(parent.pid, signal.SIGKILL)
        with trio.fail_after(5):
            assert await parent.wait() == -signal.SIGKILL
        await until(lambda: not lives(grandchild))
        parent.stdout.close()


async def test_a_child_that_is_tied_to_its_lifeline_has_its_time_to_end():
    """It hears SIGTERM and ends in its own way; only the end of its parent ends it at once."""
    said = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print(1, flush=True)"
    argv = [sys.executable, "-P", lifeline_exec.__file__, sys.executable, "-c", f"{said}; time.sleep(1000)"]
    async with trio.open_nursery() as nursery:
        start = partial(child, argv, env=ENV, stdout="pipe", lifeline=True, term_seconds=20.0)
        handle: Child = await nursery.start(start)
        with trio.fail_after(20):
            assert await handle.stdout.receive_some() == b"1\n"
        nursery.cancel_scope.cancel()
    assert handle.exit_code == 7
