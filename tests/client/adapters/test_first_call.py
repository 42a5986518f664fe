"""Adapters that name weights which the trainer moved: each step's, and those that it began with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prorld.client import Client
from prorld.client.adapters import engines, skyrl, slime, verl
from prorld.client.adapters.settings import settings_from
from tests.client.serving import serving
from tests.client.test_policy_updates import INTERRUPTED, NO_ENGINE, update

NOBODY = {"address": "http://127.0.0.1:9", "engines": ["vllm=http://127.0.0.1:9"]}


def of_verl() -> Callable[[int], None]:
    rollout = {"custom": {"prorld": NOBODY}}
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(get=rollout.get, name="vllm")))
    manager = verl.ProrldAgentLoopManager(config)
    return lambda step: manager._weights.name(step, is_eval=False)


def of_skyrl() -> Callable[[int], None]:
    generator = skyrl.ProrldGenerator(NOBODY)
    return lambda step: generator._weights.name(step, is_eval=False)


def of_slime() -> Callable[[int], None]:
    adapter = slime._Adapter(SimpleNamespace(prorld=NOBODY))
    return lambda step: adapter._weights.name(step, is_eval=False)


@pytest.mark.parametrize(("module", "adapter"), [(verl, of_verl), (skyrl, of_skyrl), (slime, of_slime)])
def test_the_first_weights_have_a_version_of_their_own(
    monkeypatch: pytest.MonkeyPatch, module: Any, adapter: Callable[[], Callable[[int], None]]
) -> None:
    """A trainer that went back to a checkpoint does not sample under the version of what it had later."""
    told: list[str] = []
    monkeypatch.setattr(engines, "use_engines", lambda *_: told.append("engines"))
    monkeypatch.setattr(engines, "publish", lambda *_: told.append("version"))
    if module is verl:
        # All that is asked of the trainer's packages here.
        monkeypatch.setattr(verl, "import_module", lambda _: SimpleNamespace(auto_await=lambda called: called))
    prepare = adapter()
    prepare(10)
    assert told == ["engines", "version"]
    prepare(10)
    assert told == ["engines", "version"]
    prepare(11)
    assert told == ["engines", "version"] * 2


def test_engines_that_come_back_with_the_daemon_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was started again within an update, and is asked for it once more before its engines are there."""
    monkeypatch.setattr("prorld.client.publishing.AGAIN_S", 0.001)
    policy = (200, {"name": "default", "version": 7, "epoch": 0})
    running = update("running")
    answers = [policy, running, INTERRUPTED, running, NO_ENGINE, running, update("done")]
    with serving(*answers) as (address, script), Client(address) as client:
        assert engines.publish(client, settings_from({"update_s": 60}), "lora", Path("/w")).version == 8
    assert len(script.asked) == len(answers)
