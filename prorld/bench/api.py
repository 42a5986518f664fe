"""The daemon and the engine as the bench talks to them: real HTTP, few words, every request counted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
import trio

from prorld.bench.processes import BenchFailed, Daemon
from prorld.kit.http_client import HttpClient, decode_json

__all__ = ["Api", "EngineApi", "Job", "until"]

T = TypeVar("T")

WAIT_S = 60
PAGE = 500
POLL_S = 0.02
UNTIL_S_MAX = 120.0


class Outcome(msgspec.Struct, frozen=True):
    """How a job ended."""

    kind: str
    message: str = ""


class Job(msgspec.Struct, frozen=True):
    """The parts of a job's record that are looked at."""

    job_id: str
    state: str
    outcome: Outcome | None = None
    reward_parts: dict[str, float] = {}
    ended_at: str | None = None


class _Page(msgspec.Struct, frozen=True):
    items: list[Job]
    next: str | None = None


class _Count(msgspec.Struct, frozen=True):
    cancelling: int


class _Status(msgspec.Struct, frozen=True):
    jobs: dict[str, int]


class _Tree(msgspec.Struct, frozen=True):
    tasks: int


class _Branch(msgspec.Struct, frozen=True):
    token_ids: list[int]


class _Call(msgspec.Struct, frozen=True):
    prompt_len: int
    sampled_len: int


class Trajectory(msgspec.Struct, frozen=True):
    """The parts of a trajectory from which its engine calls can be repeated."""

    branches: list[_Branch]
    calls: list[_Call]


class EngineState(msgspec.Struct, frozen=True):
    """What the scripted engine says of itself."""

    calls_total: int
    waiting: int
    faults_met: dict[str, int] = {}


_JOB = msgspec.json.Decoder(Job)
_PAGE = msgspec.json.Decoder(_Page)
_COUNT = msgspec.json.Decoder(_Count)
_STATUS = msgspec.json.Decoder(_Status)
_TREE = msgspec.json.Decoder(_Tree)
_TRAJECTORY = msgspec.json.Decoder(Trajectory)
_ENGINE_STATE = msgspec.json.Decoder(EngineState)


async def until(is_so: Callable[[], Awaitable[bool]], what: str) -> None:
    """Ask again and again, for a bounded time: processes tell nobody when they change."""
    with trio.move_on_after(UNTIL_S_MAX):
        while True:
            if await is_so():
                return
            await trio.sleep(POLL_S)
    raise BenchFailed(f"not within {UNTIL_S_MAX:g} s: {what}")


class Api:
    """The daemon. Anything but a success raises ``BenchFailed``: a bench that goes on after errors measures them."""

    def __init__(self, daemon: Daemon, *, connections_max: int) -> None:
        self.daemon = daemon
        self.requests = 0
        self._http = HttpClient(daemon.address, connections_max=connections_max)
        self._headers = (("authorization", f"Bearer {daemon.token}"), ("content-type", "application/json"))

    def close(self) -> None:
        """Close the sockets that are not in use."""
        self._http.close()

    async def get(self, path: str) -> bytes:
        """The body of a GET."""
        return await self._send("GET", path)

    async def submit(self, instance: dict[str, Any], *, max_tokens: int = 64, max_turns: int = 1000) -> str:
        """Hand a job in; its id."""
        body = _body(instance, max_tokens=max_tokens, max_turns=max_turns)
        return _JOB.decode(await self._send("POST", "/v1/jobs", body)).job_id

    async def roll(self, instance: dict[str, Any]) -> None:
        """A whole rollout in one request; it must end well."""
        job = _JOB.decode(await self._send("POST", f"/v1/jobs?wait_s={WAIT_S}", _body(instance)))
        if job.outcome is None:
            await self.ended(job.job_id)
        elif job.outcome.kind != "ok":
            raise BenchFailed(f"a rollout ended {job.outcome.kind}: {job.outcome.message}")

    async def ended(self, job_id: str) -> Job:
        """Wait for a job's end; it must be a good one."""
        while True:
            job = _JOB.decode(await self._send("GET", f"/v1/jobs/{job_id}?wait_s={WAIT_S}"))
            if job.outcome is None:
                continue
            if job.outcome.kind != "ok":
                raise BenchFailed(f"a rollout ended {job.outcome.kind}: {job.outcome.message}")
            return job

    async def trajectory(self, job_id: str) -> Trajectory:
        """The tokens of a job that has ended."""
        return _TRAJECTORY.decode(await self.get(f"/v1/jobs/{job_id}/trajectory"))

    async def cancel(self, job_ids: Sequence[str]) -> int:
        """End many jobs in one call; how many were alive."""
        body = {"job_ids": job_ids, "reason": "the bench"}
        return _COUNT.decode(await self._send("POST", "/v1/jobs/cancel", body)).cancelling

    async def until_over(self) -> None:
        """Wait until every job has ended."""

        async def is_over() -> bool:
            return not await self.alive()

        await until(is_over, "every job has ended")

    async def alive(self) -> int:
        """Jobs that have not ended."""
        jobs = _STATUS.decode(await self.get("/v1/status")).jobs
        return sum(count for state, count in jobs.items() if state != "done")

    async def tasks(self) -> int:
        """How many tasks run in the daemon."""
        return _TREE.decode(await self.get("/v1/debug/tasks")).tasks

    async def newest(self, count: int) -> list[Job]:
        """The jobs handed in last."""
        found: list[Job] = []
        cursor = ""
        while len(found) < count:
            page = _PAGE.decode(await self.get(f"/v1/jobs?limit={PAGE}{cursor}"))
            found += page.items
            if page.next is None:
                break
            cursor = f"&next={page.next}"
        return found[:count]

    async def _send(self, method: str, path: str, body: Any = None) -> bytes:
        self.requests += 1
        data = b"" if body is None else msgspec.json.encode(body)
        response = await self._http.request(method, path, data, self._headers)
        if response.status >= 300:
            raise BenchFailed(f"{method} {path} answered {response.status}: {response.excerpt()}")
        return response.body


