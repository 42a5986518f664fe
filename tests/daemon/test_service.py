"""The daemon as a service manager and an operator see it: real signals, and a notification socket of ours."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from prorld.cli.main import main
from prorld.client.errors import ClientError
from prorld.domain.job import JobState, Sampling
from prorld.testing.scripted_engine.script import Latency, Script
from prorld.wire.jobs import SubmitJob
from tests.daemon.support import Started, alive, daemon, scripted_engine, until

HERE = [point.name for point in entry_points(group="prorld.handlers")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("math" not in HERE, reason="prorld-math is not installed"),
]

WATCHDOG_S = 1.5


class Manager:
    """What a service manager has heard."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.messages: list[dict[str, str]] = []

    def hear(self) -> list[dict[str, str]]:
        """Everything so far."""
        while True:
            try:
                text = self.socket.recv(4096, socket.MSG_DONTWAIT).decode()
            except BlockingIOError:
                return self.messages
            self.messages.append(dict(line.split("=", 1) for line in text.splitlines()))

    def heard(self, name: str) -> list[str]:
        """The values of one variable."""
        return [message[name] for message in self.hear() if name in message]


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    """A manager whose address is in the environment, with a watchdog."""
    made = Manager(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_S * 1e6)))
    with made.socket:
        yield made


def script(seconds: float) -> Script:
    """One turn, this slow."""
    return Script(turns=["The answer is \\boxed{4}."], latency=Latency(fixed_s=seconds))


def job(name: str) -> SubmitJob:
    """A math job."""
    instance = {"problem": "What is 2 + 2?", "answer": "4"}
    return SubmitJob(job_id=name, handler="math", instance=instance, sampling=Sampling(max_tokens=64))


def errors(place: Path) -> str:
    """The daemon's standard error so far."""
    return (place / "stderr").read_text()


def test_the_manager_hears_of_a_whole_life(tmp_path: Path, manager: Manager) -> None:
    """Ready once it can be connected to, beats while it lives, stopping and more time while it drains."""
    with scripted_engine(tmp_path, script(1.5)) as engine, daemon(tmp_path, engine) as here:
        assert manager.heard("READY") == ["1"]
        for pid, _ in here.family():
            with suppress(FileNotFoundError, ProcessLookupError):  # it may have ended meanwhile
                assert b"NOTIFY_SOCKET" not in Path(f"/proc/{pid}/environ").read_bytes()
        until(lambda: len(manager.heard("WATCHDOG")) >= 3, 5, "the watchdog is fed")
        with here.client() as client:
            until(lambda: client.ready().ready, 10, "it is ready for work")
            client.submit(job("a"))
            until(lambda: any("1 running" in status for status in manager.heard("STATUS")), 5, "the status tells of it")
            here.process.send_signal(signal.SIGTERM)
            until(lambda: manager.heard("STOPPING") == ["1"], 5, "it says that it stops")
            assert client.wait("a").reward == 1.0
        here.process.wait(20)
        assert here.process.returncode == 0
    assert manager.heard("EXTEND_TIMEOUT_USEC")
    assert "daemon.killed" not in errors(tmp_path)


def test_a_stopped_process_gives_no_sign_of_life(tmp_path: Path, manager: Manager) -> None:
    """What does not run its loop does not feed the watchdog."""
    with scripted_engine(tmp_path, script(0)) as engine, daemon(tmp_path, engine) as here:
        until(lambda: manager.heard("WATCHDOG"), 5, "the watchdog is fed")
        here.process.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        before = len(manager.hear())
        time.sleep(WATCHDOG_S)
        assert len(manager.hear()) == before
        here.process.send_signal(signal.SIGCONT)
        until(lambda: len(manager.hear()) > before, 5, "it is fed again")


