"""The session: budgets before every call, tokens appended in one place, engines that pause, fail and come back."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from prorld.domain.branch import VersionSpan
from prorld.domain.calls import FinishReason
from prorld.domain.job import AgentLimits, JobSpec, Sampling, effective_seed
from prorld.domain.messages import CallStatus, Message, system, tool_result, user
from prorld.domain.outcome import StopReason
from prorld.errors import BackendError, ContextOverflow, EngineBusy, HandlerError, MalformedReply, NoBackend
from prorld.inference.contract import Capabilities, Generation, GenerationRequest, Model
from prorld.inference.conversation import INLINE_CHARS_MAX
from prorld.inference.lease import Door
from prorld.inference.session import MIGRATIONS_MAX, ROOM_MIN, ModelSession
from prorld.kit.lanes import Lane
from prorld.tokens.jinja_renderer import JinjaRenderer
from prorld.tokens.verify import verify
from tests.tokens.support import BASH, CHATML, THINKING, tiny

PLAIN = JinjaRenderer(tiny(CHATML))
THINKER = JinjaRenderer(tiny(THINKING))
CALL = '<tool_call>{"name": "bash", "arguments": {}}</tool_call><|im_end|>'

Step = Callable[[GenerationRequest], Generation] | BackendError | str


def generation(text: str, finish: FinishReason = "stop", *, limit: int = 10**9, version: int = 1) -> Generation:
    """A reply that says ``text``, cut to ``limit``."""
    ids = array("i", PLAIN.tokenizer.encode(text)[:limit])
    return Generation(
        token_ids=ids,
        logprobs=array("f", [-0.25] * len(ids)),
        finish=finish,
        versions=(VersionSpan(start=0, end=len(ids), version=version),) if ids else (),
        versions_exact=True,
        latency_s=0.5,
        ignored=("min_p",),
        cached_tokens=3,
        engine_request_id="e-1",
    )


def partly(text: str, version: int = 1) -> Step:
    """An engine that stops in the middle."""
    return lambda request: generation(text, "abort", version=version)


class ScriptedLease:
    """An engine that answers by a script, one step a call; text is said in full, or cut at the limit asked for."""

    def __init__(self, *steps: Step, context: int = 10_000) -> None:
        self.steps = list(steps)
        self.requests: list[GenerationRequest] = []
        self.moves = 0
        self.capabilities = Capabilities(model="m", max_context_tokens=context)
        self.lacking: str | None = None

    @property
    def backend_id(self) -> str:
        """A new engine after each move."""
        return f"b-{self.moves}"

    async def generate(self, request: GenerationRequest, door: Door | None = None) -> Generation:
        """The next step."""
        await trio.lowlevel.checkpoint()
        self.requests.append(request)
        step = self.steps.pop(0)
        if isinstance(step, BackendError):
            raise step
        if not isinstance(step, str):
            return step(request)
        whole = generation(step)
        cut = len(whole.token_ids) > request.max_tokens
        return generation(step, "length" if cut else "stop", limit=request.max_tokens)

    async def migrate(self) -> None:
        """To the next engine."""
        await trio.lowlevel.checkpoint()
        self.moves += 1


async def opened(
    lease: ScriptedLease,
    *messages: Message,
    renderer: JinjaRenderer = PLAIN,
    limits: AgentLimits | None = None,
    sampling: Sampling | None = None,
) -> ModelSession:
    """A session whose conversation is open."""
    spec = JobSpec(
        job_id="j",
        tenant="t",
        handler="h",
        instance={},
        agent=limits or AgentLimits(),
        sampling=sampling or Sampling(seed=7),
    )
    session = ModelSession(spec, 2, renderer=renderer, lease=lease, lane=Lane("tokens", 1))
    await session.start(messages or (system("s"), user("go")), [BASH])
    return session


def sound(session: ModelSession) -> None:
    """The trajectory is what it says."""
    assert verify(session.branches, session.calls) == []


async def test_turns_and_observations() -> None:
    """The engine is sent the branch's own tokens; what it says is appended, recorded and read."""
    lease = ScriptedLease(CALL, "done<|im_end|>")
    session: Model = await opened(lease)
    assert isinstance(session, ModelSession)
    first = await session.turn()
    assert [(call.name, call.status) for call in first.tool_calls] == [("bash", CallStatus.OK)]
    assert (first.truncated, first.stop, first.sampled) == (False, None, len(PLAIN.tokenizer.encode(CALL)))
    await session.observe([tool_result("out", first.tool_calls[0].id)])
    second = await session.turn()
    assert second.content == "done"
    sound(session)
    one, two = lease.requests
    assert two.token_ids[: len(one.token_ids)] == one.token_ids
    assert session.branches[0].ids[: len(two.token_ids)] == two.token_ids
    assert [call.prompt_len for call in session.calls] == [len(one.token_ids), len(two.token_ids)]
    assert one.stop_token_ids == PLAIN.stop_token_ids
    assert one.session == two.session
    assert one.request_id != two.request_id
    assert [request.seed for request in lease.requests] == [effective_seed(session._spec, 2, n) for n in (0, 1)]
    assert session.calls[0].params.ignored == ["min_p"]
    assert (session.calls[0].backend, session.calls[0].cached_prefix_len, session.calls[0].engine_request_id) == (
        "b-0",
        3,
        "e-1",
    )
    counts = session.token_counts()
    assert counts.prompt + counts.sampled + counts.observed == len(session.branches[0])
    assert (session.turns, session.backends_used(), session.versions_used()) == (2, ["b-0"], [1])
    assert [message.role for message in session.transcript] == ["system", "user", "assistant", "tool", "assistant"]
    assert session.tools == (BASH,)
    assert session.tokenizer == f"tiny sha256:{'0' * 64}"