def _body(instance: dict[str, Any], *, max_tokens: int = 64, max_turns: int = 1000) -> dict[str, Any]:
    return {
        "handler": "bench",
        "instance": instance,
        "sampling": {"max_tokens": max_tokens},
        "agent": {"max_turns": max_turns, "max_context_tokens": 1_000_000},
        "max_attempts": 1,
    }


class EngineApi:
    """The scripted engine, past the daemon."""

    def __init__(self, url: str, *, pid: int, connections_max: int) -> None:
        self.pid = pid
        self._http = HttpClient(url, connections_max=connections_max)

    async def generate(self, prompt: Sequence[int], max_tokens: int, name: str) -> None:
        """What the daemon sends for one turn, sent by the barest loop there is."""
        payload = {
            "model": "scripted",
            "token_ids": prompt,
            "request_id": name,
            "return_token_ids": True,
            "sampling_params": {"max_tokens": max_tokens, "logprobs": 0, "detokenize": False},
        }
        headers = (("content-type", "application/json"), ("x-session-id", name))
        response = await self._http.request("POST", "/inference/v1/generate", msgspec.json.encode(payload), headers)
        if response.status != 200:
            raise BenchFailed(f"the engine answered {response.status}: {response.excerpt()}")
        msgspec.json.decode(response.body)

    def close(self) -> None:
        """Close the sockets that are not in use."""
        self._http.close()

    async def state(self) -> EngineState:
        """Its counters."""
        response = await self._http.request("GET", "/scripted/state")
        return decode_json(response, _ENGINE_STATE)

    async def slow_down(self, seconds: float) -> None:
        """Let every call from now on take that long."""
        fault = {"kind": "slow", "count": None, "seconds": seconds}
        await self._order("POST", "/scripted/faults", fault)

    async def speed_up(self) -> None:
        """Back to calls that take no time."""
        await self._order("DELETE", "/scripted/faults")

    async def hold(self) -> None:
        """Take calls and don't answer them."""
        await self._order("POST", "/pause?mode=keep&clear_cache=false")

    async def let_go(self) -> None:
        """Answer what was held."""
        await self._order("POST", "/resume")

    async def until_waiting(self, count: int) -> None:
        """Wait until that many calls are held."""

        async def are_there() -> bool:
            return (await self.state()).waiting == count

        await until(are_there, f"{count} calls wait at the engine")

    async def _order(self, method: str, path: str, body: Any = None) -> None:
        data = b"" if body is None else msgspec.json.encode(body)
        headers = (("content-type", "application/json"),)
        response = await self._http.request(method, path, data, headers)
        if response.status >= 300:
            raise BenchFailed(f"{method} {path} of the engine answered {response.status}")