def test_reload_by_signal(tmp_path: Path) -> None:
    """SIGHUP applies what is safe, refuses what is wrong, and the daemon goes on in either case."""
    with scripted_engine(tmp_path, script(0)) as engine, daemon(tmp_path, engine) as here, here.client() as client:
        config = tmp_path / "prorld.toml"
        good = config.read_text()
        config.write_text(good + "[stages]\nrun = 7\n")
        here.process.send_signal(signal.SIGHUP)
        until(lambda: client.stages().run.workers == 7, 5, "the new size is in force")
        config.write_text("nonsense = 1\n")
        here.process.send_signal(signal.SIGHUP)
        assert here.process.stdout is not None
        refused = next(line for line in here.process.stdout if '"reload.refused"' in line)
        assert "nonsense" in refused
        assert client.stages().run.workers == 7
        config.write_text(good)
        here.process.send_signal(signal.SIGHUP)
        until(lambda: client.stages().run.workers != 7, 5, "the old size is back")


def test_a_look_inside_by_signal(tmp_path: Path) -> None:
    """SIGQUIT shows stacks, tasks and each job with its stage, and the daemon goes on."""
    with scripted_engine(tmp_path, script(3)) as engine, daemon(tmp_path, engine) as here, here.client() as client:
        client.submit(job("a-job-to-see"))
        until(lambda: client.get("a-job-to-see").state is JobState.RUNNING, 20, "the job runs")
        here.process.send_signal(signal.SIGQUIT)
        until(lambda: "in all" in errors(tmp_path), 20, "the jobs are shown")
        text = errors(tmp_path)
        assert "thread main (most recent call last)" in text
        assert "supervisor" in text
        assert "job a-job-to-see" in text
        assert "a-job-to-see  running, turn" in text
        assert client.wait("a-job-to-see").reward == 1.0


def test_drained_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``prorld drain --wait``: new jobs are refused, accepted ones end, results stay, and a signal ends it at once."""
    with scripted_engine(tmp_path, script(1)) as engine, daemon(tmp_path, engine) as here, here.client() as client:
        client.submit(job("a"))
        assert main(["drain", "--state-dir", str(here.state), "--wait"]) == 0
        assert capsys.readouterr().out == "draining; no jobs left\n"
        assert client.get("a").reward == 1.0
        with here.client() as hasty:
            hasty._caller._patience_s = 0
            with pytest.raises(ClientError, match="draining"):
                hasty.submit(job("b"))
        began = time.monotonic()
        here.process.send_signal(signal.SIGTERM)
        assert here.process.wait(20) == 0
        assert time.monotonic() - began < 5


def test_a_third_signal_does_not_cut_the_clean_up(tmp_path: Path) -> None:
    """An impatient service manager or operator: many signals, one clean end."""
    with scripted_engine(tmp_path, script(30)) as engine, daemon(tmp_path, engine) as here:
        with here.client() as client:
            client.submit(job("a"))
            until(lambda: client.get("a").state is JobState.RUNNING, 20, "the job runs")
        assert_clean_under_fire(here)


def assert_clean_under_fire(here: Started) -> None:
    """SIGTERM for as long as anything of it lives; its end is a clean one."""
    family = here.family()
    assert family
    deadline = time.monotonic() + 20
    while alive(family):
        assert time.monotonic() < deadline
        here.process.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    assert here.process.stdout is not None
    assert '"daemon.ended"' in here.process.stdout.read()
    here.process.wait(20)
    assert not (here.state / "endpoint.json").exists()
    assert [entry for entry in (here.state / "sandboxes").glob("*/*") if entry.name != "owner"] == []


def test_a_log_that_nobody_reads_stops_nothing(tmp_path: Path) -> None:
    """Many times what a pipe holds: every request is answered, the end comes, and the last line is there to read."""
    with daemon(tmp_path, None, "--no-embedded", "--log-level", "debug") as here, here.client() as client:
        for _ in range(800):
            client.status()
        here.process.send_signal(signal.SIGTERM)
        assert here.process.stdout is not None
        told = [json.loads(line)["event"] for line in here.process.stdout]
        assert here.process.wait(60) == 0
    assert told.count("request.answered") >= 800
    assert told[-1] == "daemon.ended"


def test_a_log_that_is_never_read_keeps_no_daemon(tmp_path: Path) -> None:
    """The end is bounded, though the last lines have nowhere to go."""
    with daemon(tmp_path, None, "--no-embedded", "--log-level", "debug") as here, here.client() as client:
        for _ in range(800):
            client.status()
        here.process.send_signal(signal.SIGTERM)
        assert here.process.wait(60) == 0
