"""The trainer of the bench of batches: jobs and groups over HTTP, its policy, and a look at the gate meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import trio

from prorld.bench.dapo_figures import DapoPlan
from prorld.bench.dapo_workload import GroupPlan
from prorld.bench.processes import BenchFailed, Daemon
from prorld.bench.procfs import Usage, usage
from prorld.kit.http_client import HttpClient
from prorld.wire.batches import BatchEventPage, BatchGroupPage, BatchRecord
from prorld.wire.jobs import JobRecord
from prorld.wire.ops import Stages
from prorld.wire.policies import PausedPolicy, PolicyInfo

__all__ = ["Engine", "Gate", "RunningGroup", "Trainer"]

T = TypeVar("T")

WAIT_S = 60
LOOK_S = 0.1
TOKENS_MAX = 4096
EVENTS_A_PAGE = 1000


class _Sampled(msgspec.Struct, frozen=True):
    sampled_total: int


class Engine:
    """What the scripted engine says it sampled."""

    def __init__(self, url: str, pid: int) -> None:
        self.pid = pid
        self._http = HttpClient(url, connections_max=2)

    async def sampled(self) -> int:
        """Tokens so far, those of calls that were given up included."""
        response = await self._http.request("GET", "/scripted/state")
        return msgspec.json.decode(response.body, type=_Sampled).sampled_total

    def close(self) -> None:
        """Close the sockets."""
        self._http.close()


class RunningGroup:
    """A group of single jobs, as a trainer keeps it that has no batches."""

    def __init__(self, plan: GroupPlan, group_id: str, version: int) -> None:
        self.plan = plan
        self.group_id = group_id
        self.version = version
        self.rewards: list[float] = []
        self.is_cancelled = False

    @property
    def is_whole(self) -> bool:
        """Whether every sample has ended by itself."""
        return len(self.rewards) == len(self.plan.samples)

    @property
    def is_informative(self) -> bool:
        """Whether the samples differ."""
        return self.is_whole and max(self.rewards) - min(self.rewards) > 0


class Trainer:
    """One trainer and one daemon. Anything but a success raises ``BenchFailed``."""

    def __init__(self, daemon: Daemon, plan: DapoPlan) -> None:
        self.daemon = daemon
        self.plan = plan
        self.version = 0
        self.open_s = 0.0
        self.gate = Gate(self)
        self._http = HttpClient(daemon.address, connections_max=4 * plan.running * plan.group_size + 16)
        self._headers = (("authorization", f"Bearer {daemon.token}"), ("content-type", "application/json"))

    def close(self) -> None:
        """Close the sockets that are not in use."""
        self._http.close()

    # --- single jobs --------------------------------------------------------------------------------------------------

    async def roll(self, group: RunningGroup, sample: int) -> None:
        """One sample: a request that is held until it has ended, and another one where that was not long enough."""
        body = {
            **self._settings(),
            "job_id": f"{group.group_id}:{sample}",
            "instance": group.plan.instance(self.plan.turns),
            "group_id": group.group_id,
            "sample_index": sample,
        }
        record = await self._ask(f"/v1/jobs?wait_s={WAIT_S}", JobRecord, body)
        while record.outcome is None:
            record = await self._ask(f"/v1/jobs/{record.job_id}?wait_s={WAIT_S}", JobRecord)
        if record.outcome.kind == "ok" and record.reward is not None:
            group.rewards.append(record.reward)
        elif not (group.is_cancelled and record.outcome.kind == "cancelled"):
            raise BenchFailed(f"the job {record.job_id} ended {record.outcome}")

    async def cancel(self, groups: Sequence[RunningGroup]) -> None:
        """End what runs of these, all of them in one call."""
        for group in groups:
            group.is_cancelled = True
        job_ids = [f"{group.group_id}:{sample}" for group in groups for sample in range(self.plan.group_size)]
        if job_ids:
            await self._send("POST", "/v1/jobs/cancel", {"job_ids": job_ids, "reason": "the step is full"})

    # --- batches ------------------------------------------------------------------------------------------------------

    async def start_batch(
        self, batch_id: str, groups: Sequence[GroupPlan], *, carry_from: str | None, **more: Any
    ) -> None:
        """Ask for so many informative groups, the leftovers of the batch before first."""
        body = {
            **self._settings(),
            "batch_id": batch_id,
            "instances": [group.instance(self.plan.turns) for group in groups],
            "samples_per_group": self.plan.group_size,
            "target_groups": self.plan.target,
            "max_running_groups": self.plan.running,
            "leftovers": "carry",
            "max_staleness": None,
            **({} if carry_from is None else {"carry_from": carry_from}),
            **more,
        }
        await self._send("POST", "/v1/batches", body)

    async def groups(self, batch_id: str, after: int) -> BatchGroupPage:
        """What was accepted after a number, waited for."""
        path = f"/v1/batches/{batch_id}/groups?after={after}&wait_s={WAIT_S}&trajectories=false"
        return await self._ask(path, BatchGroupPage)

    async def acknowledge(self, batch_id: str, through: int) -> None:
        """These groups are safe with the trainer."""
        await self._send("POST", f"/v1/batches/{batch_id}/ack", {"through": through})

    async def batch(self, batch_id: str) -> BatchRecord:
        """What the service says of it."""
        return await self._ask(f"/v1/batches/{batch_id}", BatchRecord)

    async def ends(self, batch_id: str) -> list[tuple[str, str]]:
        """The terminal event of each of its groups: what it was, and of which group."""
        found: list[tuple[str, str]] = []
        after = "0"
        while True:
            path = f"/v1/batches/{batch_id}/events?after={after}&limit={EVENTS_A_PAGE}"
            page = await self._ask(path, BatchEventPage)
            found += [(event.event, event.group_id) for event in page.items if isinstance(event.group_id, str)]
            if page.next is None:
                return found
            after = page.next

    # --- the policy ---------------------------------------------------------------------------------------------------

    async def learn_version(self) -> None:
        """The version that the policy has."""
        self.version = (await self._ask("/v1/policies/default", PolicyInfo)).version

    async def train(self) -> None:
        """One step of training: the engine stands still, what it was sampling frozen in it, and has other weights."""
        paused = await self._ask("/v1/policies/default/pause", PausedPolicy, {"mode": "keep"})
        self.gate.pause()
        await trio.sleep(self.plan.training_s / self.plan.speed)
        body = {"pause_id": paused.pause_id, "version": self.version + 1}
        await self._send("POST", "/v1/policies/default/resume", body)
        self.version += 1
        self.gate.go_on()

    # --- the gate -----------------------------------------------------------------------------------------------------

    async def running(self) -> int:
        """How many jobs have a place of RUN."""
        return (await self._ask("/v1/stages", Stages)).run.active

    def usage(self) -> Usage:
        """What the daemon has used."""
        return usage(self.daemon.pid)

    # --- HTTP ---------------------------------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        return {
            "handler": "bench",
            "sampling": {"max_tokens": TOKENS_MAX},
            "agent": {"max_turns": 1000, "max_context_tokens": 1_000_000},
            "max_attempts": 1,
        }

    async def _ask(self, path: str, kind: type[T], body: Any = None) -> T:
        return msgspec.json.decode(await self._send("GET" if body is None else "POST", path, body), type=kind)

    async def _send(self, method: str, path: str, body: Any = None) -> bytes:
        data = b"" if body is None else msgspec.json.encode(body)
        response = await self._http.request(method, path, data, self._headers)
        if response.status >= 300:
            raise BenchFailed(f"{method} {path} answered {response.status}: {response.excerpt()}")
        return response.body


class Gate:
    """Looks at RUN again and again, while the engine works."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._looks = self._full = 0
        self._since: float | None = None
        self.open_s = 0.0

    @property
    def full(self) -> float:
        """The share of looks that found every place taken."""
        return self._full / self._looks if self._looks else 0.0

    def pause(self) -> None:
        """The engine stands still."""
        if self._since is not None:
            self.open_s += trio.current_time() - self._since
            self._since = None

    def go_on(self) -> None:
        """It works again."""
        self._since = trio.current_time()

    async def look(self) -> None:
        """Look until cancelled. What was asked before a pause and answered in it is not counted."""
        while True:
            await trio.sleep(LOOK_S)
            since = self._since
            if since is None:
                continue
            running = await self._trainer.running()
            if since == self._since:
                self._looks += 1
                self._full += running >= self._trainer.plan.slots
