"""A trainer as it was written for the original ProRL Agent server: that page's facts, blocking calls, threads.

It knows nothing of prorld: an address, seven routes, three tries, and that a 200 with messages is a success. Only the
standard library is used, as somebody would who has no client.
"""

from __future__ import annotations

import json
import statistics
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

TRIES = 3
CALL_S = 120.0

Json = dict[str, Any]


@dataclass
class Sample:
    """One rollout as the trainer keeps it: tokens, which of them to train on, what it was worth."""

    job_id: str
    result: Json
    tries: int
    token_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        for message in self.result["messages"]:
            ids = message["token_ids"]
            trained = message["role"] == "assistant" and len(message["logprobs"]) == len(ids)
            if trained and message["input_ids"] != self.token_ids:
                raise AssertionError("a turn was sampled from another prompt than the messages before it")
            self.token_ids += ids
            self.mask += [int(trained)] * len(ids)
            self.logprobs += message["logprobs"] if trained else [0.0] * len(ids)

    @property
    def reward(self) -> float:
        """As these trainers reckon it."""
        return float(self.result["resolved"])


@dataclass
class Group:
    """The samples of one prompt that came back, and the calls that never did."""

    instance: Json
    samples: list[Sample]
    lost: list[str]

    @property
    def is_informative(self) -> bool:
        """DAPO's filter, over what may be trained on."""
        rewards = {sample.reward for sample in self.samples if not sample.result["filter"]}
        return len(rewards) > 1

    def advantages(self) -> list[float]:
        """Relative to the group."""
        rewards = [sample.reward for sample in self.samples]
        spread = statistics.pstdev(rewards)
        return [(reward - statistics.fmean(rewards)) / (spread + 1e-4) for reward in rewards]


class OldTrainer:
    """The trainer's side. ``answers`` keeps each status by route, in the order they came."""

    def __init__(self, address: str, *, samples: int = 4, params: Json | None = None) -> None:
        self.address = address
        self.samples = samples
        self.params = {"model": "hosted_vllm/policy", "api_key": "mykey", "temperature": 1.0, **(params or {})}
        self.answers: list[tuple[str, int]] = []

    def call(
        self, path: str, body: Json | None = None, *, method: str = "POST", within_s: float = CALL_S
    ) -> tuple[int, Json]:
        """One blocking call; any status comes back with its body."""
        data = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        asked = urllib.request.Request(self.address + path, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(asked, timeout=within_s) as answer:
                status, content = answer.status, json.load(answer)
        except urllib.error.HTTPError as refused:
            status, content = refused.code, json.load(refused)
        self.answers.append((path, status))
        return status, content

    def must(self, path: str, body: Json | None = None) -> Json:
        """A call that has to succeed."""
        status, content = self.call(path, body)
        if status != 200:
            raise AssertionError(f"{path} answered {status}: {content}")
        return content

    def use_engines(self, addresses: Sequence[str]) -> None:
        """As after each update of the weights."""
        self.must("/clear_llm_server")
        for address in addresses:
            self.must("/add_llm_server", {"address": address})

    def process(self, instance: Json, job_id: str) -> Sample | None:
        """A rollout, tried three times; ``None`` where none of them was a success."""
        body = {"instance": instance, "sampling_params": self.params, "job_id": job_id}
        for number in range(TRIES):
            try:
                status, result = self.call("/process", body)
            except OSError:
                continue
            if status == 200 and result.get("messages"):
                return Sample(job_id, result, number + 1)
        return None

    def step(self, instances: Sequence[Json], name: str, *, meanwhile: Callable[[], None] | None = None) -> list[Group]:
        """One iteration: start, all samples of all prompts at once, stop. ``meanwhile`` runs beside the calls."""
        self.must("/start")
        jobs = [
            ({**instance, "trajectory_id": sample}, f"{name}-{place}-{sample}")
            for place, instance in enumerate(instances)
            for sample in range(self.samples)
        ]
        with ThreadPoolExecutor(len(jobs) + 1) as threads:
            calls = [threads.submit(self.process, *job) for job in jobs]
            if meanwhile is not None:
                threads.submit(meanwhile).result()
            found = [call.result() for call in calls]
        self.must("/stop")
        groups = []
        for place, instance in enumerate(instances):
            here = slice(place * self.samples, (place + 1) * self.samples)
            names = [job_id for _, job_id in jobs[here]]
            samples = [sample for sample in found[here] if sample is not None]
            lost = [job_id for job_id in names if job_id not in {sample.job_id for sample in samples}]
            groups.append(Group(instance, samples, lost))
        return groups
