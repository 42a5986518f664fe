"""What trainers do while the daemon is killed again and again: single jobs, chained batches, a stream, evaluations.

Each is sure of nothing but what it was answered, asks again when an answer does not come, and tells the oracle every
answer. What a job's result has to be follows from its instance.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import trio

from prorld.bench.crash_caller import Caller, Refused
from prorld.bench.crash_oracle import Oracle
from prorld.bench.dapo_workload import Workload

__all__ = ["GROUP_SIZE", "Work", "chain", "evaluations", "settings", "singles", "stream"]

GROUP_SIZE = 4
TARGET = 4
RUNNING = 6
# Prompts of a batch that have not come to an end, at most.
AHEAD = 12
EVAL_GROUPS = 3
HOLD_S = 10
REST_S = 0.05
# Tokens of the setting, made short: what takes longer than the daemon lives would never end.
SHORTER = 4
TOKENS_MAX = 160

Body = dict[str, Any]


class Work:
    """What all of them share. ``stopping`` is set when no more work is to be begun."""

    def __init__(self, caller: Caller, oracle: Oracle, seed: int, *, with_sandboxes: bool = True) -> None:
        self.caller = caller
        self.oracle = oracle
        self.dice = random.Random(seed)  # noqa: S311 - no secret
        self.with_sandboxes = with_sandboxes
        self.stopping = trio.Event()
        self.planned: dict[str, list[float]] = {}
        self.cancelled: set[str] = set()
        self.claimed: dict[str, str] = {}
        self.appended: dict[str, int] = {}
        self._workload = Workload(seed, GROUP_SIZE)
        self._prompts = 0

    def instance(self, *, with_sandbox: bool = False) -> Body:
        """Another prompt; what its samples are worth is kept under its name."""
        group = self._workload.group(self._prompts)
        name = f"prompt {self._prompts}"
        self._prompts += 1
        samples = [
            {"tokens": min(TOKENS_MAX, 1 + sample.tokens // SHORTER), "reward": sample.reward}
            for sample in group.samples
        ]
        self.planned[name] = [sample.reward for sample in group.samples]
        return {"prompt": name, "turns": 2, "samples": samples, "sandbox": with_sandbox}

    def instances(self, count: int) -> list[Body]:
        """So many."""
        return [self.instance() for _ in range(count)]

    def one_in(self, count: int) -> bool:
        """Now and then."""
        return self.dice.randrange(count) == 0

    async def rest(self, seconds: float = REST_S) -> None:
        """A moment of random length."""
        await trio.sleep(self.dice.uniform(0, 2 * seconds))


def settings() -> Body:
    """What jobs and batches of this bench have in common."""
    return {"handler": "bench", "sampling": {"max_tokens": 4096}, "agent": {"max_turns": 1000}, "max_attempts": 2}


# --- single jobs ------------------------------------------------------------------------------------------------------


async def singles(work: Work, worker: int) -> None:
    """One job after the other; some have a sandbox, some are cancelled, some are handed in twice, some left alone."""
    number = 0
    while not work.stopping.is_set():
        job_id = f"single-{worker}-{number}:0"
        number += 1
        body = {
            **settings(),
            "job_id": job_id,
            "instance": work.instance(with_sandbox=work.with_sandboxes and work.one_in(4)),
        }
        work.oracle.job(await work.caller.post("/v1/jobs", body))
        if work.one_in(8):
            await work.rest()
            work.cancelled.add(job_id)
            work.oracle.job(await work.caller.post(f"/v1/jobs/{job_id}/cancel", {"reason": "changed my mind"}))
        if work.one_in(4):
            work.oracle.job(await work.caller.post("/v1/jobs", body))
        if work.one_in(3):
            continue
        await _done(work, job_id)


async def _done(work: Work, job_id: str) -> None:
    while job_id not in work.oracle.done:
        work.oracle.job(await work.caller.get(f"/v1/jobs/{job_id}?wait_s={HOLD_S}"))


# --- batches ----------------------------------------------------------------------------------------------------------


async def chain(work: Work) -> None:
    """Batches with a target, each with the leftovers of the one before; in the end all that is left is let end."""
    before: str | None = None
    number = 0
    while not work.stopping.is_set() or before is None:
        batch_id = f"chain-{number}"
        number += 1
        selection = "arrival" if number % 2 else "submission"
        await _begin(work, batch_id, before, target_groups=TARGET, leftovers="carry", selection=selection)
        await _live(work, batch_id, until_full=True)
        before = batch_id
    await _begin(work, "chain-rest", before, target_groups=None, leftovers="drain")
    await _live(work, "chain-rest", until_full=False)


async def stream(work: Work) -> None:
    """One batch without an end, fed as it goes and acknowledged as it comes."""
    await _begin(work, "stream", None, target_groups=None, leftovers="drain")
    await _live(work, "stream", until_full=False)


async def evaluations(work: Work) -> None:
    """Small batches whose every group is delivered."""
    number = 0
    while not work.stopping.is_set() or not number:
        batch_id = f"eval-{number}"
        number += 1
        await _begin(work, batch_id, None, purpose="eval", instances=EVAL_GROUPS)
        await _append(work, batch_id, 0, is_last=True)
        await _follow(work, batch_id)
        await work.rest(10 * REST_S)


async def _begin(work: Work, batch_id: str, before: str | None, *, instances: int = 2, **more: Any) -> None:
    body = {
        **settings(),
        "batch_id": batch_id,
        "instances": work.instances(instances),
        "samples_per_group": GROUP_SIZE,
        "max_running_groups": RUNNING,
        "max_staleness": None,
        **more,
    }
    if before is not None:
        body["carry_from"] = before
        work.claimed[batch_id] = before
    record = await work.caller.post("/v1/batches", body)
    if work.one_in(2):
        # The answer may have been lost; the same again is the same batch.
        record = await work.caller.post("/v1/batches", body)
    work.oracle.batch(record)
    work.appended[batch_id] = instances


async def _live(work: Work, batch_id: str, *, until_full: bool) -> None:
    """Feed a batch and follow it. Where nothing ends it by itself, say in the end that there is no more."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(_feed, work, batch_id, until_full=until_full))
        await _follow(work, batch_id)
        nursery.cancel_scope.cancel("the batch is over")


