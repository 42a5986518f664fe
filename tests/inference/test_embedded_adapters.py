"""Adapters of the embedded engine: served beside the weights that they are for, or refused with nothing changed."""

from __future__ import annotations

import os
import signal
from array import array
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import trio
import trio.testing

from prorld.domain.versions import PolicyVersion
from prorld.errors import BackendError, WeightsRefused
from prorld.inference.contract import Generation, WeightRef
from prorld.inference.embedded_backend import ADAPTERS_MAX, EmbeddedBackend
from prorld.inference.roster import _catch_up
from prorld.train.llamacpp_files import write_gguf, write_gguf_lora
from prorld.wire.ops import AddBackend
from prorld.wire.policies import PolicyUpdate, UpdatePolicy
from tests.inference.test_embedded import gone
from tests.inference.test_embedded_reload import (
    FIRST,
    THIRD,
    endless,
    engine,
    ref,
    request,
    served,
    sharpened,
    updated,
)
from tests.rollout.support import Room
from tests.train.tiny_gguf import HIDDEN, LAYERS, PER_HEAD, SHARED, tiny_base

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("xllamacpp") is None, reason="the extra 'demo' is not installed"),
]

RANK, ALPHA = 4, 8.0
PARTS = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (SHARED * PER_HEAD, HIDDEN)}
# The weights of a file are f16, and the engine's cache is, too; what an adapter adds is not rounded to it.
GAP_MAX = 0.05


def matrices(seed: int = 0, spread: float = 0.3, hidden: int = HIDDEN) -> dict[str, np.ndarray]:
    """An adapter of q and k in every layer, under PEFT's names."""
    dice = np.random.default_rng(seed)
    made = {}
    for layer in range(LAYERS):
        for part, (outer, _) in PARTS.items():
            name = f"base_model.model.model.layers.{layer}.{part}"
            made[f"{name}.lora_A.weight"] = (spread * dice.standard_normal((RANK, hidden))).astype("f4")
            made[f"{name}.lora_B.weight"] = (spread * dice.standard_normal((outer, RANK))).astype("f4")
    return made


def written(path: Path, adapter: Mapping[str, np.ndarray]) -> Path:
    """The adapter as a file."""
    write_gguf_lora(adapter, tiny_base(path.parent / "base"), path, alpha=ALPHA)
    return path


def merged(path: Path, adapter: Mapping[str, np.ndarray], weights: dict[str, Any] | None = None) -> Path:
    """A whole model that is to say the same."""
    state = dict(weights or endless())
    for name, first in adapter.items():
        if "lora_A" in name:
            plain = name.removeprefix("base_model.model.").replace("lora_A.", "")
            state[plain] = state[plain] + ALPHA / RANK * adapter[name.replace("lora_A", "lora_B")] @ first
    write_gguf(state, tiny_base(path.parent / "base"), path)
    return path


def lora(path: Path, version: PolicyVersion = THIRD, seal: str | None = None) -> WeightRef:
    """An adapter to be loaded, as an update names it."""
    return WeightRef(how="lora", path=str(path), version=version, name=version.label, seal=seal)


async def said(backend: EmbeddedBackend, adapter: PolicyVersion | None = None, tokens: int = 12) -> Generation:
    """A greedy call on the weights or on an adapter."""
    wish = request(tokens)
    return await backend.generate(msgspec.structs.replace(wish, adapter=adapter and adapter.label))


async def scored(backend: EmbeddedBackend, generation: Generation) -> array[float]:
    """What the weights say of a generation's tokens."""
    prompt = request().token_ids
    return await backend.score(prompt + generation.token_ids, len(prompt))


def apart(one: Any, other: Any) -> float:
    """The largest distance of two rows of log-probabilities."""
    return float(np.abs(np.array(one) - np.array(other)).max())


