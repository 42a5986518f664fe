"""Scoring again on a real vLLM: honest tokens are confirmed, across new weights as well, and a stale cache is found.

Filler load keeps the engine from decoding one sequence at a time, for which the CPU build has another kernel.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from prorld.domain.job import Sampling
from prorld.domain.versions import PolicyVersion
from prorld.inference.contract import GenerationRequest, WeightRef
from prorld.inference.vllm import VllmBackend
from prorld.testing.fake_backend import FakeBackend
from prorld.wire.looks import VerifyAnswer
from tests.real.vllm_server import VllmServer, vllm_server
from tests.rollout.support import Room, room
from tests.tokens.support import embedded_model

PYTHON = os.environ.get("PRORLD_TEST_VLLM") or None
ROOT = Path(__file__).parents[2]
MODEL_SECONDS_MAX = 180
JOBS = 8
FILLERS = 4
HONEST_MEAN_MAX = 1e-3
TELLING = 16
# Blocks of the cache hold 128 tokens; the prompt fills some, and the conversation begins alike in every job.
PROMPT = "Tell me of the sea. " * 20

NOISE = """
import sys, torch
from pathlib import Path
from safetensors.torch import load_file, save_file
file = Path(sys.argv[1]) / "model.safetensors"
torch.manual_seed(1)
state = {name: (value + 0.03 * value.float().std() * torch.randn(value.shape)).to(value.dtype) if value.dim() == 2
         else value for name, value in load_file(file).items()}
save_file(state, file, metadata={"format": "pt"})
"""

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="no vLLM here: run ./just test-real engines, or set PRORLD_TEST_VLLM"),
]


def run_python(*argv: str) -> None:
    """A script in the engine's environment."""
    assert PYTHON is not None
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [PYTHON, *argv], env=environment, capture_output=True, text=True, check=False, timeout=MODEL_SECONDS_MAX
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folders() -> Iterator[tuple[Path, Path]]:
    """The small model, and the same after a small update."""
    with tempfile.TemporaryDirectory(prefix="prorld-smollm2-") as folder:
        old, new = Path(folder) / "old", Path(folder) / "new"
        for made in (old, new):
            run_python(str(ROOT / "tests/real/make_smollm2.py"), str(embedded_model()), str(made))
        run_python("-c", NOISE, str(new))
        yield old, new


@pytest.fixture(scope="module")
def server(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """One server for all."""
    assert PYTHON is not None
    with vllm_server(PYTHON, folders[0], tmp_path_factory.mktemp("vllm"), scale_out=True) as ready:
        yield ready


@asynccontextmanager
async def busy_room(server: VllmServer) -> AsyncIterator[tuple[Room, VllmBackend]]:
    """Jobs on the engine, which always has something else to decode as well."""
    backend = VllmBackend(server.url)
    async with room(backends=[cast("FakeBackend", backend)], workers=(JOBS, JOBS, JOBS)) as here:
        filler = VllmBackend(server.url)
        await filler.probe()
        async with trio.open_nursery() as nursery:
            for number in range(FILLERS):
                nursery.start_soon(fill, filler, number)
            yield here, backend
            nursery.cancel_scope.cancel()
        await filler.aclose()


async def fill(backend: VllmBackend, number: int) -> None:
    """Decode for as long as the test lasts."""
    for n in range(10_000):
        await backend.generate(
            GenerationRequest(
                token_ids=array("i", [1000 + number, 2000]), max_tokens=400, sampling=Sampling(), stop_token_ids=(),
                request_id=f"filler-{number}-{n}", session=f"filler-{number}", salt=f"filler-{n}",
            )
        )  # fmt: skip


async def answers(here: Room, prefix: str) -> list[VerifyAnswer]:
    """Jobs at the same time, each verified when all have ended."""
    instance: dict[str, Any] = {"prompt": PROMPT}
    async with trio.open_nursery() as nursery:
        for n in range(JOBS):
            nursery.start_soon(partial(here.finish, f"{prefix}{n}", instance, sampling={"max_tokens": 32}))
    return [await here.looks.verify(f"{prefix}{n}", "tests", rescore=True) for n in range(JOBS)]


async def renew(here: Room, backend: VllmBackend, folder: Path, version: PolicyVersion, *, clear: bool) -> None:
    """Other weights under another name; with a cache that is cleared or left behind."""
    await backend.load_weights(WeightRef(how="reload", path=str(folder), version=version))
    if clear:
        await backend.clear_cache()
    await backend.set_version(version)
    (entry,) = here.pool.entries("default")
    entry.found = await backend.probe()


def means(found: list[VerifyAnswer]) -> list[float]:
    """The mean difference of each job."""
    return [one.rescore.mean for one in found if one.rescore is not None and one.rescore.mean is not None]


async def test_honest_tokens_are_confirmed_and_a_stale_cache_is_found(
    server: VllmServer, folders: tuple[Path, Path]
) -> None:
    """Under the first weights, under new ones with a cleared cache, and with the cache of the old ones left behind."""
    old, new = folders
    async with busy_room(server) as (here, backend):
        first = await answers(here, "first")
        assert [one.result for one in first] == ["ok"] * JOBS, first
        assert max(means(first)) < HONEST_MEAN_MAX

        await renew(here, backend, new, PolicyVersion(0, 1), clear=True)
        second = await answers(here, "second")
        assert [one.result for one in second] == ["ok"] * JOBS, second
        assert max(means(second)) < HONEST_MEAN_MAX
        gone = await here.looks.verify("first0", "tests", rescore=True)
        assert (gone.result, [left.reason for left in gone.unverifiable]) == ("unverifiable", ["not_served"])

        await renew(here, backend, old, PolicyVersion(0, 2), clear=False)
        # A job that said two words may have met none of what is stale.
        third = [one for one in await answers(here, "third") if one.sampled >= TELLING]
        assert len(third) >= JOBS // 2
        assert [violation.code for one in third for violation in one.violations] == ["logprob_drift"] * len(third)
        assert min(means(third)) > here.looks._tolerance.mean

        await renew(here, backend, old, PolicyVersion(0, 3), clear=True)
        assert [one.result for one in await answers(here, "fourth")] == ["ok"] * JOBS
