"""Two lives of a run around a kill at a bad moment, with a daemon and a source of groups that are only played."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from prorld.client import Client
from prorld.train.loop import Trainer
from prorld.train.records import Seen
from prorld.train.rollouts import Collected
from prorld.train.run_config import EvaluationSettings, GroupSettings, HandOverSettings, RunSettings, TaskSettings
from prorld.train.shapes import TrainGroup
from prorld.wire.policies import PolicyUpdate
from tests.train.fake_learner import FakeLearner
from tests.train.support import row, sample


class Killed(BaseException):
    """In the place of SIGKILL."""


class Daemon:
    """What a trainer asks of one. ``calls`` are in order; ``running`` is an update that an earlier life left.

    ``engines`` are in the states that a test says.
    """

    address = "nowhere"

    def __init__(self) -> None:
        self.version = 0
        self.acked: dict[str, int] = {}
        self.made: list[PolicyUpdate] = []
        self.running: PolicyUpdate | None = None
        self.engines = ["serving"]
        self.calls: list[str] = []

    def policy(self, _policy: str) -> Any:
        return SimpleNamespace(version=self.version, update=self.running)

    def backends(self, _policy: str) -> Any:
        return SimpleNamespace(items=[SimpleNamespace(state=state) for state in self.engines])

    def updates(self, _policy: str) -> list[PolicyUpdate]:
        return self.made[::-1]

    def publish(self, version: int, how: Any, *, path: str, **_: Any) -> PolicyUpdate:
        self.calls.append(f"update {version}")
        made = update(version, path, "done")
        self.made.append(made)
        self.version = version
        return made

    def wait_update(self, _policy: str, update_id: str, **_: Any) -> PolicyUpdate:
        if self.running is not None and self.running.update_id == update_id:
            self.calls.append(f"wait {self.running.version}")
            self.made.append(update(self.running.version, self.running.path or "", "done"))
            self.version, self.running = self.running.version, None
        return next(one for one in self.made if one.update_id == update_id)

    def ack(self, batch_id: str, seq: int, **_: Any) -> None:
        self.acked[batch_id] = seq


class Source:
    """Groups by step; the end of what it was given is a kill."""

    def __init__(self, *groups: list[TrainGroup]) -> None:
        self.groups = groups
        self.asked: list[tuple[int, int]] = []

    def collect(self, step: int, cursor: int, seq: int, seen: Seen) -> Collected:
        self.asked.append((step, cursor))
        if step >= len(self.groups):
            raise Killed
        return Collected(
            batch_id=f"batch-{step}", groups=self.groups[step], seen=Seen(), seen_all=Seen(), cursor=cursor + 1,
            seq=len(self.groups[step]), seconds=0.0,
        )  # fmt: skip

    def given(self) -> int:
        return 0

    def close(self, step: int) -> None:
        """Nothing goes on."""


def update(version: int, path: str, state: Any) -> PolicyUpdate:
    return PolicyUpdate(
        update_id=f"u-{version}-{path}", policy="default", state=state, version=version, epoch=version, how="reload",
        path=path, mode="abort", created_at="now",
    )  # fmt: skip


def group_of(name: str, *advantages: float) -> TrainGroup:
    samples = [sample(each, row([1], [2]), index=n) for n, each in enumerate(advantages)]
    return TrainGroup(group_id=name, staleness=0, samples=samples)


def life(place: Path, daemon: Daemon, source: Source, learner: FakeLearner, **more: Any) -> Trainer:
    """One more of them, in the same directory."""
    prompts = place / "prompts.jsonl"
    prompts.write_text('{"n": 1}\n')
    settings = RunSettings(
        model="m", out=str(place / "run"), tasks=TaskSettings(prompts=str(prompts)),
        evaluation=EvaluationSettings(count=0), hand_over=HandOverSettings(directory=str(place / "weights")), **more,
    )  # fmt: skip
    watcher = SimpleNamespace(say=lambda _: None, warn=lambda _: None, show=lambda *_: None)
    trainer = Trainer(settings, cast("Client", daemon), learner, watcher)
    trainer._source = source
    return trainer


def test_a_step_that_taught_nothing_counts_before_its_groups_are_forgotten(tmp_path):
    """No optimizer step was made yet, and still the next life does not begin at a step whose groups are gone."""
    daemon = Daemon()
    first = Source([group_of("a", 0.0, 0.0)])
    with pytest.raises(Killed):
        life(
            tmp_path, daemon, first, FakeLearner(), steps=3, checkpoint_every=1, groups=GroupSettings(empty_max=3)
        ).run()
    assert daemon.acked == {"batch-0": 1}
    second, learner = Source([], [group_of("b", 1.0, -1.0)], [group_of("c", 1.0, -1.0)]), FakeLearner()
    end = life(tmp_path, daemon, second, learner, steps=3, checkpoint_every=1, groups=GroupSettings(empty_max=3)).run()
    assert second.asked == [(1, 1), (2, 2)]
    assert (end.step, end.optimizer_steps, learner.used) == (3, 2, ["b", "c"])


def test_an_update_that_a_killed_life_left_is_waited_for(tmp_path):
    """While engines read those files nobody takes them away, and its version is not taken for other weights."""
    daemon = Daemon()
    with pytest.raises(Killed):
        life(tmp_path, daemon, Source([group_of("a", 1.0, -1.0)]), FakeLearner(), steps=2, checkpoint_every=2).run()
    assert daemon.version == 2
    # It was killed while the second version was on its way to the engines, and no checkpoint has the step.
    half_way = daemon.made.pop()
    daemon.version, daemon.running = 1, update(2, half_way.path or "", "running")
    daemon.calls.clear()
    source, learner = Source([group_of("a", 1.0, -1.0)], [group_of("b", 1.0, -1.0)]), FakeLearner()
    life(tmp_path, daemon, source, learner, steps=2, checkpoint_every=2).run()
    assert daemon.calls[0] == "wait 2"
    assert daemon.calls.count("update 2") == 0
    assert learner.used == ["a", "b"]


@pytest.mark.parametrize(
    ("engines", "updates"),
    [(["serving", "quarantined"], 2), (["quarantined"], 3), (["down", "quarantined"], 3), (["down"], 2), ([], 2)],
)
def test_engines_that_lost_what_was_learnt_get_the_weights_of_now(engines, updates, tmp_path):
    """Steps without a checkpoint are made again on engines that are ahead, unless all were started again meanwhile."""
    daemon = Daemon()
    with pytest.raises(Killed):
        life(tmp_path, daemon, Source([group_of("a", 1.0, -1.0)]), FakeLearner(), steps=2, checkpoint_every=3).run()
    assert daemon.version == 2
    daemon.engines = engines
    daemon.calls.clear()
    source, learner = Source([group_of("a", 1.0, -1.0)], [group_of("b", 1.0, -1.0)]), FakeLearner()
    end = life(tmp_path, daemon, source, learner, steps=2, checkpoint_every=3).run()
    # One more where the first step waits for nothing but its weights.
    assert daemon.calls == [f"update {3 + number}" for number in range(updates)]
    assert (end.optimizer_steps, learner.used) == (2, ["a", "b"])
