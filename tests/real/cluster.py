"""A Slurm of one node on this machine, out of the distribution's packages: own key, own ports, own directory.

It touches nothing outside its directory and ends only the processes that it started.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "sinfo")
UP_S = 30.0
END_S = 10.0

# linuxproc and no task plugin: the one set that needs no control groups, which containers seldom have.
CONF = """\
ClusterName=tests
FirstJobId={first}
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
CredType=cred/munge
SlurmctldPort={controller}
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.log
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=30
MinJobAge=3600
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 Port={node} CPUs=8 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE OverTimeLimit=0 State=UP
"""


class Cluster:
    """A Slurm that runs. Its commands go through ``run``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def environ(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """What a command of Slurm needs."""
        return {**os.environ, "SLURM_CONF": str(self.root / "slurm.conf"), **(more or {})}

    def run(self, *argv: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """A command to its end; its output."""
        done = subprocess.run(
            argv, env=self.environ(env), cwd=cwd, capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 0, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout.strip()

    def job(self, job_id: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        fields = self.run("scontrol", "show", "job", "-o", job_id).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def logs(self) -> str:
        """What its daemons said."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.root.glob("*.log")))


def why_not() -> str | None:
    """Why there can be no Slurm here."""
    missing = [name for name in PROGRAMS if which(name) is None]
    return f"{', '.join(missing)} is not installed (Debian: slurm-wlm, munge)" if missing else None


def which(program: str) -> str | None:
    """Where a program is; daemons are in directories that a user's PATH leaves out."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@contextmanager
def cluster(root: Path) -> Iterator[Cluster]:
    """Start a Slurm in ``root``, and end it."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    made = Cluster(root)
    _write(root)
    started: list[subprocess.Popen[bytes]] = []
    try:
        key, sock = root / "munge.key", root / "munge.socket"
        files = [f"--{name}-file={root}/munge.{name}" for name in ("pid", "log", "seed")]
        # --force: the directory of a test is closed to others, which munge takes for a mistake.
        started.append(
            _daemon(made, "munged", "--force", "--foreground", f"--key-file={key}", f"--socket={sock}", *files)
        )
        _until(sock.exists, "munge is there", made)
        started.append(_daemon(made, "slurmctld", "-D", "-i"))
        started.append(_daemon(made, "slurmd", "-D", "-N", _host()))
        _until(lambda: _idle(made), "the node is idle", made)
        yield made
    finally:
        if len(started) == 3:
            _cancel_all(made)
        for process in reversed(started):
            _end(process)


def _cancel_all(made: Cluster) -> None:
    """What a test that failed left: a Slurm that ends leaves its jobs running, for the next one to find."""
    me = pwd.getpwuid(os.getuid()).pw_name
    for full in ("--signal=KILL", "--full"), ("--quiet",):
        subprocess.run(["scancel", f"--user={me}", *full], env=made.environ(), check=False, capture_output=True)
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        done = subprocess.run(["squeue", "-h"], env=made.environ(), check=False, capture_output=True, text=True)
        if not done.stdout.strip():
            return
        time.sleep(0.1)


def _host() -> str:
    return socket.gethostname().split(".")[0]


def _write(root: Path) -> None:
    key = root / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    for name in ("state", "spool"):
        (root / name).mkdir()
    controller, node = _free_ports(2)
    user = pwd.getpwuid(os.getuid()).pw_name
    conf = CONF.format(root=root, host=_host(), user=user, controller=controller, node=node, first=_first())
    (root / "slurm.conf").write_text(conf)
    # The default looks for a kind of hierarchy; this one is never touched by the plugins above.
    (root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")


def _first() -> int:
    """Numbers of jobs that no other Slurm of the tests has given: they tell processes apart."""
    return 1000 + secrets.randbelow(60_000_000)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def _daemon(made: Cluster, program: str, *arguments: str) -> subprocess.Popen[bytes]:
    found = which(program)
    assert found is not None
    with (made.root / f"{program}.out.log").open("wb") as out:
        return subprocess.Popen(
            [found, *arguments], env=made.environ(), stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip


def _idle(made: Cluster) -> bool:
    done = subprocess.run(["sinfo", "-h", "-o", "%T"], env=made.environ(), capture_output=True, text=True, check=False)
    return done.stdout.strip() == "idle"


def _until(condition: object, what: str, made: Cluster) -> None:
    assert callable(condition)
    deadline = time.monotonic() + UP_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {UP_S} s: {what}\n{made.logs()}"
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
        return
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
