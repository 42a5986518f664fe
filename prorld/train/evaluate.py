"""The held-out instances under the weights of now, as a batch of purpose ``eval`` that holds the version."""

from __future__ import annotations

import time

from prorld.client import Client, ClientError
from prorld.domain.batch import BatchState
from prorld.train.records import EvalRecord
from prorld.train.rollouts import AWAY_S, LOOK_S, SLICE_S, STALLED_S, Rollouts, Stopped
from prorld.wire.batches import SubmitBatch

__all__ = ["evaluate", "give_up"]

# What an update is refused with while batches want the policy to stay as it is.
PINNED = "pinned"
# How long a batch that was cancelled may take to end.
CANCEL_S = 60.0


def give_up(client: Client, run_id: str, refused: ClientError) -> bool:
    """End the run's own evaluations that keep new weights out; whether there were any.

    A life that was cut off in one has left it behind. It may never end by itself: where the engine came back with old
    weights, it waits for that engine, which waits for the weights.
    """
    named = refused.details.get("batches", []) if refused.stable_code == PINNED and refused.details else []
    mine = [batch_id for batch_id in named if batch_id.startswith(_prefix(run_id))]
    for batch_id in mine:
        client.cancel_batch(batch_id, reason="the run that asked for it goes on without")
        # It has no more groups when it has ended.
        for _ in client.groups(batch_id, within_s=CANCEL_S, away_s=AWAY_S):
            pass
    return bool(mine)


def _prefix(run_id: str) -> str:
    return f"{run_id}-eval-"


def evaluate(
    rollouts: Rollouts, held_out: list[dict[str, object]], step: int, version: int, temperature: float
) -> EvalRecord:
    """Every instance, as often as the settings say. Raises ``Stopped``.

    One that an earlier life was cut off in is made anew: the weights are of another version by then.
    """
    client, settings = rollouts.client, rollouts.settings
    began = looked = heard = time.monotonic()
    batch = SubmitBatch(
        batch_id=f"{_prefix(rollouts.run_id)}{step}-v{version}-t{temperature:g}".replace(".", "_"),
        handler=settings.tasks.handler,
        policy=settings.policy,
        purpose="eval",
        instances=held_out,
        # A group of one has no spread, and an evaluation needs none.
        samples_per_group=settings.evaluation.samples,
        pin_version=True,
        max_staleness=None,
        sampling=settings.sampling.sampling(temperature),
        agent=settings.sampling.limits(),
    )
    batch_id = client.submit_batch(batch).batch_id
    after = client.batch(batch_id).acknowledged
    at = f"evaluation after step {step}, temperature {temperature:g}"
    while True:
        rollouts.say(f"{at}: {after} of {len(held_out)} instances")
        if rollouts.should_stop():
            raise Stopped
        try:
            for group in client.groups(batch_id, after=after, within_s=SLICE_S, away_s=AWAY_S):
                after, heard = group.seq, time.monotonic()
                client.ack(batch_id, group.seq, away_s=AWAY_S)
            break
        except ClientError as exc:
            if exc.stable_code != "nothing_new":
                raise
        now = time.monotonic()
        if now - heard > STALLED_S:
            raise ClientError(f"no group of batch {batch_id} came within {STALLED_S:g} s", code="stalled")
        if now - looked > LOOK_S:
            rollouts.look()
            looked = now
    record = client.batch(batch_id)
    if record.state is not BatchState.COMPLETE:
        rollouts.warn(f"evaluation {batch_id} ended {record.state.value}: {record.reason}")
    before = record.before_filter
    return EvalRecord(
        step=step,
        temperature=temperature,
        reward=before.reward_mean,
        samples=before.samples,
        seconds=time.monotonic() - began,
    )
