"""What has to be true when nobody kills any more: every job has its one result, every batch exactly its groups."""

from __future__ import annotations

from typing import Any

import trio

from prorld.bench.crash_caller import Caller, Refused
from prorld.bench.crash_oracle import ENDS, Oracle
from prorld.bench.crash_work import GROUP_SIZE, Work

__all__ = ["check_all", "until_quiet"]

CHECKERS = 4
QUIET_S_MAX = 180.0
LOOK_S = 0.2


async def until_quiet(caller: Caller) -> bool:
    """Wait until every job has ended; whether that came."""
    with trio.move_on_after(QUIET_S_MAX):
        while True:
            jobs = (await caller.get("/v1/status"))["jobs"]
            if not sum(count for state, count in jobs.items() if state != "done"):
                return True
            await trio.sleep(LOOK_S)
    return False


async def check_all(work: Work) -> dict[str, int]:
    """Look at everything; what is wrong goes to the oracle. How much was looked at."""
    listed = await work.caller.all("/v1/jobs")
    job_ids = [record["job_id"] for record in listed]
    if len(set(job_ids)) != len(job_ids):
        work.oracle.lie("jobs are listed twice")
    for job_id in sorted(work.oracle.accepted - set(job_ids)):
        work.oracle.lost(job_id)
    for record in listed:
        work.oracle.job(record)
        _result(work, record)
    await _each_job(work, job_ids)
    batches = await work.caller.all("/v1/batches")
    known = {record["batch_id"] for record in batches}
    for batch_id in sorted(set(work.oracle.batches) - known):
        work.oracle.lost(batch_id)
    ends = await _batches(work, [record["batch_id"] for record in batches])
    _chains(work.oracle, ends)
    _members(work.oracle, ends, set(job_ids))
    return {
        "jobs": len(job_ids),
        "batches": len(batches),
        "groups_done": sum(1 for found in ends.values() for _, event in found if event == "group.done"),
        "attempts_lost": sum(_lost(record) for record in listed),
    }


def _lost(record: dict[str, Any]) -> int:
    return sum(1 for attempt in record["attempts"] if attempt["outcome"]["kind"] == "lost")


def _result(work: Work, record: dict[str, Any]) -> None:
    """Whether a job ended as its instance says; those of batches are judged with their groups."""
    job_id, outcome = record["job_id"], record["outcome"]
    if outcome is None:
        work.oracle.lie(f"{job_id} is {record['state']} when all is over")
        return
    may_be_cancelled = job_id in work.cancelled or record["group_id"] is not None
    if outcome["kind"] != "ok" and not (outcome["kind"] == "cancelled" and may_be_cancelled):
        work.oracle.lie(f"{job_id} ended {outcome}")
    numbers = [attempt["n"] for attempt in record["attempts"]]
    if numbers != list(range(1, len(numbers) + 1)):
        work.oracle.lie(f"{job_id} has the attempts {numbers}")


async def _each_job(work: Work, job_ids: list[str]) -> None:
    """The events of each, and its tokens by the service's own check."""
    left = iter(job_ids)

    async def checker() -> None:
        for job_id in left:
            work.oracle.trail(job_id, await work.caller.all_events(f"/v1/jobs/{job_id}/events"))
            try:
                sound = await work.caller.get(f"/v1/jobs/{job_id}/verify")
            except Refused as exc:
                work.oracle.lie(f"{job_id}: {exc}")
                continue
            if not sound["ok"]:
                work.oracle.lie(f"{job_id} is not sound: {str(sound)[:400]}")

    async with trio.open_nursery() as nursery:
        for _ in range(CHECKERS):
            nursery.start_soon(checker)


async def _batches(work: Work, batch_ids: list[str]) -> dict[str, list[tuple[str, str]]]:
    """Every batch against its own events; the ends of each group, in the order of time, as (batch, event)."""
    ends: dict[str, list[tuple[str, str]]] = {}
    carried: dict[str, int] = {}
    # Oldest first: leftovers are counted before they are claimed.
    for batch_id in reversed(batch_ids):
        record = await work.caller.get(f"/v1/batches/{batch_id}")
        work.oracle.batch(record)
        items = await work.caller.all_events(f"/v1/batches/{batch_id}/events")
        work.oracle.replayed(batch_id, items)
        claimed = carried.get(work.claimed.get(batch_id, ""), 0)
        work.oracle.counted(record, items, claimed + record["next_offset"])
        carried[batch_id] = sum(1 for item in items if item["event"] == "group.carried")
        groups = await work.caller.get(f"/v1/batches/{batch_id}/groups?after=0&trajectories=false&instances=true")
        work.oracle.batch_groups(batch_id, groups["items"])
        if record["state"] not in ("complete", "exhausted"):
            work.oracle.lie(f"{batch_id} ended {record['state']}: {record['reason']}")
        if record["target_groups"] is not None and record["groups"]["informative"] != record["target_groups"]:
            work.oracle.lie(f"{batch_id} has {record['groups']['informative']} of {record['target_groups']} groups")
        for item in items:
            if item["event"] in ENDS:
                ends.setdefault(item["group_id"], []).append((batch_id, item["event"]))
    return ends


def _chains(oracle: Oracle, ends: dict[str, list[tuple[str, str]]]) -> None:
    """A group is carried from batch to batch, and ends in the last of them."""
    for group_id, found in ends.items():
        *before, (_, last) = found
        if last == "group.carried" or any(event != "group.carried" for _, event in before):
            oracle.lie(f"{group_id} ended as {found}")


def _members(oracle: Oracle, ends: dict[str, list[tuple[str, str]]], job_ids: set[str]) -> None:
    """The jobs of batches are those of their groups, each with all its samples, and no others."""
    members = {job_id for job_id in job_ids if not job_id.startswith("single-")}
    wanted = {
        f"{group_id}:{sample}"
        for group_id, found in ends.items()
        if found[-1][1] in ("group.done", "group.filtered")
        for sample in range(GROUP_SIZE)
    }
    for job_id in sorted(wanted - members)[:10]:
        oracle.lie(f"{job_id} is of a group that ended, and there is no such job")
    for job_id in sorted(job_id for job_id in members if job_id.rpartition(":")[0] not in ends)[:10]:
        oracle.lie(f"{job_id} is of no group")
