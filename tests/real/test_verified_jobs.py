"""A trainer's round on a real vLLM behind a real daemon: new weights under running jobs, and every token confirmed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prorld.client import Client
from prorld.domain.job import Sampling
from prorld.domain.outcome import OutcomeKind
from prorld.wire.jobs import SubmitJob
from prorld.wire.looks import VerifyAnswer
from prorld.wire.ops import AddBackend
from tests.daemon.support import until
from tests.real.conftest import CACHE_FLAGS, PAIR_FLAGS, made_model
from tests.real.test_engine_death import serving, turns
from tests.real.vllm_server import VllmServer, vllm_server

pytestmark = [pytest.mark.real, pytest.mark.slow]

JOBS = 10
WITHIN_S = 300.0
# The last jobs are alone in the engine, where its CPU build decodes with another kernel.
ALONE_MEAN_MAX = 0.1


@pytest.fixture
def server(vllm_python: str, model: Path, tmp_path: Path) -> Iterator[VllmServer]:
    """A server with the first weights."""
    with vllm_server(vllm_python, model, tmp_path, scale_out=True, more=(*PAIR_FLAGS, *CACHE_FLAGS)) as ready:
        yield ready


def job(name: str) -> SubmitJob:
    """Three turns, and much said in each."""
    return SubmitJob(
        job_id=name,
        handler="bench",
        instance={"prompt": f"Tell a long story of job {name}.", "turns": 3},
        sampling=Sampling(max_tokens=120),
    )


def renew(client: Client, version: int, weights: Path) -> None:
    """Other weights for the policy."""
    begun = client.update_policy("default", version, "reload", path=str(weights))
    done = client.wait_update("default", begun.update_id, within_s=WITHIN_S)
    assert done.state == "done", done


def verified(client: Client, names: list[str]) -> list[VerifyAnswer]:
    """All of them at their end, scored again."""
    for name in names:
        outcome = client.wait(name, within_s=WITHIN_S).outcome
        assert outcome is not None
        assert outcome.kind in (OutcomeKind.OK, OutcomeKind.POLICY_LIMIT), outcome
    return [client.verify(name, rescore=True, tolerance=ALONE_MEAN_MAX) for name in names]


def test_weights_change_under_running_jobs(
    server: VllmServer, vllm_python: str, gguf: Path, model: Path, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """An update in mid-generation: no job fails, tokens of both versions are confirmed, each while it is served."""
    after = made_model(vllm_python, gguf, tmp_path / "next", "0.05")
    names = [f"j{number}" for number in range(JOBS)]
    with serving(tmp_path, gguf) as client:
        client.add_backend(AddBackend(url=server.url, kind="vllm"))
        for name in names:
            client.submit(job(name))
        until(lambda: turns(client, JOBS) >= JOBS // 2, 120, "conversations are under way")
        renew(client, 1, after)
        found = verified(client, names)
        assert all(one.violations == [] for one in found), found
        spans = {one.version for answer in found if answer.rescore for one in answer.rescore.by_version}
        gone = {(left.version, left.reason) for answer in found for left in answer.unverifiable}
        assert (spans, gone) == ({1}, {(0, "not_served")})
        both = [name for name in names if client.wait(name).policy_versions == [0, 1]]
        assert len(both) >= JOBS // 2
        renew(client, 2, model)
        assert client.policies()[0].version == 2
        gaps = [answer.rescore.mean for answer in found if answer.rescore and answer.rescore.mean is not None]
        tell(
            f"{len(both)} of {JOBS} jobs have both versions; mean difference of the new tokens {max(gaps):.2e} at most"
        )
