"""Engines that die, freeze and arrive under a real daemon: every job ends well, and every token is there."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest

from prorld.client import Client
from prorld.domain.job import Sampling
from prorld.domain.outcome import OutcomeKind
from prorld.wire.jobs import JobRecord, SubmitJob
from prorld.wire.ops import AddBackend, BackendKindName
from tests.daemon.support import daemon, environ, processes, until
from tests.real.conftest import CACHE_FLAGS, PAIR_FLAGS
from tests.real.vllm_server import guarded, vllm_server

pytestmark = [pytest.mark.real, pytest.mark.slow]

JOBS = 12
WITHIN_S = 300.0
WELL = {OutcomeKind.OK, OutcomeKind.POLICY_LIMIT}


class Engine:
    """An engine process that can be killed, frozen and thawed with all that it started."""

    def __init__(self, kind: BackendKindName, url: str, pid: int) -> None:
        self.kind: BackendKindName = kind
        self.url = url
        self._pid = pid

    def signal(self, number: signal.Signals) -> None:
        """To all that it started; the embedded engine is in another process group than its command."""
        family = {self._pid}
        for pid, parent, _ in sorted(processes()):
            if parent in family:
                family.add(pid)
        for pid in family - {self._pid}:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        os.killpg(self._pid, number)


StartEngine = Callable[[], AbstractContextManager[Engine]]


@pytest.fixture(params=["vllm", "llamacpp"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> StartEngine:
    """What starts one more engine of a kind."""
    if request.param == "llamacpp":
        request.getfixturevalue("gguf")
        return lambda: embedded_engine(tmp_path)
    python, model = request.getfixturevalue("vllm_python"), request.getfixturevalue("model")
    return lambda: vllm_engine(python, model, tmp_path)


@contextmanager
def vllm_engine(python: str, model: Path, folder: Path) -> Iterator[Engine]:
    """A vLLM server."""
    with vllm_server(python, model, folder, scale_out=True, more=(*PAIR_FLAGS, *CACHE_FLAGS)) as ready:
        yield Engine("vllm", ready.url, ready.pid)


@contextmanager
def embedded_engine(folder: Path) -> Iterator[Engine]:
    """The embedded engine, started by its command."""
    command = [sys.executable, "-m", "prorld.cli", "engine", "start", "embedded", "--slots", "8", "--context", "2048"]
    said = folder / f"embedded-{secrets.token_hex(4)}.log"
    with said.open("wb") as output, guarded([*command, "--no-register"], environ(folder), output.fileno()) as process:
        until(lambda: " engine at " in said.read_text(), 60, "the engine is up")
        yield Engine("llamacpp", said.read_text().split(" engine at ")[1].split(",")[0], process.pid)


def job(number: int, turns: int = 4) -> SubmitJob:
    """A conversation of so many turns."""
    return SubmitJob(
        job_id=f"j{number}",
        handler="bench",
        instance={"prompt": f"Tell a long story of the number {200 + number}.", "turns": turns},
        sampling=Sampling(max_tokens=120),
        max_attempts=1,
    )


def add(client: Client, engine: Engine) -> str:
    """Make an engine known."""
    return client.add_backend(AddBackend(url=engine.url, kind=engine.kind)).backend_id


def busy(client: Client) -> dict[str, int]:
    """Calls in flight by engine."""
    return {item.backend_id: item.inflight for item in client.backends().items}


def turns(client: Client, jobs: int) -> int:
    """Turns that these many jobs have had so far."""
    return sum(client.wait(f"j{number}", within_s=0).turns for number in range(jobs))


def ends(client: Client, numbers: range) -> list[JobRecord]:
    """All jobs at their end, which is a good one, with tokens that verify."""
    records = [client.wait(f"j{number}", within_s=WITHIN_S) for number in numbers]
    for record in records:
        assert record.outcome is not None
        assert record.outcome.kind in WELL, record.outcome
        found = client.verify(record.job_id)
        assert found.violations == [], found
        assert found.sampled == record.tokens.sampled > 0
    return records


@contextmanager
def serving(place: Path, tokenizer: Path) -> Iterator[Client]:
    """A daemon without an engine of its own."""
    config = place / "real.toml"
    settings = ['handlers.enabled = ["bench"]', "timeouts.engine_stall_s = 20"]
    policy = ["[policies.default]", f"tokenizer = {json.dumps(str(tokenizer))}"]
    config.write_text("\n".join([*settings, *policy]))
    with daemon(place, None, "--no-embedded", "--config", str(config)) as here, here.client() as client:
        yield client


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_an_engine_ends_in_the_middle_of_generations(
    number: signal.Signals, start: StartEngine, gguf: Path, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """Its jobs go on at the other one from the very tokens they had; none fails, none loses or doubles a token."""
    with start() as one, start() as other, serving(tmp_path, gguf) as client:
        first = add(client, one)
        add(client, other)
        for n in range(JOBS):
            client.submit(job(n))
        until(
            lambda: busy(client)[first] >= 2 and turns(client, JOBS) >= JOBS, 120, "conversations are under way on both"
        )
        one.signal(number)
        began = time.monotonic()
        try:
            records = ends(client, range(JOBS))
        finally:
            if number is signal.SIGSTOP:
                one.signal(signal.SIGCONT)
        moved = sum(len(record.backends) > 1 for record in records)
        states = {item.backend_id: item.state for item in client.backends().items}
        tell(
            f"{one.kind}, {number.name}: {JOBS} jobs well in {time.monotonic() - began:.0f} s, {moved} on both engines"
        )
        assert moved >= 1
        assert number is signal.SIGSTOP or states[first] == "down"


def test_an_engine_that_comes_late_carries_its_share(
    start: StartEngine, gguf: Path, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """Added while the other one has all the work, it serves its part of the jobs that come after it."""
    with start() as one, start() as other, serving(tmp_path, gguf) as client:
        add(client, one)
        for n in range(JOBS):
            client.submit(job(n))
        until(lambda: sum(busy(client).values()) >= 4, 60, "the first engine is at work")
        late = add(client, other)
        for n in range(JOBS, 3 * JOBS):
            client.submit(job(n, turns=1))
        records = ends(client, range(3 * JOBS))
        shares = Counter(record.backends[-1] for record in records[JOBS:])
        tell(f"{one.kind}: of {2 * JOBS} jobs after it came, the late engine served {shares[late]}")
        assert shares[late] >= 2 * JOBS // 3
