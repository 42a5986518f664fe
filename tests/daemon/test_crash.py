"""The daemon as a process: cancelled at random, killed, signalled; what it leaves behind each time is nothing."""

from __future__ import annotations

import random
import signal
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from prorld.domain.job import AgentLimits, JobState, Sampling
from prorld.domain.outcome import OutcomeKind
from prorld.testing.scripted_engine.script import Latency, Script
from prorld.wire.events import JobEvent
from prorld.wire.jobs import JobRecord, SubmitJob
from tests.daemon.support import Started, alive, daemon, scripted_engine, until

HERE = [point.name for point in entry_points(group="prorld.handlers")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("math" not in HERE, reason="prorld-math is not installed"),
]

# What a hostile or careless agent leaves running.
STRAYS = (
    "setsid sleep 4321 & nohup sleep 4321 >/dev/null & trap '' HUP TERM; (trap '' HUP TERM; sleep 4321) & echo strays"
)
TURNS = [
    f'<tool_call>{{"name": "bash", "arguments": {{"command": "{STRAYS}"}}}}</tool_call>',
    '<tool_call>{"name": "bash", "arguments": {"command": "echo again"}}</tool_call>',
    "The answer is \\boxed{4}.",
]


def script(seconds: float) -> Script:
    """Three turns, each this slow."""
    return Script(turns=list(TURNS), latency=Latency(fixed_s=seconds))


def job(name: str) -> SubmitJob:
    """A math job with a shell."""
    return SubmitJob(
        job_id=name,
        handler="math",
        instance={"problem": "What is 2 + 2?", "answer": "4"},
        agent=AgentLimits(tools=["bash"]),
        sampling=Sampling(max_tokens=512),
        group_id="g",
    )


def sandboxes_left(here: Started) -> list[Path]:
    """Directories of sandboxes that are still there: one per daemon, one per sandbox below it."""
    return [entry for entry in (here.state / "sandboxes").glob("*/*") if entry.name != "owner"]


def test_a_rollout_with_a_shell_is_graded(tmp_path: Path) -> None:
    """The whole way: HTTP, sandbox, scripted engine, tools, grader, trajectory."""
    with scripted_engine(tmp_path, script(0.0)) as engine, daemon(tmp_path, engine) as here, here.client() as client:
        client.submit(job("a"))
        record = client.wait("a")
        assert record.outcome is not None
        assert (record.outcome.kind, record.reward) == (OutcomeKind.OK, 1.0), record
        assert record.turns == 3
        texts = [segment.message.content for segment in client.trajectory("a").branches[0].segments if segment.message]
        assert any("strays" in text for text in texts)
        until(lambda: client.status().sandboxes == 0, 5, "no sandbox is left")


def test_random_cancels_leave_no_process_and_no_directory(tmp_path: Path) -> None:
    """Jobs cancelled at random moments are gone, with everything they started, when they say so."""
    dice = random.Random(20)
    with scripted_engine(tmp_path, script(0.1)) as engine, daemon(tmp_path, engine) as here, here.client() as client:
        client.submit(job("warm"))
        client.wait("warm")
        until(lambda: client.status().sandboxes == 0, 5, "the first sandbox is gone")
        idle, open_files = len(here.family()), here.descriptors()
        for round_ in range(4):
            names = [f"r{round_}-{number}" for number in range(8)]
            for name in names:
                client.submit(job(name))
            for name in dice.sample(names, len(names)):
                time.sleep(dice.uniform(0, 0.08))
                client.cancel(name, reason="at random")
            for name in names:
                record = client.wait(name)
                assert record.outcome is not None
                assert record.outcome.kind in (OutcomeKind.CANCELLED, OutcomeKind.OK), record
            assert client.status().sandboxes == 0
            until(lambda: len(here.family()) <= idle, 2, "no process of a sandbox is left")
            assert not sandboxes_left(here)
        # Sockets to the engine are kept for a while on purpose; those of sandboxes and sessions are not.
        until(lambda: here.descriptors() <= open_files + 8, 5, "sockets and files are closed")
        backend = client.backends().items[0]
        assert (backend.leases, backend.inflight) == (0, 0)
        assert client.status().jobs["done"] == 33