async def _feed(work: Work, batch_id: str, *, until_full: bool) -> None:
    """Prompts as they are needed: never more than so many that have not ended."""
    while until_full or not work.stopping.is_set():
        record = await _look(work, batch_id)
        if record["state"] != "running":
            return
        is_short = record["groups"]["waiting"] + record["groups"]["running"] < AHEAD
        if is_short and not await _append(work, batch_id, work.dice.randint(1, 4)):
            return
        await work.rest()
    await _append(work, batch_id, 0, is_last=True)


async def _append(work: Work, batch_id: str, count: int, *, is_last: bool = False) -> bool:
    """Hand prompts in, some of them twice; whether the batch took them."""
    offset = work.appended[batch_id]
    body = {"offset": offset, "instances": work.instances(count), "last": is_last}
    path = f"/v1/batches/{batch_id}/instances"
    try:
        for _ in range(2 if work.one_in(3) else 1):
            answer = await work.caller.post(path, body)
            work.oracle.appended(batch_id, answer["next_offset"])
            if answer["next_offset"] != offset + count:
                work.oracle.lie(f"{batch_id}: {count} prompts at {offset}, and the next is {answer['next_offset']}")
            work.appended[batch_id] = offset + count
    except Refused as exc:
        if exc.code != "batch_ended":
            work.oracle.lie(f"{batch_id}: {exc}")
        return False
    return True


async def _follow(work: Work, batch_id: str) -> None:
    """Read groups in order until there are no more, and acknowledge them in order, some later than others."""
    after = acknowledged = 0
    is_over = False
    while not is_over:
        page = await work.caller.get(
            f"/v1/batches/{batch_id}/groups?after={after}&wait_s={HOLD_S}&instances=true&trajectories=false"
        )
        work.oracle.batch_groups(batch_id, page["items"])
        for group in page["items"]:
            if group["seq"] <= after:
                work.oracle.lie(f"{batch_id}: after {after} came the group {group['seq']}")
            after = group["seq"]
            _judge(work, batch_id, group)
        is_over = page["is_over"]
        if after > acknowledged and (is_over or work.one_in(2)):
            answer = await work.caller.post(f"/v1/batches/{batch_id}/ack", {"through": after})
            work.oracle.acked(batch_id, answer["through"])
            acknowledged = after
    await _look(work, batch_id)


async def _look(work: Work, batch_id: str) -> Body:
    """Its record. Answers may overtake each other: it has to know what had been told when it was asked for."""
    before = work.oracle.before(batch_id)
    record: Body = await work.caller.get(f"/v1/batches/{batch_id}")
    work.oracle.batch(record, before)
    return record


def _judge(work: Work, batch_id: str, group: Body) -> None:
    """Whether a delivered group is what its prompt makes it."""
    planned = work.planned[group["instance"]["prompt"]]
    if group["rewards"] != planned:
        work.oracle.lie(f"{batch_id}: {group['group_id']} has the rewards {group['rewards']}, and not {planned}")
