"""Cgroups: what is found of a delegation, and the life of a sandbox's own where the kernel lets this user make them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorld.sandbox import cgroups
from prorld.sandbox.cgroups import end_cgroup, find_delegation, held_in, ran_out, reap_cgroups
from prorld.sandbox.reaper import reap
from tests.sandbox.support import lives


def a_proc(tmp_path: Path, *, own: str, controllers: str | None, mounted: bool = True) -> Path:
    """A /proc/self and, where there are ``controllers``, the cgroup that it speaks of."""
    proc, tree = tmp_path / "proc", tmp_path / "tree"
    proc.mkdir()
    mount = f"30 23 0:26 / {tree} rw - cgroup2 cgroup2 rw\n" if mounted else ""
    (proc / "mountinfo").write_text(f"22 1 8:1 / / rw - ext4 /dev/sda rw\n{mount}")
    (proc / "cgroup").write_text(f"4:memory:/x\n0::{own}\n")
    if controllers is not None:
        place = tree / own.lstrip("/")
        place.mkdir(parents=True)
        (place / "cgroup.controllers").write_text(controllers)
        for name in ("cgroup.procs", "cgroup.subtree_control"):
            (place / name).write_text("")
    return proc


@pytest.mark.parametrize(
    ("own", "controllers", "mounted", "lacking"),
    [
        ("/system.slice/prorld.service", "cpu memory pids", True, None),
        ("/system.slice/prorld.service", "cpu pids", True, "no controller for memory"),
        ("/system.slice/prorld.service", None, True, "not delegated"),
        ("/", "cpu memory pids", True, "root cgroup"),
        ("/a", "memory pids", False, "no cgroup v2"),
    ],
)
def test_delegation(tmp_path: Path, own: str, controllers: str | None, mounted: bool, lacking: str | None) -> None:
    """What keeps cgroups from being used is named; with nothing missing the place is this process's own."""
    found = find_delegation(a_proc(tmp_path, own=own, controllers=controllers, mounted=mounted))
    assert (found.lacking is None) == (lacking is None)
    if lacking is None:
        assert found.place == tmp_path / "tree" / own.lstrip("/")
        assert found.controllers == ("memory", "pids")
    else:
        assert lacking in str(found.lacking)


def test_what_is_counted(tmp_path: Path) -> None:
    """Memory and the kernel's kills are read where they are counted; elsewhere nothing is claimed."""
    assert held_in(tmp_path) is None
    assert not ran_out(tmp_path)
    (tmp_path / "memory.current").write_text("4096\n")
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 1\noom_kill 0\noom_group_kill 0\n")
    assert held_in(tmp_path) == 4096
    assert not ran_out(tmp_path)
    (tmp_path / "memory.events").write_text("oom 1\noom_kill 3\n")
    assert ran_out(tmp_path)


@pytest.fixture
def tree() -> Iterator[Path]:
    """A cgroup of version 2 of our own; the test is skipped where none can be made."""
    mount = cgroups._mount_point(Path("/proc/self/mountinfo").read_text())
    if mount is None:
        pytest.skip("no cgroup v2 is mounted")
    place = mount / f"prorld-test-{os.getpid()}"
    try:
        place.mkdir()
    except OSError as exc:
        pytest.skip(f"no cgroup can be made: {exc}")
    if not (place / "cgroup.kill").exists():
        place.rmdir()
        pytest.skip("this kernel has no cgroup.kill")
    yield place
    left = [str(path) for path in place.glob("prorld-*/*/") if not path.name.startswith(".")]
    for path in sorted(place.rglob("*/"), reverse=True):
        end_cgroup(path)
    place.rmdir()
    assert left == []


