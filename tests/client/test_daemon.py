"""A real daemon, killed in the middle of whatever a client does; the next one listens elsewhere."""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from prorld.client import Client, Sampling, SubmitBatch, SubmitJob
from prorld.client.arrays import rows_of_group
from prorld.client.layout import packed
from prorld.testing.scripted_engine.script import Latency, Script
from tests.client.ways import WAYS, run
from tests.daemon.support import daemon, scripted_engine, until

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("way", WAYS)]

SCRIPT = Script(turns=["ANSWER: 42", "ANSWER: 7"], pick="lot", latency=Latency(reload_s=0.5))
SUM = {"question": "What is 12 plus 30?", "answer": 42}


class Home:
    """One daemon after the other, on one state directory."""

    def __init__(self, place, engine, stack):
        self._place, self._engine, self._stack = place, engine, stack
        self.state = place / "state"
        self.start()

    def start(self):
        self.here = self._stack.enter_context(daemon(self._place, self._engine, talkative=True))
        with self.here.client() as client:
            until(lambda: [one.state for one in client.backends().items] == ["up"], 20, "the engine has joined")

    def replace(self):
        self.here.process.kill()
        self.here.process.wait()
        self.start()


KILLS_MAX = 5


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A home for all of them, with a daemon, and an engine that stays."""
    place = tmp_path_factory.mktemp("home")
    with scripted_engine(place, SCRIPT) as engine, ExitStack() as stack:
        yield Home(place, engine, stack)


def test_weights_are_moved_over_restarts(way, here):
    """A pause is there in the next daemon, also one of a body that failed; and an update is made whole."""

    async def scenario(client):
        before = (await client.policy("default")).version
        assert (await client.publish(before + 1, path="/weights/1")).state == "done"
        with pytest.raises(ZeroDivisionError):
            async with client.policy_update(before + 2) as hold:
                raise ZeroDivisionError
        info = await client.policy("default")
        assert (info.version, info.pause.pause_id) == (before + 1, hold.pause_id)
        async with client.policy_update(before + 2, pause_id=hold.pause_id) as hold:
            here.replace()
        assert [result.ok for result in hold.resumed.backends] == [True]
        codes: list[str | None] = []
        for version in range(before + 3, before + 3 + KILLS_MAX):
            with interrupting(here):
                ended = await client.publish(path=f"/weights/{version}")
            assert (ended.state, ended.version) == ("done", version)
            info = await client.policy("default")
            assert (info.version, info.pause) == (version, None)
            # The kill may come too late, when the update has just ended.
            codes = [update.code for update in await client.updates("default")][:2]
            if codes[1] == "interrupted":
                break
        return codes

    assert run(way, scenario, state_dir=here.state, patience_s=30) == [None, "interrupted"]


@contextmanager
def interrupting(here):
    """Kills the daemon while an update runs, and starts another."""

    def interrupt():
        with Client(state_dir=here.state) as client:
            until(lambda: client.policy("default").update is not None, 20, "the update runs")
        here.replace()

    thread = threading.Thread(target=interrupt)
    thread.start()
    yield
    thread.join()


def test_groups_and_rollouts_go_on_over_a_restart(way, here):
    """Each group once, from the daemon that came after too; and its arrays are those of the trajectory."""
    name = f"over-{way}"

    async def scenario(client):
        batch = SubmitBatch(
            batch_id=name, handler="calc", instances=[SUM] * 12, samples_per_group=4, target_groups=2,
            sampling=Sampling(max_tokens=32),
        )  # fmt: skip
        await client.submit_batch(batch)
        seen = []
        async for found in client.groups(name, trajectories=True, ack=True):
            seen.append(found)
            if len(seen) == 1:
                here.replace()
        jobs = [SubmitJob(handler="calc", instance=SUM) for _ in range(3)]
        rollouts = [found async for found in client.rollouts(jobs)]
        return seen, rollouts

    seen, rollouts = run(way, scenario, state_dir=here.state)
    assert len({group.seq for group in seen}) == len(seen) == 2
    assert [found.trajectory.job.job_id for found in rollouts] == [found.record.job_id for found in rollouts]
    for group in seen:
        flat = packed(rows_of_group(group))
        sampled = sum(branch.mask.count(1) for one in group.trajectories for branch in one.branches)
        assert int(flat.mask.sum()) == sampled > 0
        assert np.isfinite(flat.logprobs).all()
        assert {*flat.advantages.tolist()} == {float(np.float32(one)) for one in group.advantages}
