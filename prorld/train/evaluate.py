"""The held-out instances under the weights of now, as a batch of purpose ``eval`` that holds the version."""

from __future__ import annotations

import time

from prorld.client import ClientError
from prorld.domain.batch import BatchState
from prorld.train.records import EvalRecord
from prorld.train.rollouts import AWAY_S, LOOK_S, SLICE_S, STALLED_S, Rollouts, Stopped
from prorld.wire.batches import SubmitBatch

__all__ = ["evaluate"]


def evaluate(rollouts: Rollouts, held_out: list[dict[str, object]], step: int, temperature: float) -> EvalRecord:
    """Every instance, as often as the settings say; one that an earlier life began goes on. Raises ``Stopped``."""
    client, settings = rollouts.client, rollouts.settings
    began = looked = heard = time.monotonic()
    batch = SubmitBatch(
        batch_id=f"{rollouts.run_id}-eval-{step}-t{temperature:g}".replace(".", "_"),
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
    rollouts.say(f"evaluation after step {step}: {len(held_out)} instances at temperature {temperature:g}")
    while True:
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