def test_everything_in_a_cgroup_is_killed(tree: Path) -> None:
    """Whatever its processes ignore, whatever session they are in; it is gone then, and can be ended again."""
    place = tree / "one"
    place.mkdir()
    script = f"echo 0 > {place}/cgroup.procs; trap '' TERM HUP; setsid sleep 100 & setsid sleep 100 & echo up; wait"
    with subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        inside = {int(word) for word in (place / "cgroup.procs").read_text().split()}
        assert len(inside) >= 2
        assert end_cgroup(place)
        assert process.wait() == -signal.SIGKILL
    assert not place.exists()
    assert end_cgroup(place)


DAEMON = textwrap.dedent("""
    import os, sys, trio
    from pathlib import Path
    from prorld.sandbox.bubblewrap import Bubblewrap
    from prorld.sandbox.cgroups import Subtree
    from prorld.sandbox.runtime import Runtime
    from prorld.sandbox.warden_client import run_warden
    from prorld.testing.sandbox_contract import open_sandbox

    async def main():
        os.umask(0o077)
        tree = Path(sys.argv[1])
        (tree / "cgroup.procs").write_text("0")
        user = (65534, 65534) if os.getuid() == 0 else (os.getuid(), os.getgid())
        subtree = Subtree(tree, "killed", user=user, controllers=())
        subtree.open()
        async with trio.open_nursery() as nursery:
            warden = await nursery.start(run_warden)
            runtime = Runtime(Bubblewrap(), warden, runtime_dir=Path(sys.argv[2]), boot_id="killed", cgroups=subtree)
            async with open_sandbox(runtime, sandbox_id="over") as sandbox:
                await sandbox.bash("setsid sleep 1000 &")
                assert (tree / "prorld-killed" / "over").is_dir()
            assert not (tree / "prorld-killed" / "over").exists()
            async with open_sandbox(runtime, sandbox_id="alive") as sandbox:
                await sandbox.bash("setsid sleep 1000 & (trap '' HUP TERM; sleep 1000) &")
                await sandbox.python("import subprocess; subprocess.Popen(['setsid', 'sleep', '1000'])")
                await sandbox.write_file("file", b"x")
                print("up", flush=True)
                await trio.sleep_forever()

    trio.run(main)
""")


@pytest.mark.slow
def test_sandboxes_live_in_their_own(tree: Path, runtime_dir: Path) -> None:
    """All of a sandbox is in its cgroup and nothing else is; of a killed daemon no cgroup is left after a sweep."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    boot = tree / "prorld-killed"
    with subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(tree), str(runtime_dir)], stdout=subprocess.PIPE, env=env
    ) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == b"up\n"
        inside = {int(word) for word in (boot / "alive" / "cgroup.procs").read_text().split()}
        outside = {int(word) for word in (boot / ".daemon" / "cgroup.procs").read_text().split()}
        assert len(inside) >= 7  # bubblewrap and its first process, two sessions, and three that they have started
        assert daemon.pid in outside
        assert len(outside) == 2  # and its warden
        assert reap_cgroups(tree) == 0
        daemon.kill()
    due = time.monotonic() + 5
    while any(lives(pid) for pid in inside | outside) and time.monotonic() < due:
        time.sleep(0.02)
    assert reap_cgroups(tree) == 1
    assert not boot.exists()
    assert reap(runtime_dir, boot_id="next").processes == 0


def test_a_place_that_is_in_use_is_left_as_it_was(tree: Path) -> None:
    """Where the controllers can't be shared out this process goes back to where it was, and nothing is left."""
    before = (tree / "cgroup.procs").read_text()
    script = textwrap.dedent(f"""
        from pathlib import Path
        from prorld.sandbox.cgroups import Subtree
        tree = Path({str(tree)!r})
        (tree / "cgroup.procs").write_text("0")
        try:
            Subtree(tree, "b", user=(65534, 65534), controllers=("nonsense",)).open()
        except OSError:
            assert (tree / "cgroup.procs").read_text().split(), "went back"
            print(*(path.name for path in tree.glob("prorld-*")))
    """)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    said = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert said.stdout == "\n"
    assert (tree / "cgroup.procs").read_text() == before
