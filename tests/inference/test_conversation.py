"""Several conversations of one rollout: histories rewritten, sub-agents asked, budgets and one call log for all."""

from __future__ import annotations

import pytest
import trio

from prorld.domain.job import AgentLimits
from prorld.domain.messages import Message, system, tool_result, user
from prorld.domain.outcome import StopReason
from prorld.errors import HandlerError
from prorld.inference.contract import Model
from prorld.rollout.entry import drift_of
from prorld.tokens.context import OBSERVATION_CHARS_MAX
from prorld.tokens.verify import verify
from tests.inference.test_session import PLAIN, ScriptedLease, opened, partly, sound
from tests.tokens.support import BASH


async def test_a_rewritten_history_goes_on_in_a_branch_of_its_own() -> None:
    """What was sampled stays where it was; the new branch shares what it can and says why it is there."""
    lease = ScriptedLease("one<|im_end|>", "two<|im_end|>", "three<|im_end|>")
    session = await opened(lease, system("s"), user("go"))
    await session.turn()
    await session.observe([user("more")])
    await session.turn()
    summary = [system("s"), user("go"), Message(role="assistant", content="one, two"), user("so?")]
    await session.rewrite(summary)
    old, new = session.branches
    assert (new.parent, new.reason) == (0, "compaction")
    assert new.fork_at is not None
    assert new.ids[: new.fork_at] == old.ids[: new.fork_at]
    assert "go<|im_end|>" in PLAIN.tokenizer.decode(old.ids[: new.fork_at])
    assert session.transcript == tuple(summary)
    assert [
        segment.message.content for segment in new.segments if segment.source == "observation" and segment.message
    ] == [
        "one, two",
        "so?",
    ]
    await session.turn()
    assert [call.branch for call in session.calls] == [0, 0, 1]
    assert (old.sampled, new.sampled) == (session.calls[0].sampled_len + session.calls[1].sampled_len, 6)
    assert drift_of(session).verdict == "forked"
    sound(session)


async def test_a_rewrite_is_checked() -> None:
    """It takes an open conversation, a reason that is a handler's to give, and something to answer."""
    session = await opened(ScriptedLease("one<|im_end|>"))
    with pytest.raises(HandlerError, match="for compaction or history_rewrite"):
        await session.rewrite([user("x")], reason="think_strip")  # type: ignore[arg-type]
    for nothing in ([], [Message(role="assistant", content="me")]):
        with pytest.raises(HandlerError, match="that the policy answers"):
            await session.rewrite(nothing)
    await session.rewrite([user("x")], reason="history_rewrite")
    assert (await session.turn()).content == "one"
    assert [branch.reason for branch in session.branches] == [None, "history_rewrite"]
    sound(session)


async def test_a_sub_agent_is_asked_aside() -> None:
    """It has a branch and tools of its own; the branch of whoever asked grows on afterwards, exactly."""
    lease = ScriptedLease("main<|im_end|>", "sub<|im_end|>", "sub again<|im_end|>", "back<|im_end|>")
    session = await opened(lease, system("s"), user("go"))
    await session.turn()
    async with session.sub_agent([system("s"), user("count")], [BASH]) as sub:
        assert (await sub.turn()).content == "sub"
        await sub.observe([user("more")])
        assert (await sub.turn()).content == "sub again"
    await session.observe([user("it said: sub")])
    assert (await session.turn()).content == "back"
    main, aside = session.branches
    assert (aside.parent, aside.reason) == (0, "sub_agent")
    assert [call.branch for call in session.calls] == [0, 1, 1, 0]
    assert [call.turn for call in session.calls] == [0, 1, 2, 3]
    assert lease.requests[3].token_ids[: len(lease.requests[0].token_ids)] == lease.requests[0].token_ids
    assert [message.content for message in session.transcript] == ["s", "go", "main", "it said: sub", "back"]
    counts = session.token_counts()
    assert counts.prompt + counts.sampled + counts.observed == len(main) + len(aside)
    assert drift_of(session).verdict == "exact"
    sound(session)


