"""What adapters share: order, idempotent asking, failures that stay failures, a daemon that comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prorld.client import ClientError
from prorld.client.adapters.engines import publish, use_engines
from prorld.client.adapters.rollouts import (
    Group,
    Prompt,
    Rollouts,
    figures_of,
    instance_from,
    prompts_of,
)
from prorld.client.adapters.settings import plain, sampling_of, settings_from
from prorld.domain.job import Sampling
from prorld.testing.scripted_engine.script import Fault, Latency, Script
from prorld.wire.ops import AddBackend, SetBackend
from tests.client.adapters.worlds import RIGHT_OR_WRONG, needs_calc, sums, world
from tests.daemon.support import Started, daemon, scripted_engine, until

pytestmark = [needs_calc, pytest.mark.slow]

SHORT = Sampling(max_tokens=32)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """One daemon for the tests that need nothing of their own."""
    with world(tmp_path_factory.mktemp("world")) as (started, _):
        yield started


Make = Callable[..., Rollouts]


@pytest.fixture
def rollouts() -> Iterator[Make]:
    """Makes what an adapter has, for the handler ``calc``, and closes its connections."""
    made: list[Rollouts] = []

    def make(here: Started, **more: Any) -> Rollouts:
        made.append(Rollouts(settings_from({"state_dir": str(here.state), "handler": "calc", **more})))
        return made[-1]

    yield make
    for one in made:
        one.client.close()


def asked(groups: list[Group]) -> list[list[str]]:
    """The question of each rollout."""
    return [
        [str(one.document.job.instance["question"]) for one in group.rollouts if one.document is not None]
        for group in groups
    ]


def job_ids(groups: list[Group]) -> list[str | None]:
    """All of them, in order."""
    return [one.job_id for group in groups for one in group.rollouts]


def test_groups_come_in_the_order_of_their_prompts(rollouts: Make, here: Started) -> None:
    """Also where they are of different size, which is a batch for each."""
    instances = sums(4)
    prompts = [Prompt(one, size) for one, size in zip(instances, (3, 1, 3, 2), strict=True)]
    groups = rollouts(here).collect("step0", prompts, SHORT)
    assert [group.place for group in groups] == [0, 1, 2, 3]
    assert asked(groups) == [[str(one.instance["question"])] * one.samples for one in prompts]
    assert all(one.is_usable for group in groups for one in group.rollouts)
    assert figures_of(groups) == {"prorld/usable": 9.0}


def test_who_is_killed_and_asks_again_gets_the_same(rollouts: Make, here: Started) -> None:
    """As long as it has not asked for more: then the step is over, and asking for it again is going back."""
    prompts = [Prompt(one, 2) for one in sums(2)]
    first = rollouts(here, run="again").collect("step0", prompts, SHORT)
    second = rollouts(here, run="again")
    assert job_ids(second.collect("step0", prompts, SHORT)) == job_ids(first)
    other = second.collect("step1", prompts, SHORT)
    assert not set(job_ids(other)) & set(job_ids(first))
    back = rollouts(here, run="again").collect("step0", prompts, SHORT)
    assert not set(job_ids(back)) & {*job_ids(first), *job_ids(other)}
    second.close()


def test_another_wish_is_another_batch(rollouts: Make, here: Started) -> None:
    """The same step with other prompts or another temperature is never answered with what was there."""
    one = rollouts(here, run="wish")
    first = one.collect("step0", [Prompt(sums(1)[0], 2)], SHORT, is_more=True)
    second = one.collect("step0", [Prompt(sums(1)[0], 2)], Sampling(max_tokens=32, temperature=0.5), is_more=True)
    third = one.collect("step0", [Prompt(sums(1, first=5)[0], 2)], SHORT, is_more=True)
    ids = [*job_ids(first), *job_ids(second), *job_ids(third)]
    assert len(set(ids)) == len(ids) == 6


def test_runs_without_a_name_share_nothing(rollouts: Make, here: Started) -> None:
    """Two trainers with the same prompts and seeds are two trainers."""
    prompts = [Prompt(sums(1)[0], 2)]
    assert job_ids(rollouts(here).collect("step0", prompts, SHORT)) != job_ids(
        rollouts(here).collect("step0", prompts, SHORT)
    )


def test_a_run_without_a_name_leaves_nothing_running(rollouts: Make, tmp_path: Path) -> None:
    """What nobody can ask for again is cancelled when its trainer gives up."""
    slow = Script(turns=["ANSWER: 42"], latency=Latency(fixed_s=60.0))
    with world(tmp_path, slow) as (here, _), here.client() as client:
        impatient = rollouts(here, rollouts_s=1.0)
        with pytest.raises(ClientError) as caught:
            impatient.collect("step0", [Prompt(sums(1)[0], 2)], SHORT)
        assert caught.value.stable_code == "nothing_new"
        until(lambda: client.batches().items[0].state == "cancelled", 30, "the batch is cancelled")


def test_engines_that_all_fail_are_no_zeros(rollouts: Make, tmp_path: Path) -> None:
    """There is no usable rollout, and the trainer is told so instead of being given rewards."""
    broken = Script(turns=["ANSWER: 42"], faults=[Fault(kind="garbage", count=None)])
    with world(tmp_path, broken) as (here, _):
        with pytest.raises(ClientError) as caught:
            rollouts(here, max_attempts=1).collect("step0", [Prompt(one, 2) for one in sums(2)], SHORT)
        assert caught.value.stable_code in {"no_usable_rollout", "batch_ended_early"}


def test_a_daemon_that_is_started_again_is_waited_for(rollouts: Make, tmp_path: Path) -> None:
    """Its batch is as it was, and the trainer notices nothing but time."""
    slow = msgspec.structs.replace(RIGHT_OR_WRONG, latency=Latency(fixed_s=0.5))
    with scripted_engine(tmp_path, slow) as engine:
        found: list[Any] = []
        with daemon(tmp_path, engine, talkative=True) as first:
            prompts = [Prompt(one, 4) for one in sums(6)]
            own = rollouts(first, run="restart")
            waiting = threading.Thread(target=lambda: found.append(own.collect("step0", prompts, SHORT)))
            waiting.start()
            with first.client() as client:
                deadline = time.monotonic() + 60
                while not client.batches().items and time.monotonic() < deadline:
                    time.sleep(0.02)
            first.process.kill()
            first.process.wait()
        with daemon(tmp_path, engine, talkative=True):
            waiting.join(180)
            own.client.close()
    [groups] = found
    assert [len(group.rollouts) for group in groups] == [4] * 6
    assert all(one.is_usable for group in groups for one in group.rollouts)


def test_the_engines_of_a_trainer_are_named_again_to_a_daemon_that_was_started_again(
    rollouts: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows those of its configuration alone, and the jobs that live again would wait for others in vain."""
    monkeypatch.setattr("prorld.client.adapters.rollouts.LOOK_S", 0.5)
    slow = msgspec.structs.replace(RIGHT_OR_WRONG, latency=Latency(fixed_s=0.5))
    nobody = "http://127.0.0.1:9"
    with scripted_engine(tmp_path, slow) as engine:
        found: list[Any] = []
        with daemon(tmp_path, nobody, talkative=True) as first, first.client() as client:
            own = rollouts(first, run="engines", rollouts_s=120.0)
            own.engines = [SetBackend(url=engine, kind="vllm")]
            use_engines(client, "default", own.engines)
            publish(client, own.settings, "none")
            prompts = [Prompt(one, 4) for one in sums(6)]
            waiting = threading.Thread(target=lambda: found.append(own.collect("step0", prompts, SHORT)), daemon=True)
            waiting.start()
            until(lambda: bool(client.batches().items), 60, "the batch is there")
            first.process.kill()
            first.process.wait()
        with daemon(tmp_path, nobody, talkative=True) as second, second.client() as client:
            waiting.join(180)
            assert [item.url for item in client.backends().items] == [engine]
            own.client.close()
    [groups] = found
    assert all(one.is_usable for group in groups for one in group.rollouts)


