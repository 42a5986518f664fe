"""The loop: collect groups, make a step, keep it, hand the weights over, go on. Read this one first.

It may be killed at any moment, and so may the daemon. A checkpoint names the groups that it has used up; only then are
they acknowledged, so a later life is given every other one again, the same ones in the same order. What it has done
since the last checkpoint it does once more, to the same end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from prorld.client import Client, ClientError
from prorld.train.daemon_cpu import DaemonCpu
from prorld.train.ends import INTERRUPTED, advice, end_of
from prorld.train.errors import NothingToLearn
from prorld.train.evaluate import evaluate, give_up
from prorld.train.progress import Kept
from prorld.train.prompts import prompts_of
from prorld.train.publish import Published, Publisher, default_directory
from prorld.train.records import EndRecord, EvalRecord, Metrics, Record, Seen, StartRecord, StepRecord, mean
from prorld.train.rollouts import AWAY_S, Collected, Rollouts, Stopped, source_of
from prorld.train.run_config import RunSettings
from prorld.train.shapes import Learner, StepFigures

__all__ = ["Trainer", "Watcher"]

# How often evaluations of earlier lives are ended for new weights: once, and again for one that was still ending.
CUT_OFF_MAX = 3


class Watcher(Protocol):
    """Who looks on."""

    def say(self, words: str) -> None:
        """What is going on now."""
        ...

    def warn(self, words: str) -> None:
        """What somebody should know, now or later."""
        ...

    def show(self, record: Record, metrics: Metrics) -> None:
        """A line was written; ``metrics`` has all of them."""
        ...


class Trainer:
    """One run in one directory. ``run`` goes on where an earlier life of it was."""

    def __init__(
        self,
        settings: RunSettings,
        client: Client,
        learner: Learner,
        watcher: Watcher,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        state_dir: Path | None = None,
    ) -> None:
        self._settings, self._client, self._learner, self._watcher = settings, client, learner, watcher
        self._should_stop = should_stop
        self._out = Path(settings.out)
        self._out.mkdir(parents=True, exist_ok=True)
        self._kept = Kept(self._out)
        self.metrics = Metrics(self._out / "metrics.jsonl")
        prompts, self._held_out = prompts_of(settings)
        cpu = None if state_dir is None else DaemonCpu(state_dir, client.address)
        self._daemon_cpu: Callable[[], float | None] = (lambda: None) if cpu is None else cpu.since
        found = self._kept.load(settings)
        # The first version of a run is one above whatever the engines have: they get its weights before it begins.
        self._state = found or self._kept.begin(settings, client.policy(settings.policy).version + 1)
        self._on_disk = self._state
        self._kept.learner_of(self._state, learner)
        self.metrics.go_back(self._state.step)
        where = settings.hand_over.directory
        root = default_directory(self._state.run_id, self._out) if where is None else Path(where) / self._state.run_id
        self._publisher = Publisher(client, learner, settings, root, watcher.warn)
        self._rollouts = Rollouts(
            client=client, settings=settings, prompts=prompts, run_id=self._state.run_id, should_stop=should_stop,
            look=self._publisher.look, say=watcher.say, warn=watcher.warn,
        )  # fmt: skip
        self._source = source_of(self._rollouts, self._state.streams)

    def run(self) -> EndRecord:
        """All steps that are left. The end says why it is one."""
        began, first = time.monotonic(), self._state.step
        try:
            self._begin()
            why = self._steps()
            self._evaluate(last=True)
        except Stopped:
            why = INTERRUPTED
        self._keep()
        if why != INTERRUPTED:
            self._close()
        seconds = time.monotonic() - began
        done = self._state.step - first
        words = advice(why, self._settings, self._state, is_over_already=not done)
        if words is not None:
            self._watcher.warn(words)
        end = EndRecord(
            why=why, step=self._state.step, optimizer_steps=self._learner.step_count, seconds=seconds,
            steps_per_hour=3600 * done / seconds if done else None,
        )  # fmt: skip
        self._write(end)
        return end

    # --- the run -----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Acknowledge what the checkpoint has, give the engines the weights, write what an earlier life could not."""
        state, settings = self._state, self._settings
        self._acknowledge()
        published = self._publish()
        self._write(
            StartRecord(
                run_id=state.run_id,
                step=state.step,
                base_version=self._state.base_version,
                settings=msgspec.to_builtins(settings),
            )
        )
        if state.record is not None and all(record.step != state.step for record in self.metrics.steps):
            self._write(_with_update(state.record, published))
        self._evaluate()

    def _steps(self) -> str:
        while (why := end_of(self._settings, self._state)) is None:
            if self._should_stop():
                raise Stopped
            self._step()
            self._evaluate()
        return why

    def _step(self) -> None:
        """One step; after it the groups count as used, and the engines have what was learnt from them."""
        state, began = self._state, time.monotonic()
        self._daemon_cpu()
        found = self._source.collect(state.step, state.cursor, state.seq, state.seen)
        self._watcher.say(f"step {state.step + 1}: training on {len(found.groups)} groups")
        started = time.monotonic()
        figures = self._learn(found)
        trained = time.monotonic()
        record = self._record(found, figures, trained - started)
        self._state = msgspec.structs.replace(
            state,
            step=state.step + 1,
            optimizer_steps=self._learner.step_count,
            cursor=found.cursor,
            seq=found.seq if self._settings.mode == "async" else 0,
            seen=found.seen_all,
            empty=state.empty + 1 if figures is None else 0,
            acks={**state.acks, found.batch_id: found.seq} if found.seq else state.acks,
            record=record,
        )
        if self._state.step % self._settings.checkpoint_every == 0:
            self._keep()
        kept = time.monotonic()
        published = Published(0.0, 0.0)
        if figures is not None:
            self._watcher.say(f"step {self._state.step}: handing version {self._version} over")
            published = self._publish()
        record = msgspec.structs.replace(
            _with_update(record, published),
            checkpoint_s=kept - trained,
            wall_s=time.monotonic() - began,
            daemon_cpu_s=self._daemon_cpu(),
        )
        self._write(record)

    def _learn(self, found: Collected) -> StepFigures | None:
        """The step itself; none where every rollout of a group is as good as the others."""
        try:
            return self._learner.step(found.groups) if found.groups else None
        except NothingToLearn:
            return None

    @property
    def _version(self) -> int:
        """What the policy is called after the steps so far."""
        return self._state.base_version + self._state.optimizer_steps

    def _publish(self) -> Published:
        """The weights of now under a version of their own.

        Where steps of a life that was killed are made once more, the engines are ahead already, and stay there until
        they are caught up with: going back would make everything stale that is under way. Engines that were started
        again since are behind instead, and nobody else has the weights.
        """
        now = self._publisher.settled_version()
        if now > self._version and self._publisher.has_published(now) and not self._publisher.is_out():
            return Published(0.0, 0.0)
        if now >= self._version:
            base = now + 1 - self._state.optimizer_steps
            self._state = msgspec.structs.replace(self._state, base_version=base)
            self._on_disk = msgspec.structs.replace(self._on_disk, base_version=base)
            self._kept.write(self._on_disk)
        for _ in range(CUT_OFF_MAX):
            try:
                return self._publisher.publish(self._version)
            except ClientError as exc:
                if not give_up(self._client, self._state.run_id, exc):
                    raise
        return self._publisher.publish(self._version)

    def _keep(self) -> None:
        """A checkpoint of now, unless there is one; then the daemon may forget the groups that are in it."""
        if self._state.step != self._on_disk.step:
            self._state = self._on_disk = self._kept.save(self._state, self._learner)
        self._acknowledge()

    def _close(self) -> None:
        """Nothing goes on for nobody. A later life that has more to do begins behind all that was given out."""
        given = self._source.given()
        if given:
            state = self._state
            self._state = self._on_disk = msgspec.structs.replace(
                state, streams=state.streams + 1, cursor=state.cursor + given, seq=0, seen=Seen()
            )
            self._kept.write(self._state)
        self._source.close(self._state.step)

    def _acknowledge(self) -> None:
        if self._state.acks:
            for batch_id, seq in self._state.acks.items():
                try:
                    self._client.ack(batch_id, seq, away_s=AWAY_S)
                except ClientError as exc:
                    # Acknowledged by an earlier life, and forgotten since.
                    if exc.status not in (404, 410):
                        raise
            self._state = msgspec.structs.replace(self._state, acks={})

    # --- what is told ------------------------------------------------------------------------------------------------

    def _evaluate(self, *, last: bool = False) -> None:
        settings, step = self._settings.evaluation, self._state.step
        is_due = step == 0 or last or (settings.every > 0 and step % settings.every == 0)
        for temperature in settings.temperatures if is_due and self._held_out else ():
            if not self.metrics.has_evaluation(step, temperature):
                self._write(evaluate(self._rollouts, self._held_out, step, self._version, temperature))

    def _write(self, record: StartRecord | StepRecord | EvalRecord | EndRecord) -> None:
        self.metrics.add(record)
        self._watcher.show(record, self.metrics)

    def _record(self, found: Collected, figures: StepFigures | None, train_s: float) -> StepRecord:
        samples = [sample for group in found.groups for sample in group.samples]
        staleness = [float(group.staleness) for group in found.groups]
        return StepRecord(
            step=self._state.step + 1,
            version=self._state.base_version + self._learner.step_count,
            reward=found.seen.reward,
            reward_kept=mean([sample.reward for sample in samples]),
            groups=len(found.groups),
            groups_seen=found.seen.groups,
            samples=len(samples),
            solved_all=found.seen.solved_all,
            solved_none=found.seen.solved_none,
            staleness=mean(staleness) or 0.0,
            staleness_max=int(max(staleness, default=0)),
            figures=figures,
            tokens_sampled=sum(sum(row.response_mask) for sample in samples for row in sample.rows),
            wasted_rollouts=found.seen.wasted_rollouts,
            wasted_tokens=found.seen.wasted_tokens,
            rollout_s=found.seconds,
            train_s=train_s,
            optimizer_steps=self._learner.step_count,
            group_ids=[group.group_id for group in found.groups],
        )


def _with_update(record: StepRecord, published: Published) -> StepRecord:
    return msgspec.structs.replace(record, hand_over_s=published.hand_over_s, update_s=published.update_s)