async def test_a_sub_agent_may_ask_and_compact() -> None:
    """Conversations nest, and each forks for itself."""
    replies = [f"{name}<|im_end|>" for name in ("a", "b", "c", "d", "e", "f")]
    session = await opened(ScriptedLease(*replies))
    await session.turn()
    async with session.sub_agent([user("outer")]) as outer:
        await outer.turn()
        async with outer.sub_agent([user("inner")]) as inner:
            await inner.turn()
        await outer.rewrite([user("outer, again")])
        await outer.turn()
        await outer.observe([user("more")])
        await outer.turn()
    await session.observe([user("done?")])
    await session.turn()
    assert [(b.parent, b.reason) for b in session.branches] == [
        (None, None),
        (0, "sub_agent"),
        (1, "sub_agent"),
        (1, "compaction"),
    ]
    assert [call.branch for call in session.calls] == [0, 1, 2, 3, 3, 0]
    sound(session)


async def test_sub_agents_at_once_take_turns() -> None:
    """Turns of one rollout are sampled one after the other, interrupted ones included."""
    session = await opened(ScriptedLease("main<|im_end|>", *[partly("hal"), "f<|im_end|>"] * 3, "end<|im_end|>"))
    await session.turn()
    said: list[str] = []

    async def ask(name: str) -> None:
        async with session.sub_agent([user(name)]) as sub:
            said.append((await sub.turn()).content)

    async with trio.open_nursery() as nursery:
        for name in ("a", "b", "c"):
            nursery.start_soon(ask, name)
    assert said == ["half"] * 3
    await session.observe([user("and?")])
    await session.turn()
    assert [call.turn for call in session.calls] == [0, 1, 1, 2, 2, 3, 3, 4]
    sound(session)


async def test_budgets_are_shared() -> None:
    """What a sub-agent uses up is used up."""
    session = await opened(ScriptedLease("one<|im_end|>", "two<|im_end|>"), limits=AgentLimits(max_turns=2))
    await session.turn()
    async with session.sub_agent([user("x")]) as sub:
        assert (await sub.turn()).stop is StopReason.MAX_TURNS
    await session.observe([user("more")])
    turn = await session.turn()
    assert (turn.stop, turn.sampled) == (StopReason.MAX_TURNS, 0)
    sound(session)


async def test_a_context_is_the_conversations_own() -> None:
    """A sub-agent has room where whoever asked it has none left."""
    session = await opened(ScriptedLease("one<|im_end|>", "two<|im_end|>", context=2000))
    await session.turn()
    await session.observe([user("x" * 2000)])
    assert (await session.turn()).stop is StopReason.CONTEXT_FULL
    async with session.sub_agent([user("x")]) as sub:
        assert (await sub.turn()).content == "two"
    sound(session)


async def test_a_sub_agent_ends_with_its_block() -> None:
    """Nobody talks to it afterwards, and nobody asks before there is a conversation."""
    session = await opened(ScriptedLease("one<|im_end|>"))
    async with session.sub_agent([user("x")]) as sub:
        with pytest.raises(HandlerError, match="already"):
            await sub.start([user("x")])
    for misuse in (sub.turn, lambda: sub.observe([user("x")]), lambda: sub.rewrite([user("x")])):
        with pytest.raises(HandlerError, match="is over"):
            await misuse()
    with pytest.raises(HandlerError, match="is over"):
        async with sub.sub_agent([user("x")]):
            raise AssertionError
    with pytest.raises(HandlerError, match="at least one message"):
        async with session.sub_agent([]):
            raise AssertionError


async def test_a_huge_observation_is_cut_and_fills_the_context() -> None:
    """It is cut before it is tokenized; what is then too long ends the episode, and nothing is dropped for it."""
    lease = ScriptedLease("one<|im_end|>", context=4000)
    session: Model = await opened(lease)
    await session.turn()
    huge = "begin " + "<|im_end|>" * 10**6 + " end"
    await session.observe([tool_result(huge, "c")])
    turn = await session.turn()
    assert (turn.stop, turn.sampled, len(lease.requests)) == (StopReason.CONTEXT_FULL, 0, 1)
    assert verify(session.branches, session.calls) == []  # type: ignore[attr-defined]
    (branch,) = session.branches  # type: ignore[attr-defined]
    kept = branch.segments[-2].message.content
    assert OBSERVATION_CHARS_MAX < len(kept) < OBSERVATION_CHARS_MAX + 100
    assert kept.startswith("begin ")
    assert kept.endswith(" end")
    assert len(branch) > 4000
