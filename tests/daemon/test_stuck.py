"""A rollout that is stuck harms itself alone: no other, no group, no batch and no end of the daemon waits for it.

What it may hold up is bounded by its own deadline. Real daemon, real sandboxes, a process that is deaf to all signals.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from prorld.domain.batch import BatchState, Quorum
from prorld.domain.job import JobState, StageTimeouts
from prorld.domain.outcome import OutcomeKind, Verdict
from prorld.testing.scripted_engine.script import Fault, Script
from prorld.wire.batches import SubmitBatch
from prorld.wire.jobs import JobRecord, SubmitJob
from tests.daemon.support import alive, daemon, scripted_engine, until

pytestmark = pytest.mark.slow

STATES = {"init": JobState.INITIALISING, "run": JobState.RUNNING, "eval": JobState.EVALUATING}
# Every stage, in every way: nine jobs, three of them in each stage.
STUCK = [(stage, how) for stage in STATES for how in ("asleep", "deaf", "swallows")]
STUCK_S = 6.0
# For what has to be quick on a machine with other work; far below any deadline that is not the stuck one's own.
SOON_S = 30.0
SETTINGS = """
[stages]
init = 4
run = 4
eval = 4

[handlers]
enabled = ["stuck"]

[timeouts]
drain_s = 1.0

"""


@pytest.fixture(autouse=True)
def handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task, as a distribution that the daemon finds."""
    place = tmp_path / "plugin"
    info = place / "prorld_stuck-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: prorld-stuck\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[prorld.handlers]\nstuck = tests.daemon.stuck_handler:StuckHandler\n")
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


def script(*faults: Fault) -> Script:
    """One turn, at once."""
    return Script(turns=["done"], faults=list(faults))


def job(name: str, *, stuck_s: float = 300.0, **instance: object) -> SubmitJob:
    """A job that may be stuck in a stage for so long."""
    return SubmitJob(
        job_id=name,
        handler="stuck",
        instance=dict(instance),
        timeouts=StageTimeouts(init_s=stuck_s, run_s=stuck_s, eval_s=stuck_s),
        max_attempts=1,
    )


def timed_out(record: JobRecord, stage: str) -> None:
    """It ended by the deadline of that stage, and by nothing else."""
    assert record.outcome is not None
    assert (record.outcome.kind, record.outcome.stage) == (OutcomeKind.TIMEOUT, stage), record
    assert record.reward is None


def test_stuck_rollouts_hold_up_nobody_beyond_their_deadlines(tmp_path: Path) -> None:
    """They have three of four places of each stage; all others pass through the fourth, and each ends by its own."""
    with (
        scripted_engine(tmp_path, script()) as engine,
        daemon(tmp_path, engine, settings=SETTINGS) as here,
        here.client() as client,
    ):
        idle = here.family()
        for stage, how in STUCK:
            client.submit(job(f"{how}-in-{stage}", where=stage, how=how, stuck_s=STUCK_S))
        names = [f"good-{number}" for number in range(6)]
        for name in names:
            client.submit(job(name))
        for name in names:
            record = client.wait(name, within_s=SOON_S)
            assert record.outcome is not None
            assert record.outcome.kind is OutcomeKind.OK, record
        assert client.get("deaf-in-eval").state is not JobState.DONE
        for stage, how in STUCK:
            timed_out(client.wait(f"{how}-in-{stage}", within_s=2 * STUCK_S + SOON_S), stage)
        # Their sandboxes are gone before they say so.
        assert client.status().sandboxes == 0
        until(lambda: len(here.family()) <= len(idle), 2, "no process is left")


