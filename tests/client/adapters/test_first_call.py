"""Adapters that name weights which the trainer moved: each step's, and those that it began with."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from prorld.client.adapters import engines, skyrl, slime, verl

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
