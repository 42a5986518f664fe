"""Every log-probability is that of the weights its token names, also across a change of weights in mid-generation."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import fmean

import msgspec
import pytest
import trio

from prorld.domain.branch import Branch
from prorld.domain.job import Sampling
from prorld.domain.messages import system, user
from prorld.domain.versions import PolicyVersion
from prorld.inference.contract import Generation, GenerationRequest, WeightRef
from prorld.inference.session import ModelSession
from prorld.inference.vllm import VllmBackend
from prorld.tokens.tokenizer import HfTokenizer
from prorld.tokens.verify import verify
from tests.real.conftest import CACHE_FLAGS, PAIR_FLAGS, made_model
from tests.real.rollouts import Rollouts, rollouts
from tests.real.vllm_server import VllmServer, vllm_server

pytestmark = [pytest.mark.real, pytest.mark.slow]

TRAJECTORIES = 12
# Alone a call is decoded by another kernel, whose results differ in the second digit.
FILLERS = 5
WITHIN_S = 120.0
SOME_TOKENS_S = 1.0
MEAN_MAX = 1e-3
STALE_MEAN_MIN = 0.01
OLD, NEW = PolicyVersion(0, 0), PolicyVersion(0, 1)


@pytest.fixture(scope="module")
def other_model(vllm_python: str, gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model a good training step away."""
    return made_model(vllm_python, gguf, tmp_path_factory.mktemp("weights") / "next", "0.05")


@pytest.fixture
def server(vllm_python: str, model: Path, tmp_path: Path) -> Iterator[VllmServer]:
    """A server with the first weights."""
    with vllm_server(vllm_python, model, tmp_path, scale_out=True, more=(*PAIR_FLAGS, *CACHE_FLAGS)) as ready:
        yield ready


@asynccontextmanager
async def company(server: VllmServer, tokenizer: HfTokenizer) -> AsyncIterator[VllmBackend]:
    """A client of the server, which has other calls to work on for as long as the block lasts."""
    backend = VllmBackend(server.url)
    prompt = array("i", tokenizer.encode("1, 2, 3, 4,"))

    async def fill(number: int) -> None:
        for call in range(10_000):
            request = GenerationRequest(
                token_ids=prompt, max_tokens=200, sampling=Sampling(), stop_token_ids=(),
                request_id=f"filler-{number}-{call}", session=f"filler-{number}", salt="filler",
            )  # fmt: skip
            await backend.generate(request)

    try:
        await backend.probe()
        async with trio.open_nursery() as nursery:
            for number in range(FILLERS):
                nursery.start_soon(fill, number)
            yield backend
            nursery.cancel_scope.cancel()
    finally:
        await backend.aclose()


async def talk(on: Rollouts, count: int, max_tokens: int) -> list[ModelSession]:
    """Conversations of three turns at temperature 1, all at once."""
    done: list[ModelSession] = []

    async def one(number: int) -> None:
        opening = [system("Be kind."), user(f"Tell me a story about the number {number}.")]
        answers = [user("And then?"), user(f"Why {number}?")]
        done.append(await on.one(f"j{number}", opening, answers, max_tokens=max_tokens))

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(one, number)
    return done


async def gaps(backend: VllmBackend, branches: list[Branch], version: PolicyVersion) -> list[float]:
    """How far what was recorded for tokens of a version is from what the engine says of them now."""
    found: list[float] = []
    for branch in branches:
        scores = await backend.score(branch.ids, 1)
        for span in branch.versions:
            if (span.epoch, span.version) == (version.epoch, version.version):
                found += [abs(branch.logprobs[at] - scores[at - 1]) for at in range(span.start, span.end)]
    return found


async def load(backend: VllmBackend, weights: Path, version: PolicyVersion, *, clears: bool = True) -> None:
    """Other weights; ``clears``: with nothing left of what the old ones had computed."""
    await backend.pause("abort")
    await backend.load_weights(WeightRef(how="reload", path=str(weights), version=version))
    if clears:
        await backend.clear_cache()
    await backend.set_version(version)
    await backend.resume()