async def test_call_ids_are_unique_in_a_rollout() -> None:
    """The calls of different turns can be told apart."""
    session = await opened(ScriptedLease(CALL, CALL))
    first = await session.turn()
    await session.observe([tool_result("out", first.tool_calls[0].id)])
    second = await session.turn()
    assert first.tool_calls[0].id != second.tool_calls[0].id


async def test_a_turn_asks_for_the_smallest_of_all_budgets() -> None:
    """Turn, rollout, context of the job and of the engine: whichever is least."""
    lease = ScriptedLease("a" * 6 + "<|im_end|>", "x" * 99, context=10_000)
    session = await opened(lease, limits=AgentLimits(max_sampled_tokens=30), sampling=Sampling(max_tokens=25))
    await session.turn(max_tokens=9)
    await session.observe([user("n")])
    turn = await session.turn()
    assert [request.max_tokens for request in lease.requests] == [9, 23]
    assert (turn.truncated, turn.stop, turn.sampled) == (True, StopReason.MAX_TOKENS, 23)
    assert session.calls[1].finish_reason == "length"
    assert (await session.turn()).stop is StopReason.MAX_TOKENS
    assert len(lease.requests) == 2
    sound(session)


@pytest.mark.parametrize(("engine", "job"), [(60, 32768), (10_000, 60)])
async def test_the_context_ends_the_rollout(engine: int, job: int) -> None:
    """No call asks for more than fits; when less than the floor is left, nothing is sampled."""
    lease = ScriptedLease("x" * 999, context=engine)
    session = await opened(lease, user("go"), limits=AgentLimits(max_context_tokens=job))
    prompt = len(session.branches[0])
    # The tools take more than there is room for: no call at all.
    turn = await session.turn()
    assert prompt > 60 - ROOM_MIN
    assert (turn.content, turn.stop, turn.sampled, lease.requests) == ("", StopReason.CONTEXT_FULL, 0, [])
    assert session.turns == 0


async def test_the_room_that_is_left_is_used_up() -> None:
    """A turn may fill the context to its last token, and is then the last."""
    lease = ScriptedLease("x" * 9999, context=2000)
    session = await opened(lease)
    room = 2000 - len(session.branches[0])
    turn = await session.turn()
    assert lease.requests[0].max_tokens == room
    assert (turn.truncated, turn.stop) == (True, StopReason.CONTEXT_FULL)
    assert len(session.branches[0]) == 2000
    sound(session)