def test_an_engine_that_is_added_while_a_trainer_waits_is_taken_out(
    rollouts: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has none of the trainer's weights, and would go on under their version until the next step."""
    monkeypatch.setattr("prorld.client.adapters.rollouts.LOOK_S", 0.2)
    slow = msgspec.structs.replace(RIGHT_OR_WRONG, latency=Latency(fixed_s=3.0))
    with scripted_engine(tmp_path, slow) as engine, daemon(tmp_path, engine, talkative=True) as here:
        own = rollouts(here, run="added", rollouts_s=120.0)
        own.engines = [SetBackend(url=engine, kind="vllm")]
        other = tmp_path / "other"
        other.mkdir()
        with scripted_engine(other, slow) as second, here.client() as client:
            found: list[Any] = []
            prompts = [Prompt(one, 2) for one in sums(2)]
            waiting = threading.Thread(target=lambda: found.append(own.collect("step0", prompts, SHORT)), daemon=True)
            waiting.start()
            until(lambda: bool(client.batches().items), 60, "the batch is there")
            client.add_backend(AddBackend(url=second, kind="vllm"))
            until(lambda: [one.url for one in client.backends().items] == [engine], 60, "the other one is gone")
            waiting.join(120)
            # A trainer without engines of its own takes what there is.
            client.add_backend(AddBackend(url=second, kind="vllm"))
            use_engines(client, "default", [])
            assert len(client.backends().items) == 2
    [groups] = found
    assert all(one.is_usable for group in groups for one in group.rollouts)


def test_engines_of_a_trainer_become_those_of_the_policy(tmp_path: Path) -> None:
    """All at once; asking again changes nothing, and each version after it is named on all of them."""
    with (
        scripted_engine(tmp_path, RIGHT_OR_WRONG) as engine,
        daemon(tmp_path, engine, talkative=True) as here,
        here.client() as client,
    ):
        other = tmp_path / "other"
        other.mkdir()
        with scripted_engine(other, RIGHT_OR_WRONG) as second:
            use_engines(client, "default", [SetBackend(url=second, kind="vllm")])
            before = client.backends()
            assert [item.url for item in before.items] == [second]
            use_engines(client, "default", [SetBackend(url=second, kind="vllm")])
            assert client.backends().generation == before.generation
            found = settings_from({"update_s": 60})
            assert [publish(client, found, "none").version for _ in range(2)] == [1, 2]
            assert [item.version for item in client.backends().items] == [2]
            with pytest.raises(ClientError) as caught:
                use_engines(client, "default", [SetBackend(url="http://127.0.0.1:1", kind="vllm")])
            assert caught.value.stable_code == "no_backend"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"handlr": "math"}, "handlr"),
        ({"run": "../x"}, "run"),
        ({"engines": ["http://x"]}, "KIND=URL"),
        ({"engines": ["quantum=http://127.0.0.1:1"]}, "engines"),
        ({"sampling": {"warmth": 1}}, "warmth"),
        ({"agent": {"max_turns": 0}}, "max_turns"),
        ({"rollouts_s": -1}, "rollouts_s"),
        ({"handler": object()}, "plain data"),
    ],
)
def test_wrong_settings_are_told_by_name(said: dict[str, Any], words: str) -> None:
    """Before anything is asked of a daemon."""
    with pytest.raises(ClientError, match=words) as caught:
        settings_from(said).backends()
    assert caught.value.stable_code == "bad_settings"


@pytest.mark.parametrize("value", [None, "", "no json", "[1]", 7, {}, b"\xff", ["a"]])
def test_what_is_no_instance_is_told_with_its_row(value: Any) -> None:
    """Rows come from files of any origin."""
    with pytest.raises(ClientError, match="row 3") as caught:
        instance_from(value, "instance of row 3")
    assert caught.value.stable_code == "bad_settings"


def test_neighbours_are_a_group() -> None:
    """By instance, whatever the order of its fields, and by the trainer's own name for it."""
    a, b = {"x": 1, "y": 2}, {"y": 2, "x": 1}
    assert [one.samples for one in prompts_of([a, b, {"x": 2}, a])] == [2, 1, 1]
    assert [one.samples for one in prompts_of([a, b, a], ["u", "v", "v"])] == [1, 2]


def test_values_of_trainers_become_plain() -> None:
    """Arrays, scalars and mappings that are no dict."""

    class Scalar:
        def tolist(self) -> float:
            return 0.5

    assert plain({"a": (1, Scalar()), "b": {"c": Scalar()}}) == {"a": (1, 0.5), "b": {"c": 0.5}}
    assert sampling_of({"temperature": Scalar(), "top_k": None}, {"top_p": 0.9}).temperature == 0.5
