"""The batch script of Slurm without Slurm: what one run leaves the next one goes on with, however it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from prorld.client import Client
from prorld.domain.job import AgentLimits, JobState, Sampling
from prorld.testing.byte_tokenizer import write_byte_tokenizer
from prorld.testing.scripted_engine.script import Latency, Script
from prorld.wire.jobs import SubmitJob
from tests.daemon.support import environ, processes, scripted_engine, until

SCRIPT = Path(__file__).parents[2] / "slurm" / "prorld-single.sbatch"
END_S = 60.0
# Long enough for a run to be ended in the middle of it.
TURN_S = 2.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("math" not in {point.name for point in entry_points(group="prorld.handlers")}, reason="no math"),
]


class Run:
    """One run of the script, as job 7."""

    def __init__(self, process: subprocess.Popen[str], place: Path) -> None:
        self.process = process
        self.shared = place / "shared"
        self.state = place / "node" / "prorld-7"

    def client(self) -> Client:
        """A client as a trainer elsewhere has it."""
        return Client(state_dir=self.shared)

    def daemon(self) -> int:
        """The daemon's pid."""
        [pid] = [pid for pid, parent, _ in processes() if parent == self.process.pid and b"serve" in command(pid)]
        return pid

    def ends(self) -> str:
        """What it said, once it has ended."""
        return self.process.communicate(timeout=END_S)[1]


def command(pid: int) -> bytes:
    """The command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def told(place: Path) -> str:
    """What is said of where the daemon listens; empty where nothing is."""
    file = place / "shared" / "endpoint.json"
    return file.read_text() if file.exists() else ""


@contextmanager
def run(place: Path, engine: str, **more: str) -> Iterator[Run]:
    """The script on a node of ours, until its daemon's address is known."""
    config = place / "prorld.toml"
    tokenizer = write_byte_tokenizer(place / "tokenizer")
    config.write_text(f'[warm]\ntotal = 0\n[policies.default]\ntokenizer = "{tokenizer}"\n')
    (place / "node").mkdir(exist_ok=True)
    env = environ(place / "unused") | {
        "PRORLD": str(Path(sys.executable).parent / "prorld"),
        "PRORLD_CONFIG": str(config),
        "PRORLD_HOST": "127.0.0.1",
        "PRORLD_SHARED": str(place / "shared"),
        "SLURM_JOB_ID": "7",
        "TMPDIR": str(place / "node"),
        **more,
    }
    del env["PRORLD_STATE"]
    env.pop("SLURM_TMPDIR", None)
    # A run that was killed leaves its own behind.
    before = told(place)
    args = ["bash", str(SCRIPT), "--backend", f"vllm={engine}", "--log-format", "json"]
    with (
        (place / "out").open("ab") as out,
        subprocess.Popen(args, env=env, stdout=out, stderr=subprocess.PIPE, text=True) as process,
    ):
        made = Run(process, place)
        try:
            until(lambda: told(place) not in ("", before), END_S, "the address is there")
            yield made
        finally:
            if process.poll() is None:
                os.kill(made.daemon(), signal.SIGKILL)
                process.wait(END_S)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[str]:
    """One that takes its time."""
    with scripted_engine(tmp_path, Script(turns=["\\boxed{4}"], latency=Latency(fixed_s=TURN_S))) as address:
        yield address


def job(name: str) -> SubmitJob:
    """One turn."""
    return SubmitJob(
        job_id=name,
        handler="math",
        instance={"problem": "What is 2 + 2?", "answer": "4"},
        sampling=Sampling(max_tokens=64),
        agent=AgentLimits(max_turns=1),
    )


def one_ends_one_runs(here: Run) -> None:
    """Job ``first`` has ended and been seen, ``second`` is under way."""
    with here.client() as client:
        assert client.wait(client.submit(job("first")).job_id, within_s=END_S).reward == 1.0
        client.submit(job("second"))
        until(lambda: client.get("second").state is JobState.RUNNING, END_S, "it runs")


def both_are_there(here: Run, before: str) -> None:
    """The token opens this one, too; the first has its end, the second one as well."""
    with here.client() as client:
        assert (here.shared / "token").read_text() == before
        assert client.get("first").reward == 1.0
        second = client.wait("second", within_s=END_S)
        assert (second.state, second.reward) == (JobState.DONE, 1.0)


@pytest.mark.parametrize("how", ["limit", "scancel", "daemon killed"])
def test_the_next_run_goes_on(tmp_path: Path, engine: str, how: str) -> None:
    """After the signal before the limit, after scancel that leaves no time, after the daemon's own death."""
    with run(tmp_path, engine, PRORLD__TIMEOUTS__DRAIN_S="0.1" if how == "limit" else "60", PRORLD_CUT_S="0.1") as here:
        token = (here.shared / "token").read_text()
        one_ends_one_runs(here)
        if how == "limit":
            here.process.send_signal(signal.SIGUSR1)
        elif how == "scancel":
            os.kill(here.daemon(), signal.SIGTERM)
            here.process.send_signal(signal.SIGTERM)
        else:
            os.kill(here.daemon(), signal.SIGKILL)
        assert "could not be put back" not in here.ends()
        # The node is as it was; of the daemon, what is kept is all that is left.
        assert list((tmp_path / "node").iterdir()) == []
        assert [path.name for path in here.shared.iterdir()] == ["kept"]
    with run(tmp_path, engine) as here:
        assert sorted(path.name for path in here.shared.iterdir()) == ["endpoint.json", "kept.before", "token"]
        both_are_there(here, token)
        here.process.send_signal(signal.SIGUSR1)
        here.ends()
        assert [path.name for path in here.shared.iterdir()] == ["kept"]


def test_a_run_that_was_killed_is_gone_on_with_on_its_node(tmp_path: Path, engine: str) -> None:
    """SIGKILL to all of it: the state is still on the node. Elsewhere a run begins anew and says so."""
    with run(tmp_path, engine) as here:
        one_ends_one_runs(here)
        here.process.send_signal(signal.SIGUSR1)
        here.ends()
    with run(tmp_path, engine) as here:
        token = (here.shared / "token").read_text()
        for pid in (here.process.pid, here.daemon()):
            os.kill(pid, signal.SIGKILL)
        here.process.wait(END_S)
        (here.shared / "endpoint.json").unlink()
    with run(tmp_path, engine) as here:
        both_are_there(here, token)
        for pid in (here.process.pid, here.daemon()):
            os.kill(pid, signal.SIGKILL)
        here.process.wait(END_S)
        (here.shared / "endpoint.json").unlink()
    (tmp_path / "node").rename(tmp_path / "another node")
    with run(tmp_path, engine) as here:
        with here.client() as client:
            assert client.list(limit=10).items == []
        here.process.send_signal(signal.SIGUSR1)
        assert "begins anew" in here.ends()


def test_nothing_is_kept_where_nothing_is_wanted(tmp_path: Path, engine: str) -> None:
    """``PRORLD_KEEP=no``: node and shared directory are as they were."""
    with run(tmp_path, engine, PRORLD_KEEP="no") as here:
        here.process.send_signal(signal.SIGUSR1)
        here.ends()
        assert list((tmp_path / "node").iterdir()) == []
        assert not here.shared.exists()