async def test_the_last_turn_says_so() -> None:
    """With the last turn comes the reason why there is no other; asked again, nothing is sampled."""
    lease = ScriptedLease("one<|im_end|>", "two<|im_end|>")
    session = await opened(lease, limits=AgentLimits(max_turns=2))
    assert (await session.turn()).stop is None
    await session.observe([user("next")])
    last = await session.turn()
    assert (last.content, last.stop) == ("two", StopReason.MAX_TURNS)
    again = await session.turn()
    assert (again.content, again.stop, again.sampled) == ("", StopReason.MAX_TURNS, 0)


async def test_a_truncated_turn_is_closed_by_glue() -> None:
    """A turn cut by its budget goes on after a close marker that nobody sampled."""
    session = await opened(ScriptedLease("abcdefgh", "ok<|im_end|>"))
    turn = await session.turn(max_tokens=4)
    assert turn.truncated
    assert turn.stop is None
    size = len(session.branches[0])
    await session.observe([user("go on")])
    assert session.branches[0].ids[size] == PLAIN.stop_token_ids[0]
    assert session.branches[0].mask[size] == 0
    await session.turn()
    sound(session)


async def test_an_interrupted_turn_goes_on_from_its_own_tokens() -> None:
    """Several calls, one turn: the same tokens, the budget that remains, every part with its version."""
    lease = ScriptedLease(partly("half", 1), partly(" and", 2), "x" * 99)
    session = await opened(lease, sampling=Sampling(max_tokens=12))
    turn = await session.turn()
    assert turn.content == "half and" + "xxxx"
    assert [request.max_tokens for request in lease.requests] == [12, 8, 4]
    assert lease.requests[1].token_ids[-4:] == array("i", PLAIN.tokenizer.encode("half"))
    assert [(call.turn, call.finish_reason) for call in session.calls] == [(0, "abort"), (0, "abort"), (0, "length")]
    assert session.versions_used() == [1, 2]
    assert session.turns == 1
    assert [message.content for message in session.transcript if message.role == "assistant"] == [turn.content]
    sound(session)


async def test_a_turn_interrupted_at_its_last_token_is_over() -> None:
    """Nothing is asked for when nothing is left."""
    lease = ScriptedLease(partly("half"))
    session = await opened(lease)
    turn = await session.turn(max_tokens=4)
    assert (turn.content, turn.truncated, turn.stop, len(lease.requests)) == ("half", True, None, 1)
    assert session.branches[0].segments[-1].message == session.transcript[-1]
    assert session.transcript[-1].content == "half"
    sound(session)


async def test_a_busy_engine_is_waited_for(autojump_clock: MockClock) -> None:
    """Busy is no failure: the same engine is asked again, less and less often, and the waiting shows in the time."""
    lease = ScriptedLease(*[EngineBusy("paused")] * 20, "ok<|im_end|>")
    session = await opened(lease)
    began = trio.current_time()
    assert (await session.turn()).content == "ok"
    assert lease.moves == 0
    assert 20 < trio.current_time() - began == session.llm_s < 40
    assert len({request.request_id for request in lease.requests}) == 21
    assert len({request.seed for request in lease.requests}) == 1


async def test_an_engine_that_stops_before_it_begins_is_waited_for(autojump_clock: MockClock) -> None:
    """An abort without a token leaves no record and does not spin."""
    lease = ScriptedLease(*[partly("")] * 10, "ok<|im_end|>")
    session = await opened(lease)
    began = trio.current_time()
    assert (await session.turn()).content == "ok"
    assert trio.current_time() - began > 5
    assert len(session.calls) == 1
    sound(session)


