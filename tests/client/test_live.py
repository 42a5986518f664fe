"""The client against the real routes and real jobs: each method is understood, and gives what its type says."""

from __future__ import annotations

import trio

from prorld.client import Client
from prorld.wire.jobs import SubmitJob
from prorld.wire.looks import ReevaluationState
from prorld.wire.ops import AddBackend
from prorld.wire.policies import BackendResult, PutPolicy
from prorld.wire.trajectory import unpacked
from tests.http.live import live_world
from tests.http.support import ADMIN


def use(address: str) -> None:
    """What a trainer and an operator do."""
    with Client(address, ADMIN) as client:
        client.submit(SubmitJob(job_id="a", handler="fake", instance={}))
        assert client.wait("a", within_s=10).reward == 1.0
        assert unpacked(client.packed_trajectory("a")) == client.trajectory("a")
        assert client.verify("a").ok
        score = client.verify("a", rescore=True, tolerance=0.5, tolerance_max=2.0).rescore
        assert score is not None
        assert (score.mean, score.tolerance_mean, score.tolerance_max) == (0.0, 0.5, 2.0)
        begun = client.reevaluate("a", reason="why")
        found = client.wait_reevaluation("a", begun.n, within_s=10)
        assert (found.state, found.reward, found.reason) == (ReevaluationState.DONE, 1.0, "why")
        assert [record.n for record in client.reevaluations("a")] == [1]
        again = client.requeue("a")
        assert again.requeued_from == "a"
        assert client.wait(again.job_id, within_s=10).reward == 1.0
        page = client.all_events(limit=3)
        assert [event.seq for event in page.items] == [1, 2, 3]
        assert page.last == 3
        assert client.cancel_many(job_ids=["a"]) == 0
        info = client.add_backend(AddBackend(url="http://127.0.0.1:1/", kind="vllm"))
        assert client.drain_backend(info.backend_id).state == "draining"
        client.remove_backend(info.backend_id)
        assert client.backends().items == []
        assert client.sandboxes().items == []
        assert client.tasks().root.name == "root"
        assert client.put_policy("other", PutPolicy(max_staleness=2)).max_staleness == 2
        assert [info.name for info in client.policies()] == ["default", "other"]
        paused = client.pause_policy("default", mode="keep", pause_id="mine")
        assert client.pause_policy("default", mode="keep", pause_id="mine") == paused
        assert client.resume_policy("default", "mine", 3).backends == [BackendResult(id="b-1", ok=True, version=3)]
        update = client.update_policy("default", 4, path="/weights")
        assert client.wait_update("default", update.update_id, within_s=10).state == "done"
        assert [update.version for update in client.updates("default")] == [4]
        assert client.policy("default").version == 4
        assert client.drain().draining


async def test_every_method_is_understood():
    """One after the other, over a real socket."""
    async with live_world() as world:
        await trio.to_thread.run_sync(use, world.server.address)