def test_an_engine_that_never_answers_holds_up_its_own_rollout_alone(tmp_path: Path) -> None:
    """One call hangs for ever; the calls of others are answered."""
    hangs = Fault(kind="hang", count=1)
    with (
        scripted_engine(tmp_path, script(hangs)) as engine,
        daemon(tmp_path, engine, settings=SETTINGS) as here,
        here.client() as client,
    ):
        client.submit(job("stuck", stuck_s=STUCK_S))
        until(lambda: client.get("stuck").state is JobState.RUNNING, SOON_S, "it waits for the engine")
        for name in ("good-0", "good-1", "good-2"):
            client.submit(job(name))
            record = client.wait(name, within_s=SOON_S)
            assert record.outcome is not None
            assert record.outcome.kind is OutcomeKind.OK, record
        timed_out(client.wait("stuck", within_s=STUCK_S + SOON_S), "run")
        backend = client.backends().items[0]
        assert (backend.leases, backend.inflight) == (0, 0)


def test_the_end_of_the_daemon_does_not_wait_for_them(tmp_path: Path) -> None:
    """Their own deadlines are far; it ends by the deadline of draining, cleanly, and nothing of them is left."""
    with scripted_engine(tmp_path, script()) as engine, daemon(tmp_path, engine, settings=SETTINGS) as here:
        with here.client() as client:
            for stage, how in STUCK:
                client.submit(job(f"{how}-in-{stage}", where=stage, how=how))
            for stage, how in STUCK:
                name, state = f"{how}-in-{stage}", STATES[stage]
                until(lambda name=name, state=state: client.get(name).state is state, SOON_S, f"{name} is stuck")
        family = here.family()
        here.process.send_signal(signal.SIGTERM)
        assert here.process.wait(SOON_S) == 0
        until(lambda: not alive(family), 2, "everything is gone")


def batch(name: str, *, stuck_s: float = STUCK_S, **more: object) -> SubmitBatch:
    """Two groups of four, the second sample of the first is stuck."""
    instances = [{"where": "run", "how": "deaf", "only": 1}, {}]
    fields = {
        "batch_id": name, "handler": "stuck", "instances": instances, "samples_per_group": 4, "target_groups": 1,
        "timeouts": StageTimeouts(run_s=stuck_s), "max_attempts": 1, "leftovers": "cancel",
    }  # fmt: skip
    return SubmitBatch(**{**fields, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(("grace_s", "verdict"), [(300.0, Verdict.MASK), (0.0, Verdict.DROP)])
def test_its_group_goes_on_without_it(tmp_path: Path, grace_s: float, verdict: Verdict) -> None:
    """With a quorum the group stands, with what the others are worth: by the deadline of what is stuck, or at once.

    A sample that ran out of time is masked; one that its group did not wait for is dropped.
    """
    with (
        scripted_engine(tmp_path, script()) as engine,
        daemon(tmp_path, engine, settings=SETTINGS) as here,
        here.client() as client,
    ):
        client.submit_batch(batch("b", quorum=Quorum(min_usable=3, grace_s=grace_s), target_groups=2))
        groups = list(client.groups("b", trajectories=False))
        by_index = {group.index: group for group in groups}
        assert sorted(by_index) == [0, 1]
        stuck = by_index[0]
        assert stuck.rewards == [0.0, None, 0.0, 1.0]
        assert stuck.verdicts[1] is verdict
        assert stuck.advantages[1] is None
        assert client.batch("b").state is BatchState.COMPLETE


def test_the_end_of_its_batch_does_not_wait_for_it(tmp_path: Path) -> None:
    """The other group meets the target; what is stuck is cancelled with the leftovers, long before its deadline."""
    with (
        scripted_engine(tmp_path, script()) as engine,
        daemon(tmp_path, engine, settings=SETTINGS) as here,
        here.client() as client,
    ):
        client.submit_batch(batch("b", stuck_s=300.0))
        [group] = list(client.groups("b", trajectories=False))
        assert group.index == 1
        assert client.batch("b").state is BatchState.COMPLETE
        until(lambda: client.status().sandboxes == 0, SOON_S, "the stuck sandbox is gone")
        record = client.get("b:0:1")
        assert record.outcome is not None
        assert record.outcome.kind is OutcomeKind.CANCELLED