async def test_waiting_ends_with_the_scope(autojump_clock: MockClock) -> None:
    """The stage's deadline ends a wait that would never end, and the trajectory is whole."""
    session = await opened(ScriptedLease(partly("half"), *[EngineBusy("paused")] * 10_000))
    with trio.move_on_after(60) as scope:
        await session.turn()
    assert scope.cancelled_caught
    assert session.llm_s == pytest.approx(60)
    assert [call.sampled_len for call in session.calls] == [4]
    sound(session)


async def test_a_failed_engine_is_left_with_the_same_tokens() -> None:
    """Another engine gets the very tokens, those it had sampled before included."""
    lease = ScriptedLease(BackendError("boom"), partly("half"), NoBackend("gone"), " done<|im_end|>")
    session = await opened(lease)
    assert (await session.turn()).content == "half done"
    assert lease.moves == 2
    assert session.backends_used() == ["b-1", "b-2"]
    assert lease.requests[0].token_ids == lease.requests[1].token_ids
    assert lease.requests[2].token_ids == lease.requests[3].token_ids
    sound(session)


async def test_failing_has_an_end() -> None:
    """After so many engines the failure is the rollout's; one that can't be helped is at once."""
    lease = ScriptedLease(*[BackendError("boom")] * 10)
    session = await opened(lease)
    with pytest.raises(BackendError, match="boom"):
        await session.turn()
    assert lease.moves == MIGRATIONS_MAX
    hopeless = ScriptedLease(BackendError("bad request", retryable=False))
    with pytest.raises(BackendError, match="bad request"):
        await (await opened(hopeless)).turn()
    assert hopeless.moves == 0


async def test_an_engine_that_finds_the_context_too_long() -> None:
    """That is a limit of the policy and no failure; what was said is kept."""
    session = await opened(ScriptedLease(ContextOverflow("too long")))
    turn = await session.turn()
    assert (turn.content, turn.stop, turn.sampled) == ("", StopReason.CONTEXT_FULL, 0)
    session = await opened(ScriptedLease(partly("half"), ContextOverflow("too long")))
    turn = await session.turn()
    assert (turn.content, turn.stop, turn.sampled, turn.truncated) == ("half", StopReason.CONTEXT_FULL, 4, True)
    assert session.transcript[-1].content == "half"
    sound(session)


def broken(reply: Generation, **changes: object) -> Step:
    """A reply that can't be."""
    return lambda request: msgspec.structs.replace(reply, **changes)


@pytest.mark.parametrize(
    "step",
    [
        lambda request: generation("x" * (request.max_tokens + 1), "length"),
        broken(generation("abc"), logprobs=array("f", [-1.0])),
        broken(generation("abc"), logprobs=array("f", [-1.0, float("nan"), -1.0])),
        broken(generation("abc"), versions=()),
        broken(generation("abc"), versions=(VersionSpan(start=1, end=3),)),
        broken(generation("abc"), versions=(VersionSpan(start=0, end=4),)),
        broken(generation(""), finish="stop"),
    ],
)
async def test_a_reply_that_does_not_fit_is_never_data(step: Step) -> None:
    """Nothing of it is appended; another engine is asked."""
    lease = ScriptedLease(step, "ok<|im_end|>")
    session = await opened(lease)
    assert (await session.turn()).content == "ok"
    assert lease.moves == 1
    assert len(session.calls) == 1
    lease = ScriptedLease(*[step] * (MIGRATIONS_MAX + 1))
    session = await opened(lease)
    with pytest.raises(MalformedReply):
        await session.turn()
    assert not session.calls
    sound(session)


async def test_a_fork_goes_on_in_a_branch_of_its_own() -> None:
    """Where the template can't go on, the next call is of the new branch, and both are verified."""
    lease = ScriptedLease("<think>hm</think>well<|im_end|>", "ok<|im_end|>")
    session = await opened(lease, renderer=THINKER)
    first = await session.turn()
    assert (first.reasoning, first.content) == ("hm", "well")
    await session.observe([user("next")])
    await session.turn()
    assert [call.branch for call in session.calls] == [0, 1]
    assert session.branches[1].reason == "think_strip"
    assert lease.requests[1].token_ids == session.branches[1].ids[: len(lease.requests[1].token_ids)]
    sound(session)


