"""Batches through the real daemon: a training loop with carry-over that a kill in the middle does not disturb."""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.request
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from prorld.testing.scripted_engine.script import Latency, Script
from tests.daemon.support import Started, daemon, scripted_engine

HERE = [point.name for point in entry_points(group="prorld.handlers")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("math" not in HERE, reason="prorld-math is not installed"),
]

DEADLINE_S = 120.0


class Trainer:
    """What a trainer without our client does: JSON over HTTP, and again where the daemon was away."""

    def __init__(self, here: Started) -> None:
        self.state = here.state

    def call(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        address = json.loads((self.state / "endpoint.json").read_text())["address"]
        token = (self.state / "token").read_text().strip()
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{address}{path}",
            data=data,
            method=method,
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=90) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def ok(self, method: str, path: str, body: object = None) -> Any:
        status, answer = self.call(method, path, body)
        assert status < 300, answer
        return answer

    def submit(self, batch_id: str, prompts: int, **body: Any) -> Any:
        asked = {
            "batch_id": batch_id,
            "handler": "math",
            "instances": [
                {"problem": f"{batch_id}: what is {n} + 1?", "answer": "4", "id": f"{batch_id}-{n}"}
                for n in range(prompts)
            ],
            "samples_per_group": 2,
            "informative": {"rule": "all"},
            "sampling": {"max_tokens": 64},
        }
        return self.ok("POST", "/v1/batches", asked | body)

    def events(self, batch_id: str) -> list[Any]:
        return self.ok("GET", f"/v1/batches/{batch_id}/events")["items"]

    def collect(self, batch_id: str, *, after: int = 0, acknowledge: bool = True) -> list[Any]:
        """All groups of a batch until it is over, each acknowledged when it is there."""
        found: list[Any] = []
        began = time.monotonic()
        while time.monotonic() - began < DEADLINE_S:
            page = self.ok("GET", f"/v1/batches/{batch_id}/groups?after={after}&wait_s=5&trajectories=true&limit=3")
            found += page["items"]
            if page["items"]:
                after = page["items"][-1]["seq"]
                if acknowledge:
                    self.ok("POST", f"/v1/batches/{batch_id}/ack", {"through": after})
            if page["is_over"]:
                return found
        raise AssertionError(self.ok("GET", f"/v1/batches/{batch_id}"))


def script(seconds: float) -> Script:
    return Script(turns=["The answer is \\boxed{4}."], latency=Latency(fixed_s=seconds))


def test_two_steps_with_carry_over(tmp_path: Path) -> None:
    """The second batch begins with what the first one left, and every group has one end in each."""
    with scripted_engine(tmp_path, script(0.1)) as engine, daemon(tmp_path, engine) as here:
        trainer = Trainer(here)
        trainer.submit("step-1", 12, target_groups=4)
        first = trainer.collect("step-1")
        assert len(first) == 4
        trainer.submit("step-2", 0, target_groups=6, carry_from="step-1", last=True)
        second = trainer.collect("step-2")
        assert len(second) == 6
        assert {group["index"] for group in second} <= set(range(8))
        assert [group["seq"] for group in second] == sorted(group["seq"] for group in second)
        assert all(group["group_id"].startswith("step-1:") for group in second)
        assert not {group["group_id"] for group in first} & {group["group_id"] for group in second}
        for group in [*first, *second]:
            assert group["rewards"] == [1.0, 1.0]
            assert [one["job"]["job_id"] for one in group["trajectories"]] == group["job_ids"]
        record = trainer.ok("GET", "/v1/batches/step-1")
        assert (record["state"], record["carried_to"]) == ("complete", "step-2")
        status, answer = trainer.call(
            "POST", "/v1/batches", {"batch_id": "x", "handler": "math", "carry_from": "step-1", "samples_per_group": 2}
        )
        assert (status, answer["error"]["code"]) == (409, "carry_taken")


def test_a_kill_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    """Killed while groups run and some are acknowledged: the next life gives the others, each once, and in order."""
    with scripted_engine(tmp_path, script(0.3)) as engine:
        with daemon(tmp_path, engine) as here:
            trainer = Trainer(here)
            trainer.submit("step-1", 20, target_groups=8, max_running_groups=3)
            page = trainer.ok("GET", "/v1/batches/step-1/groups?wait_s=30")
            before = trainer.events("step-1")
            seen = [group["group_id"] for group in page["items"]]
            through = page["items"][-1]["seq"]
            trainer.ok("POST", "/v1/batches/step-1/ack", {"through": through})
            here.process.send_signal(signal.SIGKILL)
            here.process.wait()
        with daemon(tmp_path, engine) as here:
            trainer = Trainer(here)
            rest = trainer.collect("step-1", after=through)
            assert trainer.events("step-1")[: len(before)] == before
            groups = seen + [group["group_id"] for group in rest]
            assert len(groups) == len(set(groups)) == 8
            events = trainer.events("step-1")
            assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
            ends = [event["group_id"] for event in events if event["event"].startswith("group.")]
            assert sorted(ends) == sorted(f"step-1:{n}" for n in range(20))
            assert [event["group_id"] for event in events if event["event"] == "group.done"] == groups
            jobs = trainer.ok("GET", "/v1/jobs?limit=500")["items"]
            assert len({job["job_id"] for job in jobs}) == len(jobs)
