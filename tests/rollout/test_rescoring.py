"""Scoring stored tokens again: a sound rollout passes, and each way in which it can lie is found."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
import trio.testing

from prorld.domain.branch import Branch, VersionSpan
from prorld.domain.job import TokenCounts
from prorld.errors import BackendError, Overloaded
from prorld.rollout import looks as looks_module
from prorld.rollout import verification
from prorld.testing.scripted_engine.script import Latency, Script
from prorld.wire.trajectory import branch_of, packed_branch
from tests.rollout.policy_backend import STALE, STEP, PolicyBackend, update
from tests.rollout.support import Room, room

TALK = Script(turns=["the answer is 42, as far as anybody can tell from here"])
SLOW = Script(turns=["the answer is 42, as far as anybody can tell"], latency=Latency(decode_token_s=0.1))


@asynccontextmanager
async def tampered(here: Room, job_id: str) -> AsyncIterator[Branch]:
    """The first branch of an ended job, put back as it is when the block is left."""
    branches = (await here.stored(job_id)).trajectory.branches
    branch = branch_of(branches[0])
    yield branch
    branches[0] = packed_branch(branch)


async def rescored(here: Room, job_id: str = "a", **asked):
    """One verification with a second look."""
    return await here.looks.verify(job_id, "tests", rescore=True, **asked)


def codes(answer) -> list[str]:
    """What was found."""
    return [violation.code for violation in answer.violations]


def confirmed(answer, counts: TokenCounts) -> bool:
    """Whether every sampled token was either compared or named."""
    return answer.rescore.tokens + sum(left.tokens for left in answer.unverifiable) == counts.sampled


@pytest.mark.parametrize("inline", [True, False])
async def test_a_sound_rollout_is_confirmed(inline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sampled token is compared, on the loop or in a thread, and none differs."""
    if not inline:
        monkeypatch.setattr(looks_module, "INLINE_TOKENS_MAX", 0)
        monkeypatch.setattr(verification, "INLINE_TOKENS_MAX", 0)
    async with room(backends=[PolicyBackend(TALK)]) as here:
        record = await here.finish("a")
        answer = await rescored(here)
        assert (answer.ok, answer.result, answer.violations, answer.unverifiable) == (True, "ok", [], [])
        assert answer.rescore is not None
        assert (answer.rescore.tokens, answer.rescore.mean, answer.rescore.max) == (record.tokens.sampled, 0.0, 0.0)
        assert answer.rescore.backends == [here.pool.list().items[0].backend_id]
        assert [(one.version, one.tokens) for one in answer.rescore.by_version] == [(0, record.tokens.sampled)]
        assert (await here.looks.verify("a", "tests")).rescore is None
        here.assert_clean()


async def test_a_changed_logprob_is_found(autojump_clock: trio.testing.MockClock) -> None:
    """One value that was tampered with: the worst token is named with both numbers, and its call."""
    async with room(backends=[PolicyBackend(TALK)]) as here:
        await here.finish("a")
        async with tampered(here, "a") as branch:
            at = bytes(branch.mask).index(1) + 3
            branch.logprobs[at] -= 2.0
        assert (await here.looks.verify("a", "tests")).result == "ok", "its own laws can't find it"
        answer = await rescored(here)
        assert (answer.result, codes(answer)) == ("broken", ["logprob_drift"])
        assert answer.rescore is not None
        worst = answer.rescore.worst
        assert worst is not None
        assert (worst.branch, worst.index, worst.token_id, worst.call) == (0, at, branch.ids[at], 0)
        assert worst.scored - worst.recorded == pytest.approx(2.0)
        assert (answer.violations[0].branch, answer.violations[0].call) == (0, 0)


async def test_a_changed_id_is_found(autojump_clock: trio.testing.MockClock) -> None:
    """Another token in the place of one that was sampled scores otherwise."""
    async with room(backends=[PolicyBackend(TALK)]) as here:
        await here.finish("a")
        async with tampered(here, "a") as branch:
            branch.ids[bytes(branch.mask).index(1) + 1] += 1
        assert (await here.looks.verify("a", "tests")).result == "ok", "its own laws can't find it"
        assert codes(await rescored(here, tolerance=0.001)) == ["logprob_drift"]


