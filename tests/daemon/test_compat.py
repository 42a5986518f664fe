"""Old trainers against a whole daemon: real processes, sockets, sandboxes and signals; the engines are scripted."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from prorld.domain.outcome import OutcomeKind
from prorld.testing.scripted_engine.script import Fault, Latency, Script
from tests.daemon.old_trainer import Group, Json, OldTrainer, Sample
from tests.daemon.support import Started, daemon, scripted_engine, until

HERE = [point.name for point in entry_points(group="prorld.handlers")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("math" not in HERE, reason="prorld-math is not installed"),
]

RIGHT, WRONG = "The answer is \\boxed{4}.", "The answer is \\boxed{5}."
CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "2 + 2"}}\n</tool_call>'
WORKERS = "[stages]\ninit = 4\nrun = 32\neval = 4\n"


def mixed(seconds: float = 0.0, **options: Any) -> Script:
    """Right half of the time, by a lot that each session draws."""
    return Script(turns=[RIGHT, WRONG], pick="lot", latency=Latency(fixed_s=seconds), **options)


def instances(step: int, count: int = 3) -> list[Json]:
    """As a trainer's data set has them; none names itself twice."""
    return [
        {
            "data_source": "deepscaler", "instance_id": f"i-{step}-{number}",
            "prompt": f"What is 2 + 2 ({step}.{number})?",
            "reward_model": {"ground_truth": "4", "style": "rule"},
        }
        for number in range(count)
    ]  # fmt: skip


@contextmanager
def compat(place: Path, *flags: str, engine: str = "http://127.0.0.1:9", settings: str = WORKERS) -> Iterator[Started]:
    """A daemon with the listener; engines of the default policy are none of old trainers' business."""
    with daemon(place, engine, "--compat-bind", "127.0.0.1:0", *flags, settings=settings, talkative=True) as here:
        yield here


def address(here: Started) -> str:
    """Where old trainers find it."""
    return str(json.loads((here.state / "endpoint.json").read_text())["compat_address"])


def branch_of(here: Started, sample: Sample) -> Json:
    """The only branch of a sample, from the other listener."""
    with here.client() as client:
        document = client.trajectory(sample.result["prorld_job_id"])
    assert len(document.branches) == 1
    branch = document.branches[0]
    return {"ids": list(branch.token_ids), "mask": list(branch.mask), "logprobs": list(branch.logprobs)}


def assert_exact(here: Started, groups: list[Group]) -> None:
    """What the trainer holds of each sample is the branch, id for id."""
    for group in groups:
        for sample in group.samples:
            branch = branch_of(here, sample)
            assert (sample.token_ids, sample.mask) == (branch["ids"], branch["mask"])
            assert sample.logprobs == pytest.approx(branch["logprobs"], abs=0)


def records(here: Started) -> list[Any]:
    """All jobs of old trainers, as an admin sees them."""
    with here.client() as client:
        return [record for record in client.list(limit=200).items if record.tenant == "compat"]


def cancelled(trainer: OldTrainer, job_id: str) -> None:
    """Somebody cancels a job as soon as it is there; the trainer will try it again."""
    until(lambda: trainer.call("/cancel", {"job_id": job_id})[0] == 200, 60, f"{job_id} is cancelled")


def assert_nothing_left(here: Started) -> None:
    """No live job, no sandbox."""
    with here.client() as client:
        status = client.status()
        assert sum(count for state, count in status.jobs.items() if state != "done") == 0, status.jobs
        assert status.sandboxes == 0
        assert client.sandboxes().items == []


def test_three_iterations_of_an_old_trainer(tmp_path: Path) -> None:
    """DAPO as it was run against the original: other engines in each step, text-flavoured and bare ones.

    Calls of engines fail and a job of each step is cancelled; the trainer gets what it relies on, and nothing twice.
    """
    flaky = mixed(0.05, faults=[Fault(kind="reset", rate=0.1, count=8)])
    with ExitStack() as stack:
        urls = []
        for name, script in (("a", mixed(0.05)), ("b", flaky), ("c", mixed(0.05, flavour="prorl"))):
            (tmp_path / name).mkdir()
            urls.append(stack.enter_context(scripted_engine(tmp_path / name, script)))
        here = stack.enter_context(compat(tmp_path, "--timeout", "60"))
        trainer = OldTrainer(address(here), samples=4, params={"max_output_tokens": 64, "unheard_of": 1})
        sets = [[f"{urls[0]}/v1", f"{urls[1]}/v1"], [urls[2]], [f"{urls[0]}/v1", urls[2]]]
        kept: list[Group] = []
        seen: set[str] = set()
        for step, engines in enumerate(sets):
            trainer.use_engines(engines)
            doomed = f"step{step}-1-2"
            groups = trainer.step(instances(step), f"step{step}", meanwhile=partial(cancelled, trainer, doomed))
            assert_exact(here, groups)
            assert_nothing_left(here)
            for group in groups:
                assert len(group.samples) + len(group.lost) == trainer.samples
                assert not group.lost
                for sample in group.samples:
                    result = sample.result
                    assert result["prorld_job_id"] not in seen
                    seen.add(result["prorld_job_id"])
                    assert sample.tries == (2 if sample.job_id == doomed else 1)
                    assert (result["instance_id"], result["ignored"]) == (group.instance["instance_id"], ["unheard_of"])
                    assert result["reward"] == sample.reward
                    assert sum(sample.mask) > 0
                if group.is_informative:
                    assert abs(sum(group.advantages())) < 1e-6
                    kept.append(group)
        assert kept
        ended = records(here)
        # Every job ran for somebody: none was begun twice and none was lost, but those that were cancelled.
        cut = {record.job_id for record in ended if record.outcome.kind is OutcomeKind.CANCELLED}
        assert cut == {f"step{step}-1-2" for step in range(3)}
        assert {record.job_id for record in ended} == seen | cut
        assert len(ended) == 3 * 3 * trainer.samples + 3
        assert all(record.policy == "compat" for record in ended)