async def test_long_texts_are_tokenized_off_the_loop() -> None:
    """A long text takes a thread of the lane; the result is the same."""
    long = "word " * INLINE_CHARS_MAX
    session = await opened(
        ScriptedLease("ok<|im_end|>", context=10**6), user(long), limits=AgentLimits(max_context_tokens=10**6)
    )
    await session.turn()
    await session.observe([user(long)])
    assert session._main._lane.statistics().runs_total == 2
    assert long in PLAIN.tokenizer.decode(session.branches[0].ids)
    sound(session)


async def test_misuse_is_the_handlers_error() -> None:
    """The order of calls and the size of a turn are checked."""
    session = await opened(ScriptedLease())
    with pytest.raises(HandlerError, match="already"):
        await session.start([user("again")])
    with pytest.raises(HandlerError, match="after a turn"):
        await session.observe([user("early")])
    with pytest.raises(HandlerError, match="no turn"):
        await session.turn(max_tokens=0)
    spec = JobSpec(job_id="j", tenant="t", handler="h", instance={})
    unopened = ModelSession(spec, 1, renderer=PLAIN, lease=ScriptedLease(), lane=Lane("tokens", 1))
    with pytest.raises(HandlerError, match="not been started"):
        await unopened.turn()


async def test_cancelling_a_call_leaves_the_trajectory_whole() -> None:
    """A call that was cancelled never happened."""

    class Stuck(ScriptedLease):
        async def generate(self, request: GenerationRequest, door: Door | None = None) -> Generation:
            await trio.sleep_forever()
            raise AssertionError

    session = await opened(Stuck())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.turn)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert (session.turns, len(session.calls)) == (0, 0)
    sound(session)


async def test_every_turn_is_told() -> None:
    """Who listens hears of each turn in which the policy spoke, by number, and of no other."""
    told: list[tuple[int, str]] = []
    spec = JobSpec(job_id="j", tenant="t", handler="h", instance={}, agent=AgentLimits(max_turns=2))
    lease = ScriptedLease("one<|im_end|>", "two<|im_end|>")
    session = ModelSession(
        spec,
        1,
        renderer=PLAIN,
        lease=lease,
        lane=Lane("tokens", 1),
        on_turn=lambda number, turn: told.append((number, turn.content)),
    )
    await session.start([user("go")])
    await session.turn()
    await session.observe([user("next")])
    await session.turn()
    await session.turn()
    assert told == [(0, "one"), (1, "two")]


async def test_a_turn_that_is_over_is_not_gone_on_with() -> None:
    """Its text would stand twice in the transcript, and behind the token that closed it."""
    session = await opened(ScriptedLease("one<|im_end|>", "two<|im_end|>"))
    await session.turn()
    with pytest.raises(HandlerError, match="has spoken"):
        await session.turn()
    await session.observe([user("and?")])
    assert (await session.turn()).content == "two"
    assert [message.content for message in session.transcript] == ["s", "go", "one", "and?", "two"]
    sound(session)


async def test_a_turn_that_was_left_in_the_middle_is_in_the_transcript(autojump_clock) -> None:
    """A handler gave up waiting after an engine had interrupted the turn; what was said by then was said."""

    class Hangs(ScriptedLease):
        async def generate(self, request: GenerationRequest, door: Door | None = None) -> Generation:
            if len(self.requests) == 1:
                self.requests.append(request)
                await trio.sleep_forever()
            return await super().generate(request, door)

    for goes_on in (False, True):
        session = await opened(Hangs(partly("half"), "rest<|im_end|>"))
        with trio.move_on_after(5):
            await session.turn()
        if not goes_on:
            await session.observe([user("hurry up")])
        said = ["halfrest"] if goes_on else ["half", "hurry up", "rest"]
        assert (await session.turn()).content == said[-1]
        assert [message.content for message in session.transcript] == ["s", "go", *said]
        sound(session)
