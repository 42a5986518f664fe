"""The batch script under a real Slurm: a job end to end, a drain before the time limit, scancel, and nothing left."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from prorld.client import Client
from prorld.client.errors import ClientError
from prorld.domain.job import AgentLimits, JobState, Sampling
from prorld.domain.outcome import OutcomeKind
from prorld.testing.byte_tokenizer import write_byte_tokenizer
from prorld.testing.scripted_engine.script import Latency, Script
from prorld.wire.jobs import SubmitJob
from tests.daemon.support import environ, scripted_engine, until
from tests.real.cluster import Cluster, cluster

HERE = [point.name for point in entry_points(group="prorld.handlers")]

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif("math" not in HERE, reason="prorld-math is not installed"),
]

SCRIPT = Path(__file__).parents[2] / "slurm" / "prorld-single.sbatch"
TURNS = [
    '<tool_call>{"name": "bash", "arguments": {"command": "setsid sleep 4321 & echo made"}}</tool_call>',
    "The answer is \\boxed{4}.",
]
TURN_S = 1.0


class Allocation:
    """A job of Slurm that runs the batch script."""

    def __init__(self, slurm: Cluster, job_id: str, shared: Path, scratch: Path, log: Path) -> None:
        self.slurm = slurm
        self.job_id = job_id
        self.shared = shared
        self.scratch = scratch
        self.log = log

    def client(self) -> Client:
        """A client as a trainer elsewhere has it: by the directory on the shared file system."""
        return Client(state_dir=self.shared, patience_s=0)

    def has_ended(self) -> bool:
        """Whether Slurm says that it is over."""
        return self.slurm.job(self.job_id)["JobState"] not in {"PENDING", "RUNNING", "COMPLETING"}

    def events(self) -> list[str]:
        """The names of what the daemon logged."""
        return [json.loads(line)["event"] for line in self.log.read_text().splitlines() if line.startswith("{")]

    def processes(self) -> list[str]:
        """What still runs with the job's number in its environment."""
        wanted = f"SLURM_JOB_ID={self.job_id}".encode()
        found: list[str] = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return found


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Slurm of this module."""
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def submit(slurm: Cluster, tmp_path: Path) -> Iterator[Callable[..., Allocation]]:
    """Hands the script in, with an engine that takes a second a turn; waits until the daemon is ready."""
    config = tmp_path / "prorld.toml"
    with scripted_engine(tmp_path, Script(turns=list(TURNS), latency=Latency(fixed_s=TURN_S))) as engine:
        config.write_text(
            f'[policies.default]\ntokenizer = "{write_byte_tokenizer(tmp_path / "tokenizer")}"\n'
            f'[[backends]]\nurl = "{engine}"\nkind = "vllm"\n'
        )

        def hand_in(*options: str) -> Allocation:
            scratch, shared = tmp_path / "scratch", tmp_path / "shared"
            scratch.mkdir()
            env = environ(tmp_path / "unused") | {
                "PRORLD": str(Path(sys.executable).parent / "prorld"),
                "PRORLD_CONFIG": str(config),
                "PRORLD_HOST": "127.0.0.1",
                "PRORLD_SHARED": str(shared),
                "TMPDIR": str(scratch),
            }
            env.pop("PRORLD_STATE")
            command = ["sbatch", "--parsable", "--export=ALL", "--cpus-per-task=1", *options, str(SCRIPT)]
            job_id = slurm.run(*command, env=env, cwd=tmp_path)
            made = Allocation(slurm, job_id, shared, scratch, tmp_path / f"prorld-{job_id}.log")
            until(lambda: (shared / "endpoint.json").exists() or made.has_ended(), 30, "the address is published")
            assert (shared / "endpoint.json").exists(), made.log.read_text() + slurm.logs()
            with made.client() as client:
                missing = client.ready().missing
                while [item for item in missing if item.code == "no_backend"]:
                    time.sleep(0.1)
                    missing = client.ready().missing
                assert not missing, missing
            return made

        yield hand_in


def job(name: str) -> SubmitJob:
    """A math job with a shell."""
    return SubmitJob(
        job_id=name,
        handler="math",
        instance={"problem": "What is 2 + 2?", "answer": "4"},
        agent=AgentLimits(tools=["bash"]),
        sampling=Sampling(max_tokens=512),
    )


def assert_nothing_left(allocation: Allocation) -> None:
    """No process, no state, no address; for a next run, what it goes on with."""
    until(lambda: not allocation.processes(), 5, "no process of the job is left")
    assert not list(allocation.scratch.iterdir())
    assert [path.name for path in allocation.shared.iterdir()] == ["kept"]
    assert {path.name for path in (allocation.shared / "kept").iterdir()} >= {"journal.sqlite", "token"}


def test_it_drains_before_the_limit(submit: Callable[..., Allocation], capsys: pytest.CaptureFixture[str]) -> None:
    """Jobs are accepted until Slurm signals; each of them ends graded, and all is over well before the limit."""
    began = time.monotonic()
    # The least limit that Slurm knows is a minute.
    allocation = submit("--time=1", "--signal=B:USR1@45")
    accepted: list[str] = []
    refusal = ""
    with allocation.client() as client:
        ready = time.monotonic() - began
        while True:
            assert time.monotonic() - began < 60, "no signal before the limit"
            try:
                accepted.append(client.submit(job(f"j{len(accepted)}")).job_id)
            except ClientError as exc:
                refusal = exc.stable_code
                break
            time.sleep(0.5)
        told = time.monotonic()
        ended = [client.wait(name) for name in accepted if client.get(name).state is not JobState.DONE]
        drained = time.monotonic() - told
    assert refusal == "draining"
    assert len(accepted) > 5
    assert len(ended) >= 1
    assert {(record.outcome.kind, record.reward) for record in ended if record.outcome} == {(OutcomeKind.OK, 1.0)}
    until(allocation.has_ended, 20, "the allocation is over")
    over = time.monotonic() - told
    state = allocation.slurm.job(allocation.job_id)
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), state
    assert "daemon.killed" not in allocation.events()
    assert allocation.events()[-1] == "daemon.ended"
    assert_nothing_left(allocation)
    with capsys.disabled():
        sys.stdout.write(
            f"\n  seconds to ready {ready:.1f}, signal after {told - began:.1f} of 60, {len(accepted)} jobs, "
            f"{len(ended)} of them drained in {drained:.1f}, all over after {over:.1f}\n"
        )


def test_scancel_is_one_signal(submit: Callable[..., Allocation], capsys: pytest.CaptureFixture[str]) -> None:
    """Scancel reaches every process of the job: the daemon drains once, what ran has its one end, nothing is left."""
    allocation = submit("--time=5")
    with allocation.client() as client:
        assert client.wait(client.submit(job("first")).job_id).reward == 1.0
        client.submit(job("second"))
        until(lambda: client.get("second").state is JobState.RUNNING, 10, "the job runs")
    began = time.monotonic()
    allocation.slurm.run("scancel", allocation.job_id)
    until(allocation.has_ended, 30, "the allocation is over")
    until(lambda: not allocation.processes(), 30, "no process of the job is left")
    took = time.monotonic() - began
    events = allocation.events()
    assert (events.count("job.done"), events[-1]) == (2, "daemon.ended"), allocation.log.read_text()
    assert "daemon.killed" not in events
    assert_nothing_left(allocation)
    with capsys.disabled():
        sys.stdout.write(f"\n  seconds from scancel to nothing, with a job of about 3 in flight {took:.1f}\n")