async def test_an_adapter_says_what_its_merged_weights_say(tmp_path: Path) -> None:
    """Its tokens have its version and the log-probabilities of the merged model; the weights beside it stay."""
    async with engine(tmp_path) as backend:
        adapter = matrices()
        path = written(tmp_path / "adapter.gguf", adapter)
        before, pid = await said(backend), backend.engine.pid
        await backend.load_weights(lora(path))
        path.unlink()
        found = await said(backend, THIRD)
        plain = await said(backend)
        assert [(span.version, span.end) for span in found.versions] == [(3, 12)]
        assert [span.version for span in plain.versions] == [0]
        assert (plain.token_ids, backend.engine.pid) == (before.token_ids, pid)
        assert await backend.read_version() == FIRST
        assert (await backend.probe()).details["adapters"] == {THIRD.label: str(path)}
        of_the_weights = await scored(backend, found)
        await backend.load_weights(ref(merged(tmp_path / "merged.gguf", adapter)))
        of_the_merged = await scored(backend, found)
        assert apart(found.logprobs, of_the_merged) < GAP_MAX
        assert apart(found.logprobs, of_the_weights) > 10 * GAP_MAX


async def test_an_adapter_goes_beside_weights_that_were_loaded(tmp_path: Path) -> None:
    """It is for the weights in force, read anew from where they came; where they have gone, it is refused."""
    async with engine(tmp_path) as backend:
        adapter = matrices()
        weights = endless() | {"model.norm.weight": 2 * endless()["model.norm.weight"]}
        second, fourth = PolicyVersion(0, 2), PolicyVersion(0, 4)
        base = merged(tmp_path / "second.gguf", {}, weights)
        await backend.load_weights(ref(base, second))
        path = written(tmp_path / "adapter.gguf", adapter)
        await backend.load_weights(lora(path))
        found = await said(backend, THIRD)
        os.utime(base, ns=(1, 1))
        with pytest.raises(WeightsRefused, match="written anew"):
            await backend.load_weights(lora(path, fourth))
        base.unlink()
        with pytest.raises(WeightsRefused, match=r"No such file.*second\.gguf"):
            await backend.load_weights(lora(path, fourth))
        assert (await said(backend, THIRD)).token_ids == found.token_ids
        await backend.load_weights(ref(merged(tmp_path / "merged.gguf", adapter, weights), fourth))
        assert apart(found.logprobs, await scored(backend, found)) < GAP_MAX


async def test_an_adapter_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    """Garbage, a whole model, one for other weights, one of no numbers: each is refused and said why."""
    async with engine(tmp_path) as backend:
        good = written(tmp_path / "good.gguf", matrices())
        await backend.load_weights(lora(good))
        before = await said(backend, THIRD)
        text, cut, nan = tmp_path / "text.gguf", tmp_path / "cut.gguf", tmp_path / "nan.gguf"
        text.write_text("no adapter")
        cut.write_bytes(good.read_bytes()[:-1000])
        nan.write_bytes(good.read_bytes()[:-1024] + np.full(256, np.nan, "<f4").tobytes())
        other = tmp_path / "other" / "adapter.gguf"
        other.parent.mkdir()
        _write_for_another_base(other)
        fourth = PolicyVersion(0, 4)
        for path, words in (
            (tmp_path / "absent.gguf", "No such file"),
            (text, "not a GGUF file"),
            (cut, "did not start"),
            (nan, "can't be served"),
            (tmp_path / "first.gguf", "expect general.type to be 'adapter'"),
            (other, "tensor"),
        ):
            with pytest.raises(WeightsRefused, match=words):
                await backend.load_weights(lora(path, fourth))
        with pytest.raises(WeightsRefused, match="written anew"):
            await backend.load_weights(lora(good, fourth, seal="1.2.3"))
        with pytest.raises(BackendError, match=r"does not serve the adapter prorld-0\.4"):
            await said(backend, fourth)
        assert (await said(backend, THIRD)).token_ids == before.token_ids
        assert len((await said(backend)).token_ids) == 12


