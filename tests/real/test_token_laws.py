"""Random conversations on real engines: whatever is heard, wherever a turn is cut, the laws of tokens hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prorld.domain.messages import Message, system, tool_result, user
from prorld.inference.session import ModelSession
from prorld.tokens.verify import verify
from prorld.wire.ops import BackendKindName
from tests.real.conftest import CACHE_FLAGS, PAIR_FLAGS
from tests.real.rollouts import Tap, job_spec, rollouts
from tests.real.test_engine_death import Engine, embedded_engine
from tests.real.vllm_server import vllm_server

pytestmark = [pytest.mark.real, pytest.mark.slow]

EXAMPLES = 40
MARKUP = ("<|im_end|>", "<|im_start|>assistant\n", "<|endoftext|>", "<tool_call>", "</tool_call>", "<|im_", "end|>")
HEARD = st.lists(st.sampled_from(MARKUP) | st.text(max_size=20), max_size=6).map("".join)
# What is heard, how long the next turn may get, and whether the history is rewritten before it.
STEPS = st.lists(st.tuples(HEARD, st.integers(1, 12), st.booleans()), min_size=1, max_size=4)


@pytest.fixture(scope="module", params=["llamacpp", "vllm"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine for all conversations."""
    folder = tmp_path_factory.mktemp("engine")
    if request.param == "llamacpp":
        request.getfixturevalue("gguf")
        with embedded_engine(folder) as started:
            yield started
        return
    python, model = request.getfixturevalue("vllm_python"), request.getfixturevalue("model")
    with vllm_server(python, model, folder, scale_out=True, more=(*PAIR_FLAGS, *CACHE_FLAGS)) as ready:
        yield Engine("vllm", ready.url, ready.pid)


@contextmanager
def tapped() -> Iterator[Tap]:
    """What goes over the wire in the block."""
    with pytest.MonkeyPatch.context() as patch:
        yield Tap(patch)


async def converse(
    kind: BackendKindName, url: str, tokenizer: Path, steps: list[tuple[str, int, bool]], tap: Tap
) -> ModelSession:
    """Go through the steps, each a turn of the policy and what it hears after that."""
    async with rollouts(kind, url, tokenizer=tokenizer) as on:
        spec = job_spec("laws", turns=len(steps) + 1, max_tokens=12, context=1024)
        async with on.open(spec) as session:
            await session.start([system("Be odd."), user(steps[0][0] or "?")])
            for number, (heard, limit, rewrites) in enumerate(steps):
                await session.turn(max_tokens=limit)
                if rewrites:
                    said = Message(role="assistant", content=f"So far: {heard}")
                    await session.rewrite([system("Be odd."), user("Go on."), said, user("And?")])
                else:
                    await session.observe([user(heard) if number % 2 else tool_result(heard, f"call_{number}")])
            await session.turn(max_tokens=3)
            return session


def assert_lawful(session: ModelSession, tap: Tap) -> None:
    """Prefix, mask and version law, from the branches, the call log and the wire."""
    assert verify(session.branches, session.calls) == []
    sent = [list(payload.get("token_ids") or payload.get("prompt") or []) for payload, _ in tap.seen]
    for call in session.calls:
        branch = session.branches[call.branch]
        assert list(branch.ids[: call.prompt_len]) in sent
        assert bytes(branch.mask[call.prompt_len : call.prompt_len + call.sampled_len]) == b"\1" * call.sampled_len
    assert sum(sum(branch.mask) for branch in session.branches) == sum(call.sampled_len for call in session.calls)
    for branch in session.branches:
        for span in branch.versions:
            assert set(branch.mask[span.start : span.end]) == {int(span.version is not None)}
        given = [segment for segment in branch.segments if segment.source == "observation"]
        for segment in given:
            ids = branch.ids[segment.start : segment.end]
            assert 2 not in ids, "what was heard ended a turn"


def test_the_laws_hold_on_an_engine(engine: Engine, gguf: Path) -> None:
    """Forty conversations, shrunk to the smallest that breaks a law."""

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(steps=STEPS)
    def hold(steps: list[tuple[str, int, bool]]) -> None:
        with tapped() as tap:
            session = trio.run(partial(converse, engine.kind, engine.url, gguf, steps, tap))
            assert_lawful(session, tap)

    hold()