def test_a_killed_daemon_leaves_no_sandbox_process(tmp_path: Path) -> None:
    """SIGKILL, in the middle of jobs with strays in their sandboxes: two seconds later everything is gone."""
    with scripted_engine(tmp_path, script(0.3)) as engine, daemon(tmp_path, engine) as here:
        with here.client() as client:
            for number in range(6):
                client.submit(job(f"j{number}"))
            until(lambda: len(here.family()) > 30, 20, "strays are running")
        family = here.family()
        here.process.kill()
        here.process.wait()
        until(lambda: not alive(family), 2.0, f"all of {len(family)} processes are gone")


def test_the_next_daemon_finds_a_clean_house(tmp_path: Path) -> None:
    """After a kill the same state directory serves again, what the dead one left is removed, and its job goes on."""
    with scripted_engine(tmp_path, script(0.3)) as engine:
        with daemon(tmp_path, engine) as here, here.client() as client:
            client.submit(job("a"))
            until(lambda: client.get("a").state is JobState.RUNNING, 20, "the job runs")
            here.process.kill()
        with daemon(tmp_path, engine) as here, here.client() as client:
            assert client.submit(job("b")).job_id == "b"
            assert client.submit(job("a")).job_id == "a"
            for name in "ab":
                assert client.wait(name).reward == 1.0
            assert client.status().jobs["done"] == 2
            until(lambda: not sandboxes_left(here), 5, "no directory is left")


def test_nothing_accepted_is_lost_to_kills(tmp_path: Path) -> None:
    """SIGKILL at moments of chance, again and again: each accepted job has one end, and what was told stays told."""
    dice = random.Random(6)
    told: dict[str, JobRecord] = {}
    events: dict[str, list[JobEvent]] = {}
    names = [f"k{number}" for number in range(12)]
    with scripted_engine(tmp_path, script(0.1)) as engine:
        for life in range(4):
            with daemon(tmp_path, engine) as here, here.client() as client:
                for name in names[life * 3 : life * 3 + 3]:
                    client.submit(job(name))
                time.sleep(dice.uniform(0.05, 1.5))
                for name in names[: life * 3 + 3]:
                    seen = client.get(name)
                    if seen.state is JobState.DONE:
                        assert told.setdefault(name, seen) == seen
                    now = list(client.events(name))
                    before = events.get(name, [])
                    assert now[: len(before)] == before
                    events[name] = now
                here.process.kill()
        with daemon(tmp_path, engine) as here, here.client() as client:
            for name in names:
                record = client.wait(name)
                assert (record.reward, told.get(name, record)) == (1.0, record)
                found = list(client.events(name))
                assert [event.seq for event in found] == list(range(1, len(found) + 1))
                assert found[: len(events[name])] == events[name]
                assert [event.event for event in found].count("job.done") == 1
                assert [attempt.n for attempt in record.attempts] == list(range(1, len(record.attempts) + 1))
                assert {attempt.outcome.kind for attempt in record.attempts[:-1]} <= {OutcomeKind.LOST}
            assert client.status().jobs["done"] == len(names)
            until(lambda: client.status().sandboxes == 0, 5, "no sandbox is left")


def test_the_first_signal_drains_and_the_second_kills(tmp_path: Path) -> None:
    """SIGTERM refuses new jobs and lets old ones end; another ends the daemon at once, and the job goes on later."""
    with scripted_engine(tmp_path, script(30.0)) as engine, daemon(tmp_path, engine) as here:
        with here.client() as client:
            client.submit(job("a"))
            until(lambda: client.get("a").state is JobState.RUNNING, 20, "the job runs")
        family = here.family()
        here.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert here.process.poll() is None
        here.process.send_signal(signal.SIGTERM)
        assert here.process.wait(15) == 0
        until(lambda: not alive(family), 2.0, "everything is gone")
        assert not (here.state / "endpoint.json").exists()


def test_what_ended_while_draining_can_still_be_fetched(tmp_path: Path) -> None:
    """After the last job has ended there is a moment for those who waited to read its record."""
    with scripted_engine(tmp_path, script(0.2)) as engine, daemon(tmp_path, engine) as here, here.client() as client:
        names = [f"j{number}" for number in range(6)]
        for name in names:
            client.submit(job(name))
        until(lambda: client.get("j0").state is JobState.RUNNING, 20, "jobs run")
        here.process.send_signal(signal.SIGTERM)
        for name in names:
            record = client.wait(name)
            assert record.outcome is not None
            assert record.outcome.kind is OutcomeKind.OK
        assert here.process.wait(30) == 0