def _write_for_another_base(path: Path) -> None:
    """An adapter whose matrices are of another size, in an otherwise good file."""
    good = written(path.parent / "good.gguf", matrices()).read_bytes()
    name, wide, narrow = (
        b"blk.0.attn_q.weight.lora_a",
        HIDDEN.to_bytes(8, "little"),
        (HIDDEN // 2).to_bytes(8, "little"),
    )
    at = good.index(name) + len(name) + 4
    assert good[at : at + 8] == wide
    path.write_bytes(good[:at] + narrow + good[at + 8 :])


async def test_adapters_are_forgotten_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process ends with its adapter; there are never more than the bound; one under a known name takes its place."""
    monkeypatch.setattr("prorld.inference.embedded_backend.ROOM_SECONDS_MAX", 0.05)
    async with engine(tmp_path) as backend:
        path = written(tmp_path / "adapter.gguf", matrices())
        versions = [PolicyVersion(0, number) for number in range(1, ADAPTERS_MAX + 2)]
        for version in versions[:-1]:
            await backend.load_weights(lora(path, version))
        with pytest.raises(WeightsRefused, match=f"{ADAPTERS_MAX} at once"):
            await backend.load_weights(lora(path, versions[-1]))
        first = await said(backend, versions[0])
        written(path, matrices(seed=1))
        await backend.load_weights(lora(path, versions[0]))
        assert apart(first.logprobs, (await said(backend, versions[0])).logprobs) > GAP_MAX
        assert await backend.healthy()
        pid = backend.adapters[versions[0].label].pid
        await backend.unload_adapter(versions[0].label)
        await gone(pid, 10)
        await backend.unload_adapter(versions[0].label)
        with pytest.raises(BackendError, match="does not serve"):
            await said(backend, versions[0])
        await backend.load_weights(lora(path, versions[-1]))
        await backend.aclose()
        assert (await said(backend, versions[-1])).versions[0].version == versions[-1].version


async def test_an_adapter_waits_for_the_place_of_one_that_is_still_in_use(tmp_path: Path) -> None:
    """A trainer may be quicker than the last calls on its adapters: it waits for them, and is not refused."""
    async with engine(tmp_path) as backend:
        path = written(tmp_path / "adapter.gguf", matrices())
        versions = [PolicyVersion(0, number) for number in range(1, ADAPTERS_MAX + 2)]
        for version in versions[:-1]:
            await backend.load_weights(lora(path, version))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(backend.load_weights, lora(path, versions[-1]))
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert len(backend.adapters) == ADAPTERS_MAX
            with trio.fail_after(30):
                await backend.unload_adapter(versions[0].label)
        assert list(backend.adapters) == [version.label for version in versions[1:]]


async def test_an_adapter_is_unloaded_while_weights_are_loading(tmp_path: Path) -> None:
    """Loading may take longer than whoever unloads has patience, and it would keep its process for good."""
    async with engine(tmp_path) as backend:
        path = written(tmp_path / "adapter.gguf", matrices())
        await backend.load_weights(lora(path))
        start = backend._processes.start
        began, goes_on = trio.Event(), trio.Event()

        async def held(*args: Any, **options: Any) -> Any:
            began.set()
            await goes_on.wait()
            return await start(*args, **options)

        backend._processes.start = held  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(backend.load_weights, lora(path, PolicyVersion(0, 4)))
            await began.wait()
            with trio.fail_after(10):
                await backend.unload_adapter(THIRD.label)
            assert backend.adapters == {}
            goes_on.set()
        assert list(backend.adapters) == ["prorld-0.4"]


async def test_an_adapter_that_goes_while_it_is_asked_makes_no_engine_ill(tmp_path: Path) -> None:
    """A health check that began before does not count what is not there any more; one that hangs counts."""
    async with engine(tmp_path) as backend:
        await backend.load_weights(lora(written(tmp_path / "adapter.gguf", matrices())))
        adapted = backend._adapters[THIRD.label]
        asked, answers = trio.Event(), trio.Event()

        async def slowly() -> bool:
            asked.set()
            await answers.wait()
            return False

        adapted.healthy = slowly  # type: ignore[method-assign]
        found: list[bool] = []

        async def check() -> None:
            found.append(await backend.healthy())

        for goes in (False, True):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(check)
                await asked.wait()
                if goes:
                    await backend.unload_adapter(THIRD.label)
                answers.set()
            asked, answers = trio.Event(), trio.Event()
        assert found == [False, True]


async def test_a_pause_holds_calls_on_an_adapter_too(tmp_path: Path) -> None:
    """It is the engine that is paused."""
    async with engine(tmp_path) as backend:
        await backend.load_weights(lora(written(tmp_path / "adapter.gguf", matrices())))
        made: list[Generation] = []

        async def call() -> None:
            made.append(await said(backend, THIRD, 160))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            with trio.fail_after(30):
                while not (await backend.load()).running:  # noqa: ASYNC110 - the engine tells nobody
                    await trio.sleep(0.005)
                await backend.pause("abort")
        assert made[0].finish == "abort"
        assert 0 < len(made[0].token_ids) < 160
        await backend.resume()
        assert len((await said(backend, THIRD)).token_ids) == 12


# --- as a policy's engine ---------------------------------------------------------------------------------------------


async def adapted(here: Room, version: int, path: Path, **more: Any) -> PolicyUpdate:
    """An update to an adapter, to its end."""
    wish = UpdatePolicy(version=version, how="lora", path=str(path), **more)
    begun = await here.policies.update("default", wish, "alice")
    return await here.policies.wait_update("default", begun.update_id)


async def test_an_update_to_an_adapter_moves_the_policy(tmp_path: Path) -> None:
    """One after the other, the last one's process ends; one that can't be loaded fails and the last one serves on."""
    async with served(tmp_path) as (here, backend):
        for version in (1, 2):
            path = written(tmp_path / f"{version}.gguf", matrices(seed=version))
            done = await adapted(here, version, path)
            assert (done.state, [result.version for result in done.backends]) == ("done", [version])
        with trio.fail_after(10):
            while list(backend.adapters) != ["prorld-0.2"]:  # noqa: ASYNC110 - it is ended beside the update
                await trio.sleep(0.02)
        failed = await adapted(here, 3, tmp_path / "first.gguf")
        assert (failed.state, failed.code) == ("failed", "weights_refused")
        (info,) = here.pool.list().items
        assert info.state == "up"
        now = here.policies.get("default", None)
        assert (now.version, now.adapter) == (2, "prorld-0.2")
        assert (await said(backend, PolicyVersion(0, 2))).versions[0].version == 2


async def test_a_new_engine_has_the_weights_and_gets_the_adapter_by_an_update(tmp_path: Path) -> None:
    """Started again it loads what the adapter is for; it is kept out until an update brings the adapter in."""
    async with served(tmp_path) as (here, _):
        await updated(here, 1, sharpened(tmp_path / "next.gguf", 2.0))
        path = written(tmp_path / "adapter.gguf", matrices())
        assert (await adapted(here, 2, path)).state == "done"
        async with engine(tmp_path) as again:
            await _catch_up(here.pool, "default", again)
            assert await again.read_version() == PolicyVersion(0, 1)
            with here.pool.client(again):
                info = await here.pool.add(AddBackend(url=again.url, kind="llamacpp"))
                assert info.state == "quarantined"
                assert "not known to have the adapter prorld-0.2" in info.details["quarantine"]
                caught_up = await adapted(here, 2, path, backends=[info.backend_id])
                assert caught_up.state == "done"
                assert [one.state for one in here.pool.list().items] == ["up", "up"]
                assert (await said(again, PolicyVersion(0, 2))).versions[0].version == 2


async def test_an_adapters_process_that_dies_is_the_end_of_the_engine(tmp_path: Path) -> None:
    """Nobody is told that the policy is served when its adapter has gone."""
    with pytest.RaisesGroup(
        pytest.RaisesExc(BackendError, match="ended by itself with code -9"), flatten_subgroups=True
    ):
        async with engine(tmp_path) as backend:
            await backend.load_weights(lora(written(tmp_path / "adapter.gguf", matrices())))
            os.kill(backend.adapters[THIRD.label].pid, signal.SIGKILL)
            with trio.fail_after(10):
                await trio.sleep_forever()