async def test_a_wrong_version_label_is_found(autojump_clock: trio.testing.MockClock) -> None:
    """Tokens of version 0 that call themselves version 1, in branch and call log alike."""
    old, new = PolicyBackend(TALK, url="fake://old"), PolicyBackend(TALK, url="fake://new")
    async with room(backends=[old, new]) as here:
        await here.finish("a")
        await update(here, new, 1)
        calls = (await here.stored("a")).trajectory.calls
        assert (await rescored(here)).result == "ok"
        call = calls[0]
        calls[0] = msgspec.structs.replace(
            call, policy_versions=[VersionSpan(start=0, end=call.sampled_len, version=1)]
        )
        async with tampered(here, "a") as branch:
            branch._versions = [
                span if span.version is None else msgspec.structs.replace(span, version=1) for span in branch._versions
            ]
        assert (await here.looks.verify("a", "tests")).result == "ok", "its own laws can't find it"
        answer = await rescored(here)
        assert codes(answer) == ["logprob_drift"]
        assert answer.rescore is not None
        assert answer.rescore.mean == pytest.approx(STEP, abs=1e-5)


@pytest.mark.parametrize("stale", [False, True])
async def test_each_token_is_scored_by_its_own_version(stale: bool, autojump_clock: trio.testing.MockClock) -> None:
    """Weights that change in the middle of a turn: exact under both labels, unless a stale cache was left behind."""
    changing = PolicyBackend(SLOW, url="fake://changing", stale_caches=stale)
    async with room(backends=[changing]) as here:
        await here.submit("a")
        await trio.sleep(2.05)
        await update(here, changing, 1)
        record = await here.supervisor.wait_done("a", "tests")
        assert record.policy_versions == [0, 1]
        answer = await rescored(here)
        assert answer.rescore is not None
        assert confirmed(answer, record.tokens)
        assert [(left.version, left.reason) for left in answer.unverifiable] == [(0, "not_served")]
        if not stale:
            assert (answer.result, answer.rescore.max) == ("unverifiable", 0.0)
        else:
            assert (answer.result, codes(answer)) == ("broken", ["logprob_drift"])
            assert answer.rescore.mean == pytest.approx(STALE, abs=1e-5)
        old = PolicyBackend(SLOW, url="fake://old")
        here.pool._factories["vllm"] = lambda request: old
        await here.pool.add(msgspec.structs.replace(here.pool.entries("default")[0].request, url=old.url))
        whole = await rescored(here)
        assert (whole.result, whole.unverifiable) == ("broken" if stale else "ok", [])
        assert whole.rescore is not None
        assert [one.version for one in whole.rescore.by_version] == [0, 1]
        assert len(whole.rescore.backends) == 2
        assert whole.rescore.by_version[0].max == 0.0


async def test_a_drift_of_few_tokens_does_not_hide_among_many(autojump_clock: trio.testing.MockClock) -> None:
    """The tolerance holds for each version: over all tokens together this drift would pass."""
    changing, old = PolicyBackend(SLOW, url="fake://changing", stale_caches=True), PolicyBackend(SLOW, url="fake://old")
    async with room(backends=[changing, old]) as here:
        await here.submit("a")
        await trio.sleep(3.55)
        await update(here, changing, 1)
        await here.supervisor.wait_done("a", "tests")
        answer = await rescored(here)
        assert answer.rescore is not None
        assert answer.rescore.mean is not None
        assert answer.rescore.mean < answer.rescore.tolerance_mean < answer.rescore.by_version[1].mean
        assert codes(answer) == ["logprob_drift"]