def test_failures_are_tried_again_and_no_zeros(tmp_path: Path) -> None:
    """A grader that is away: three tries, no success, and a job that says why for each of them."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{taken.getsockname()[1]}"
        settings = f'{WORKERS}[handlers.config.math]\nreward_server = "{away}"\n'
        (tmp_path / "e").mkdir()
        with scripted_engine(tmp_path / "e", mixed()) as engine, compat(tmp_path, settings=settings) as here:
            trainer = OldTrainer(address(here), samples=1)
            trainer.use_engines([f"{engine}/v1"])
            (group,) = trainer.step(instances(0, 1), "s")
            assert (group.samples, group.lost) == ([], ["s-0-0"])
            ended = records(here)
            assert [record.outcome.kind for record in ended] == [OutcomeKind.GRADER_ERROR] * 3
            assert {record.reward for record in ended} == {None}
            assert [status for path, status in trainer.answers if path == "/process"] == [200] * 3


def test_stop_leaves_nothing(tmp_path: Path) -> None:
    """Jobs in the middle of a long turn, with sandboxes: all blocked calls are answered, and all is gone by then."""
    (tmp_path / "e").mkdir()
    with scripted_engine(tmp_path / "e", mixed(120.0)) as engine, compat(tmp_path) as here:
        trainer = OldTrainer(address(here))
        trainer.use_engines([f"{engine}/v1"])
        trainer.must("/start")
        bodies = [{"instance": instance, "job_id": f"j{number}"} for number, instance in enumerate(instances(0, 6))]
        with ThreadPoolExecutor(6) as threads:
            calls = [threads.submit(trainer.call, "/process", body) for body in bodies]
            until(lambda: trainer.call("/status", method="GET")[1]["active_run"] == 6, 60, "all of them run")
            assert trainer.call("/cancel", {"job_id": "j0"}) == (200, {"status": "Job j0 canceled successfully"})
            trainer.must("/stop")
            assert_nothing_left(here)
            answers = [call.result() for call in calls]
        assert [status for status, _ in answers] == [200] * 6
        assert {result["critical_error"] for _, result in answers} == {"cancelled"}
        assert {result["reward"] for _, result in answers} == {None}
        assert not any(result["messages"] for _, result in answers)


def test_a_time_out_is_504_and_the_batch_goes_on(tmp_path: Path) -> None:
    """One budget for a job; who is over it is told so, and its sandbox is gone."""
    (tmp_path / "e").mkdir()
    with scripted_engine(tmp_path / "e", mixed(120.0)) as engine, compat(tmp_path, "--timeout", "6") as here:
        trainer = OldTrainer(address(here))
        trainer.use_engines([f"{engine}/v1"])
        trainer.must("/start")
        status, result = trainer.call("/process", {"instance": instances(0, 1)[0]})
        assert (status, result["critical_error"], result["timing"]["timeout_triggered"]) == (504, "timeout", True)
        assert_nothing_left(here)
        trainer.must("/stop")


def test_the_daemon_is_killed_in_the_middle(tmp_path: Path) -> None:
    """The trainer's call breaks off; its next try finds the server started, the engines there, and joins its job."""
    (tmp_path / "e").mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        bind = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = ("--compat-bind", bind)
    with scripted_engine(tmp_path / "e", mixed(3.0)) as engine:
        trainer = OldTrainer(f"http://{bind}", samples=2)
        with daemon(tmp_path, "http://127.0.0.1:9", *flags, settings=WORKERS, talkative=True) as here:
            trainer.use_engines([f"{engine}/v1"])
            trainer.must("/start")
            calls = [({"instance": one, "job_id": f"j{n}"}, n) for n, one in enumerate(instances(0, 2))]
            results: dict[int, tuple[int, Json]] = {}

            def persist(body: Json, number: int) -> None:
                deadline = time.monotonic() + 180
                while number not in results and time.monotonic() < deadline:
                    try:
                        results[number] = trainer.call("/process", body)
                    except OSError:
                        time.sleep(0.2)

            threads = [threading.Thread(target=persist, args=call) for call in calls]
            for thread in threads:
                thread.start()
            until(lambda: trainer.call("/status", method="GET")[1]["active_run"] == 2, 60, "both run")
            here.process.send_signal(signal.SIGKILL)
            here.process.wait(20)
        with daemon(tmp_path, "http://127.0.0.1:9", *flags, settings=WORKERS, talkative=True) as here:
            for thread in threads:
                thread.join(180)
            assert [results[number][0] for number in (0, 1)] == [200, 200]
            assert all(result["messages"] for _, result in results.values())
            assert {record.job_id for record in records(here)} == {"j0", "j1"}
            trainer.must("/stop")
            assert_nothing_left(here)


