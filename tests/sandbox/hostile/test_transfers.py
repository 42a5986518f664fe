"""Files in and out of a sandbox whose policy plays with them: what is read is its own, and nothing waits for long."""

from __future__ import annotations

import pytest
import trio

from prorld.errors import SandboxError
from prorld.sandbox import files
from prorld.sandbox.contract import Sandbox
from tests.sandbox.hostile.victim import host_run, victim
from tests.sandbox.walls import Wall

pytestmark = pytest.mark.slow

READ_LINK = "import os\nos.symlink({0!r}, {1!r})\nprint(open({1!r}).read())"
WRITE_LINK = "import os\nos.symlink({0!r}, {1!r})\nopen({1!r}, 'w').write('changed')"

# Whoever opens the file now waits until this process gives in, which it does not.
LEASE = (
    "import fcntl, os, signal, time; signal.signal(signal.SIGIO, signal.SIG_IGN); "
    'fcntl.fcntl(os.open("held", os.O_RDWR), 1024, fcntl.F_WRLCK); open("leased", "w"); time.sleep(60)'
)
FLIP = """
cd /work; echo good > file; mkfifo pipe; mkdir dir; ln -s {secret} away; ln -s /dev/zero endless
while :; do for kind in file pipe dir away endless; do ln -sfn $kind next; mv -fT next x; done; rm -f x; done
"""
SWAP = """
cd /work; rm -rf x
while :; do echo good > x; rm -f x; mkfifo x; rm -f x; ln -s {secret} x; rm -f x; mkdir x; rmdir x; done
"""


async def test_links_are_the_sandboxes_own(sandbox: Sandbox, wall: Wall) -> None:
    """A link to a file of the host leads nowhere, for reads and for writes; beside the wall it leads there."""
    if not wall.isolates:
        pytest.skip("there is no wall")
    with victim() as aim:
        secret = aim.home / "secret"
        assert aim.secret in host_run(READ_LINK.format(str(secret), f"{aim.home}/link"))
        for target in (str(secret), f"/proc/{aim.process.pid}/root{secret}", f"/{'../' * 30}{secret}"):
            await sandbox.bash(f"rm -f link; ln -s {target} link")
            with pytest.raises(OSError, match="no such file"):
                await sandbox.read_file("link")
        for name in ("environ", "root" + str(secret), "cwd/secret"):
            for pid in (1, aim.process.pid):
                await sandbox.bash(f"rm -f link; ln -s /proc/{pid}/{name} link")
                try:
                    content = await sandbox.read_file("link")
                except (OSError, ValueError):
                    continue
                assert aim.secret.encode() not in content
        await sandbox.bash(f"rm -f link; ln -s {secret} link")
        with pytest.raises(OSError, match="link"):
            await sandbox.write_file("link", b"changed")
        assert secret.read_text() == aim.secret
        host_run(WRITE_LINK.format(str(secret), f"{aim.home}/other-link"))
        assert secret.read_text() == "changed"


@pytest.mark.parametrize("race", [FLIP, SWAP], ids=["flipped links", "swapped files"])
async def test_races(race: str, sandbox: Sandbox, wall: Wall, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a path turns from a file into a pipe, a directory or a link, a transfer gives content or says why not."""
    monkeypatch.setattr(files, "FILE_SECONDS", 0.5)
    answers: list[bytes] = []
    refusals: set[str] = set()
    with victim() as aim:
        secret = aim.home / "secret"
        target = secret if wall.isolates else "/etc/hostname"
        await sandbox.bash(f"({race.format(secret=target)}) >/dev/null 2>&1 & disown")
        deadline = trio.current_time() + 3
        while trio.current_time() < deadline:
            with trio.fail_after(10):
                try:
                    answers.append(await sandbox.read_file("x", max_bytes=4096))
                    await sandbox.write_file("x", b"ours\n")
                except (OSError, ValueError, SandboxError) as exc:  # a pipe at the wrong moment takes all of its time
                    refusals.add(type(exc).__name__)
        assert secret.read_text() == aim.secret
        assert not any(aim.secret.encode() in answer for answer in answers)
    assert answers or refusals
    assert (await sandbox.bash("echo on", limit_s=5)).output.endswith(b"on\n")


async def test_a_lease(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that keeps its own file from being opened has made it unreadable; that is no fault of the sandbox's."""
    monkeypatch.setattr(files, "FILE_SECONDS", 1.0)
    await sandbox.bash(f"echo x > held; python3 -c '{LEASE}' >/dev/null 2>&1 & disown")
    await sandbox.bash("while [ ! -e leased ]; do sleep 0.01; done", limit_s=5)
    with pytest.raises((OSError, ValueError)):
        await sandbox.read_file("held")


async def test_endless_and_huge(sandbox: Sandbox) -> None:
    """What has no end, or more than is wanted, is refused at once."""
    await sandbox.bash("truncate -s 900M big; ln -s /dev/zero zero; ln -s /dev/tty tty; mkfifo pipe; ln -s loop loop")
    with trio.fail_after(10):
        for name in ("big", "zero", "tty", "pipe", "loop", "/proc/self/mem", "/dev/full"):
            with pytest.raises((ValueError, OSError)):
                await sandbox.read_file(name)
        for name in ("zero", "tty", "pipe", "loop", "/dev/full", "/proc/self/nothing"):
            with pytest.raises((ValueError, OSError)):
                await sandbox.write_file(name, b"x" * 100_000)
    assert (await sandbox.bash("echo on")).output == b"on\n"


async def test_odd_names(sandbox: Sandbox) -> None:
    """Names that look like options, commands or ends of lines are names."""
    for name in (
        "-n",
        "--help",
        "a b",
        "$(touch pwned)",
        "`touch pwned`",
        "; touch pwned",
        "a\nb",
        "é",
        "\\x",
        "'",
        '"',
    ):
        await sandbox.write_file(name, name.encode())
        assert await sandbox.read_file(name) == name.encode()
    assert b"pwned\n" not in (await sandbox.bash("ls")).output.replace(b"touch pwned", b"")
