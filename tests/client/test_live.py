"""The client against the real routes and real jobs: each method is understood, and gives what its type says."""

from __future__ import annotations

import pytest
import trio

from prorld.client import AsyncClient
from prorld.wire.jobs import SubmitJob
from prorld.wire.looks import ReevaluationState
from prorld.wire.ops import AddBackend
from prorld.wire.policies import BackendResult, PutPolicy
from prorld.wire.trajectory import unpacked
from tests.client.ways import WAYS, run
from tests.http.live import live_world
from tests.http.support import ADMIN


async def use(client: AsyncClient) -> None:
    """What a trainer and an operator do."""
    await client.submit(SubmitJob(job_id="a", handler="fake", instance={}))
    assert (await client.wait("a", within_s=10)).reward == 1.0
    assert unpacked(await client.packed_trajectory("a")) == (await client.trajectory("a"))
    assert (await client.verify("a")).ok
    score = (await client.verify("a", rescore=True, tolerance=0.5, tolerance_max=2.0)).rescore
    assert score is not None
    assert (score.mean, score.tolerance_mean, score.tolerance_max) == (0.0, 0.5, 2.0)
    begun = await client.reevaluate("a", reason="why")
    found = await client.wait_reevaluation("a", begun.n, within_s=10)
    assert (found.state, found.reward, found.reason) == (ReevaluationState.DONE, 1.0, "why")
    assert [record.n for record in (await client.reevaluations("a"))] == [1]
    again = await client.requeue("a")
    assert again.requeued_from == "a"
    assert (await client.wait(again.job_id, within_s=10)).reward == 1.0
    page = await client.all_events(limit=3)
    assert [event.seq for event in page.items] == [1, 2, 3]
    assert page.last == 3
    assert (await client.cancel_many(job_ids=["a"])) == 0
    info = await client.add_backend(AddBackend(url="http://127.0.0.1:1/", kind="vllm"))
    assert (await client.drain_backend(info.backend_id)).state == "draining"
    await client.remove_backend(info.backend_id)
    assert (await client.backends()).items == []
    assert (await client.sandboxes()).items == []
    assert (await client.tasks()).root.name == "root"
    assert (await client.put_policy("other", PutPolicy(max_staleness=2))).max_staleness == 2
    assert [info.name for info in (await client.policies())] == ["default", "other"]
    paused = await client.pause_policy("default", mode="keep", pause_id="mine")
    assert (await client.pause_policy("default", mode="keep", pause_id="mine")) == paused
    assert (await client.resume_policy("default", "mine", 3)).backends == [BackendResult(id="b-1", ok=True, version=3)]
    update = await client.update_policy("default", 4, path="/weights")
    assert (await client.wait_update("default", update.update_id, within_s=10)).state == "done"
    assert [update.version for update in (await client.updates("default"))] == [4]
    assert (await client.policy("default")).version == 4
    assert (await client.drain()).draining


@pytest.mark.parametrize("way", WAYS)
async def test_every_method_is_understood(way: str):
    """One after the other, over a real socket, whichever way it waits."""
    async with live_world() as world:
        await trio.to_thread.run_sync(run, way, use, world.server.address, ADMIN)
