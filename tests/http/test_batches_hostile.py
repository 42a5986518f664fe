"""Batches and whoever sends what no trainer means: it is refused by name, and nothing of it is there."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from tests.http.support import ALICE, BOB
from tests.http.test_routes_batches import BATCH, Here, here

__all__ = ["here"]

PACKED = {"Content-Type": "application/msgpack"}


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "body",
    [
        lambda number: {"informative": {"rule": "spread", "min_spread": number}},
        lambda number: {"informative": {"rule": "mean_between", "low": number, "high": 1.0}},
        lambda number: {"quorum": {"grace_s": number}},
        lambda number: {"max_wall_s": number},
        lambda number: {"carry_ttl_s": number},
        lambda number: {"metadata": {"x": number}},
        lambda number: {"instances": [{"prompt": "q", "reward": number}]},
    ],
)
async def test_what_is_no_number_is_refused(here: Here, number: float, body: Any) -> None:
    """MessagePack has such."""
    sent = msgspec.msgpack.encode(BATCH | body(number))
    reply = await here.client.call("POST", "/v1/batches", sent, headers=PACKED)
    assert (reply.status, reply.code) == (400, "invalid_field")


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"target_groups": 10**30}, "$.target_groups"),
        ({"max_groups": -1}, "$.max_groups"),
        ({"priority": 10**6}, "$.priority"),
        ({"batch_id": "ü"}, "$.batch_id"),
        ({"batch_id": "x" * 129}, "$.batch_id"),
        ({"instances": [{}, None]}, "$.instances[1]"),
        ({"informative": {"rule": "best"}}, "$.informative.rule"),
    ],
)
async def test_the_path_of_what_is_wrong_is_told(here: Here, change: dict[str, Any], path: str) -> None:
    reply = await here.client.call("POST", "/v1/batches", BATCH | change)
    assert (reply.status, reply.json["error"]["details"]["path"]) == (400, path)


@pytest.mark.parametrize("offset", [-1, 2**53 + 1, 2**63, 2**64])
async def test_offsets_and_acknowledgements_have_bounds(here: Here, offset: int) -> None:
    await here.client.call("POST", "/v1/batches", BATCH)
    for path, body in (("instances", {"offset": offset, "instances": []}), ("ack", {"through": offset})):
        reply = await here.client.call("POST", f"/v1/batches/b/{path}", body)
        assert (reply.status, reply.code) == (400, "invalid_field")


async def test_the_longest_ids_are_different_ones(here: Here) -> None:
    """Those of their groups and jobs are ids, too."""
    for name in ("x" * 127 + "a", "x" * 127 + "b"):
        assert (await here.client.call("POST", "/v1/batches", BATCH | {"batch_id": name})).status == 201
        reply = await here.client.call("POST", f"/v1/batches/{name}/cancel")
        assert reply.status == 202
        await here.over(name)
    seen: list[str] = []
    for name in ("x" * 127 + "a", "x" * 127 + "b"):
        events = (await here.client.call("GET", f"/v1/batches/{name}/events")).json["items"]
        groups = [event for event in events if event["event"] == "group.cancelled"]
        assert len(groups) == len(BATCH["instances"])  # type: ignore[arg-type]
        seen += [job_id for group in groups for job_id in group["job_ids"] if job_id]
    assert len(seen) == len(set(seen)) > 0
    assert all(len(job_id) <= 128 for job_id in seen)


async def test_both_forms_are_the_same_batch(here: Here) -> None:
    sent = msgspec.msgpack.encode(BATCH)
    assert (await here.client.call("POST", "/v1/batches", sent, headers=PACKED)).status == 201
    assert (await here.client.call("POST", "/v1/batches", BATCH)).status == 200


async def test_two_tenants_have_the_same_id(here: Here) -> None:
    """Each has its own; an admin is asked whose."""
    for token, target in ((ALICE, 1), (BOB, 2)):
        mine = {"Authorization": f"Bearer {token}"}
        body = BATCH | {"target_groups": target}
        assert (await here.client.call("POST", "/v1/batches", body, headers=mine)).status == 201
    for token, target in ((ALICE, 1), (BOB, 2)):
        mine = {"Authorization": f"Bearer {token}"}
        assert (await here.client.call("GET", "/v1/batches/b", headers=mine)).json["target_groups"] == target
    reply = await here.client.call("GET", "/v1/batches/b")
    assert (reply.status, reply.code) == (409, "ambiguous_batch")
