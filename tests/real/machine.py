"""A machine of its own with a real systemd as its first process, in a container that shares this host's /usr.

Nothing of it is on a disk: root, /etc and /var are memory and gone with it. It needs root and systemd-nspawn.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CGROUPS = Path("/sys/fs/cgroup")
BOOT_S = 30.0
HALT = signal.SIGRTMIN + 4
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


class Machine:
    """A container that runs."""

    def __init__(self, leader: int, log: Path) -> None:
        self.leader = leader
        self.log = log

    def start(self, *argv: str) -> subprocess.Popen[str]:
        """Start a command in it, as its root."""
        command = ["nsenter", "-t", str(self.leader), "-a", "--", *argv]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env={"PATH": PATH}, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def run(self, *argv: str, check: bool = True, within_s: float = 60.0) -> str:
        """Run a command in it; its output."""
        with self.start(*argv) as process:
            try:
                out, err = process.communicate(timeout=within_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        assert not check or process.returncode == 0, f"{argv}: {process.returncode}\n{out}\n{err}\n{self.journal()}"
        return out

    def journal(self, *units: str) -> str:
        """What its services said."""
        command = [
            "nsenter",
            "-t",
            str(self.leader),
            "-a",
            "--",
            "journalctl",
            "--no-pager",
            "-o",
            "cat",
            "-n",
            "400",
            *units,
        ]
        return subprocess.run(command, env={"PATH": PATH}, capture_output=True, text=True, check=False).stdout

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.run("systemctl", "show", "-P", name, unit).strip()


def why_not() -> str | None:
    """Why there can be no such machine here."""
    if os.geteuid() != 0:
        return "a container with a systemd of its own needs root"
    missing = [name for name in ("systemd-nspawn", "nsenter", "systemctl") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} is not installed (Debian: systemd, systemd-container)"
    if not any(os.access(place, os.W_OK) for place in hierarchies()):
        return f"{CGROUPS} can't be written here"
    return None


def hierarchies() -> list[Path]:
    """Where systemd wants a cgroup: on some hosts there are two hierarchies, on most there is one."""
    both = [CGROUPS / "systemd", CGROUPS / "unified"]
    return [place for place in both if place.is_dir()] or [CGROUPS]


def python_binds() -> list[str]:
    """What running this project needs beside /usr: interpreter, environment and source, each where it is."""
    wanted = {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), ROOT}
    outside = [path for path in sorted(wanted) if not path.is_relative_to("/usr")]
    return [str(path) for path in outside if not any(path != other and path.is_relative_to(other) for other in outside)]


@contextmanager
def booted(binds: Sequence[str], place: Path) -> Iterator[Machine]:
    """Boot a machine that sees ``binds`` (``FROM`` or ``FROM:TO``) read-only; it is halted and gone afterwards."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    name = f"prorld-{secrets.token_hex(4)}"
    groups = [hierarchy / name for hierarchy in hierarchies()]
    log = place / "machine.log"
    command = ["systemd-nspawn", "--quiet", "-D", "/", "--volatile=yes", "--register=no", "--keep-unit"]
    command += ["--private-network", "--machine", name, "--boot", "--console=read-only"]
    command += [f"--bind-ro={bind}" for bind in [*python_binds(), *binds]]
    # Only what a unit needs: the host's own services are in the shared /usr, too, and are none of ours.
    command += ["systemd.firstboot=off", "systemd.unit=basic.target"]
    # There is a loopback and nothing to wait for.
    command += ["systemd.mask=systemd-networkd.service", "systemd.mask=systemd-networkd-wait-online.service"]
    for group in groups:
        group.mkdir()

    # In a control group of its own from the start: a container makes others beside the one that it is in.
    enter = " && ".join(f"echo $$ >{group}/cgroup.procs" for group in groups)
    command = ["sh", "-c", f'{enter} && exec "$@"', "sh", *command]
    try:
        with (
            log.open("wb") as out,
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out) as nspawn,
        ):
            try:
                yield _wait_until_up(nspawn, log)
            finally:
                _halt(nspawn)
    finally:
        for group in groups:
            _remove(group)


def _wait_until_up(nspawn: subprocess.Popen[bytes], log: Path) -> Machine:
    deadline = time.monotonic() + BOOT_S
    while time.monotonic() < deadline and nspawn.poll() is None:
        leader = _child(nspawn.pid)
        if leader is not None:
            machine = Machine(leader, log)
            if machine.run("systemctl", "is-system-running", check=False).strip() in {"running", "degraded"}:
                _open(machine)
                return machine
        time.sleep(0.1)
    raise AssertionError(f"no systemd within {BOOT_S} s: {log.read_text(errors='replace')}")


def _open(machine: Machine) -> None:
    """Let the machine be as open as one that is no container."""
    for bind in python_binds():
        # The directories above are made for root alone, and the daemon is somebody else.
        machine.run("chmod", "a+x", *[str(parent) for parent in Path(bind).parents])
    # Read-only for containers; bubblewrap writes a limit of its own namespace there.
    machine.run("mount", "-o", "remount,bind,rw", "/proc/sys")
    machine.run("ip", "link", "set", "lo", "up")


def _child(pid: int) -> int | None:
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return int(found[0]) if found else None


def _halt(nspawn: subprocess.Popen[bytes]) -> None:
    leader = _child(nspawn.pid)
    if leader is not None:
        os.kill(leader, HALT)
    try:
        nspawn.wait(20)
    except subprocess.TimeoutExpired:
        nspawn.kill()


def _remove(group: Path) -> None:
    """Remove a cgroup and what a container made below it; empty ones only, so nobody is hurt."""
    for directory, _, _ in os.walk(group, topdown=False):
        for _ in range(50):
            try:
                Path(directory).rmdir()
                break
            except OSError:
                time.sleep(0.05)