class Unsalted(VllmBackend):
    """A client that drops the salt that keeps the caches of versions apart."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """As if nobody had asked for it."""
        return await super().generate(msgspec.structs.replace(request, salt=None))


async def everyone_speaks(backend: VllmBackend) -> None:
    """Until all conversations are in the engine and have said something."""
    with trio.fail_after(WITHIN_S):
        while ((await backend.load()).running or 0) < FILLERS + TRAJECTORIES:  # noqa: ASYNC110 - it tells when asked
            await trio.sleep(0.05)
    await trio.sleep(SOME_TOKENS_S)


def turns_over(session: ModelSession) -> bool:
    """Whether a turn of this conversation has tokens of both versions."""
    versions: dict[int, set[int | None]] = {}
    for call in session.calls:
        versions.setdefault(call.turn, set()).update(span.version for span in call.policy_versions)
    return any(len(found) > 1 for found in versions.values())


async def test_the_engine_says_the_same_again(
    server: VllmServer, tokenizer: HfTokenizer, tell: Callable[[str], None]
) -> None:
    """Sampled tokens score as they were sampled; with one token exchanged they do not."""
    async with rollouts("vllm", server.url, tokenizer=server.model) as on, company(server, tokenizer) as backend:
        done = await talk(on, TRAJECTORIES, 48)
        branches = [branch for session in done for branch in session.branches]
        same = await gaps(backend, branches, OLD)
        for session in done:
            assert verify(session.branches, session.calls) == []
        ids = branches[0].ids[:]
        ids[2] += 1
        changed = await backend.score(ids, 1)
    sampled = [at for at, bit in enumerate(branches[0].mask) if bit]
    tell(f"{len(same)} tokens scored again: mean difference {fmean(same):.2e}, largest {max(same):.2e}")
    assert fmean(same) < MEAN_MAX
    assert fmean(abs(branches[0].logprobs[at] - changed[at - 1]) for at in sampled) > MEAN_MAX


@pytest.mark.parametrize("clears", [True, False], ids=["cleared", "stale"])
async def test_tokens_of_two_versions_in_one_turn(
    *,
    clears: bool,
    server: VllmServer,
    model: Path,
    other_model: Path,
    tokenizer: HfTokenizer,
    tell: Callable[[str], None],
) -> None:
    """New weights in mid-generation: each token scores under its own version, but not where old caches were kept."""
    client = VllmBackend if clears else Unsalted
    async with (
        rollouts("vllm", server.url, tokenizer=server.model, client=client) as on,
        company(server, tokenizer) as backend,
    ):
        done: list[ModelSession] = []

        async def conversations() -> None:
            done.extend(await talk(on, TRAJECTORIES, 120))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(conversations)
            await everyone_speaks(backend)
            await load(backend, other_model, NEW, clears=clears)
        for session in done:
            assert verify(session.branches, session.calls) == []
        mixed = [session for session in done if turns_over(session)]
        branches = [branch for session in done for branch in session.branches]
        await backend.clear_cache()
        new = await gaps(backend, branches, NEW)
        foreign = await gaps(backend, branches, OLD)
        await load(backend, model, PolicyVersion(0, 2))
        old = await gaps(backend, branches, OLD)
    tell(
        f"{'cleared' if clears else 'stale'} caches: {len(mixed)} of {len(done)} turned over in mid-turn;"
        f" mean difference old {fmean(old):.2e}, new {fmean(new):.2e}, old under new weights {fmean(foreign):.2e}"
    )
    assert len(mixed) >= TRAJECTORIES // 2
    assert fmean(old) < MEAN_MAX
    assert fmean(foreign) > STALE_MEAN_MIN
    assert (fmean(new) < MEAN_MAX) if clears else (fmean(new) > STALE_MEAN_MIN)