@pytest.mark.parametrize(
    ("call", "params", "reason"),
    [
        ({"exact": False}, {}, "inexact"),
        ({}, {"logprobs_mode": "none"}, "no_logprobs"),
        ({}, {"logprobs_mode": "processed", "temperature": 0.7}, "processed"),
        ({}, {"logprobs_mode": "processed", "top_p": 0.9}, "processed"),
        ({}, {"logprobs_mode": "processed", "penalties": {"presence": 0.5}}, "processed"),
        ({}, {"logprobs_mode": "processed", "top_k": 0, "penalties": {"presence": 0.0}}, None),
        ({}, {"temperature": 0.7, "top_k": 20}, None),
    ],
)
async def test_what_can_not_be_compared_is_named(call, params, reason, autojump_clock) -> None:
    """It is no ``ok`` and no drift, whatever its numbers are."""
    async with room(backends=[PolicyBackend(TALK)]) as here:
        record = await here.finish("a")
        calls = (await here.stored("a")).trajectory.calls
        made = calls[0]
        calls[0] = msgspec.structs.replace(made, **call, params=msgspec.structs.replace(made.params, **params))
        answer = await rescored(here)
        assert confirmed(answer, record.tokens)
        assert answer.rescore is not None
        if reason is None:
            assert (answer.result, answer.rescore.tokens) == ("ok", record.tokens.sampled)
        else:
            assert (answer.result, [left.reason for left in answer.unverifiable]) == ("unverifiable", [reason])
            assert (answer.rescore.tokens, answer.rescore.mean, answer.rescore.worst) == (0, None, None)


async def test_an_engine_that_fails_leaves_tokens_unconfirmed(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails, or it hangs: the answer says so, nothing waits for ever, and no strike is given."""
    engine = PolicyBackend(TALK)

    async def fail(token_ids: array[int], start: int) -> array[float]:
        raise BackendError("out of memory", status=500)

    async def hang(token_ids: array[int], start: int) -> array[float]:
        await trio.sleep_forever()
        raise AssertionError

    async with room(backends=[engine]) as here:
        record = await here.finish("a")
        for act in (fail, hang):
            monkeypatch.setattr(engine, "score", act)
            answer = await rescored(here)
            assert (answer.result, [left.reason for left in answer.unverifiable]) == ("unverifiable", ["unscored"])
            assert confirmed(answer, record.tokens)
            assert here.pool.list().items[0].state == "up"
            here.assert_clean()


async def test_a_rollout_that_breaks_its_own_laws_is_not_scored(autojump_clock: trio.testing.MockClock) -> None:
    """Its tokens can't be told from one another, so no engine is asked."""
    engine = PolicyBackend(TALK)
    async with room(backends=[engine]) as here:
        await here.finish("a")
        async with tampered(here, "a") as branch:
            branch._mask[0] = 1
        answer = await rescored(here)
        assert (answer.result, answer.rescore, engine.scored) == ("broken", None, [])


async def test_too_many_who_ask_are_refused(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting requests are bounded, and the place of one that left is free again."""
    monkeypatch.setattr(looks_module, "RESCORES_ASKED_MAX", 1)
    engine = PolicyBackend(TALK)
    sound = engine.score

    async def hang(token_ids: array[int], start: int) -> array[float]:
        await trio.sleep_forever()
        raise AssertionError

    async with room(backends=[engine]) as here:
        await here.finish("a")
        monkeypatch.setattr(engine, "score", hang)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rescored, here)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(Overloaded):
                await rescored(here)
            nursery.cancel_scope.cancel()
        monkeypatch.setattr(engine, "score", sound)
        assert (await rescored(here)).result == "ok"
        here.assert_clean()


async def test_engines_that_vary_with_their_load_are_allowed_more(autojump_clock: trio.testing.MockClock) -> None:
    """A small difference of such an engine is no drift, and the answer says what was allowed; a large one is."""
    engine = PolicyBackend(TALK)
    engine.claims = msgspec.structs.replace(await engine.probe(), varies=True)
    async with room(backends=[engine]) as here:
        await here.finish("a")
        async with tampered(here, "a") as branch:
            sampled = [at for at, bit in enumerate(branch.mask) if bit]
            for at in sampled:
                branch.logprobs[at] -= 0.05
        answer = await rescored(here)
        assert answer.rescore is not None
        assert (answer.result, answer.rescore.by_version[0].tolerance_mean) == ("ok", 0.07)
        assert codes(await rescored(here, tolerance=0.02)) == ["logprob_drift"]
        async with tampered(here, "a") as branch:
            for at in sampled:
                branch.logprobs[at] -= 0.05
        assert codes(await rescored(here)) == ["logprob_drift"]