def test_the_daemon_is_killed_when_the_work_is_done(tmp_path: Path) -> None:
    """The trainer had hung up and nobody has got the result: its next try gets it, and nothing is sampled again."""
    (tmp_path / "e").mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        bind = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = ("--compat-bind", bind)
    body = {"instance": instances(0, 1)[0], "job_id": "j"}
    with scripted_engine(tmp_path / "e", mixed(1.0)) as engine:
        trainer = OldTrainer(f"http://{bind}", samples=1)
        with daemon(tmp_path, "http://127.0.0.1:9", *flags, settings=WORKERS, talkative=True) as here:
            trainer.use_engines([f"{engine}/v1"])
            trainer.must("/start")
            data = json.dumps(body).encode()
            head = f"POST /process HTTP/1.1\r\nHost: {bind}\r\nContent-Length: {len(data)}\r\n\r\n"
            with socket.create_connection(("127.0.0.1", int(bind.rpartition(":")[2])), timeout=20) as leaving:
                leaving.sendall(head.encode() + data)
                until(lambda: trainer.call("/status", method="GET")[1]["total"] == 1, 60, "it is taken")
            until(lambda: trainer.call("/status", method="GET")[1]["total"] == 0, 60, "it has ended")
            here.process.send_signal(signal.SIGKILL)
            here.process.wait(20)
        with daemon(tmp_path, "http://127.0.0.1:9", *flags, settings=WORKERS, talkative=True) as here:
            status, result = trainer.call("/process", body)
            assert (status, result["prorld_job_id"], bool(result["messages"])) == (200, "j", True)
            [record] = records(here)
            assert (record.job_id, len(record.attempts)) == ("j", 1)
            # It was got: what comes under that name now is another job.
            assert trainer.call("/process", body)[1]["prorld_job_id"] != "j"
            trainer.must("/stop")


def test_a_real_tool_and_its_tokens(tmp_path: Path) -> None:
    """Several turns with a tool in a sandbox: calls are in the messages, and every token of the glue has a place."""
    (tmp_path / "e").mkdir()
    script = Script(turns=[CALL, RIGHT], pick="session")
    with scripted_engine(tmp_path / "e", script) as engine, compat(tmp_path) as here:
        trainer = OldTrainer(address(here), samples=2)
        trainer.use_engines([f"{engine}/v1"])
        groups = trainer.step(instances(0, 2), "tool")
        assert_exact(here, groups)
        result = groups[0].samples[0].result
        assert [message["role"] for message in result["messages"]] == [
            "system",
            "user",
            "assistant",
            "tool",
            "assistant",
        ]
        assert result["messages"][2]["tool_calls"] == [{"name": "python", "arguments": {"code": "2 + 2"}}]
        assert result["tools"][0]["function"]["name"] == "python"
        assert (result["resolved"], result["finish"]) == (True, True)


@pytest.mark.real
def test_a_real_model(tmp_path: Path) -> None:
    """An iteration on the embedded engine, named by its address as a trainer would."""
    with daemon(tmp_path, None, "--compat-bind", "127.0.0.1:0", settings=WORKERS, talkative=True) as here:
        with here.client() as client:
            until(lambda: client.backends().items, 120, "the embedded engine is there")
            engine = client.backends().items[0].url
        trainer = OldTrainer(address(here), samples=2, params={"max_output_tokens": 32, "max_iterations": 2})
        trainer.use_engines([f"{engine}/v1"])
        groups = trainer.step(instances(0, 2), "real")
        assert sum(len(group.samples) for group in groups) == 4
        assert_exact(here, groups)
        assert_nothing_left(here)


def test_an_engine_that_speaks_text_alone(tmp_path: Path) -> None:
    """No token ids and no log-probabilities of them: the messages make up the branch all the same."""
    (tmp_path / "e").mkdir()
    script = Script(turns=[RIGHT], flavour="openai")
    with scripted_engine(tmp_path / "e", script) as engine, compat(tmp_path) as here:
        trainer = OldTrainer(address(here), samples=2)
        trainer.use_engines([f"{engine}/v1"])
        groups = trainer.step(instances(0, 1), "text")
        assert [sample.reward for sample in groups[0].samples] == [1.0, 1.0]
        assert_exact(here, groups)
