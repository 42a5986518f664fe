"""A branch in messages: every token is in exactly one of them, and what was sampled stands by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prorld.domain.branch import Branch, VersionSpan
from prorld.domain.calls import CallRecord
from prorld.domain.messages import CallStatus, Message, ToolCall, user
from prorld.domain.outcome import Outcome, OutcomeKind
from prorld.export.prorl import critical_error, messages_of
from prorld.wire.compat import CompatMessage, CompatTiming
from prorld.wire.trajectory import BranchDoc, branch_doc


def call(n: int, turn: int) -> CallRecord:
    """An engine call."""
    return CallRecord(
        n=n, turn=turn, branch=0, backend="b-1", policy_versions=[], prompt_len=0, sampled_len=0,
        finish_reason="stop", latency_s=0.0,
    )  # fmt: skip


class Maker:
    """Grows a branch whose tokens count up, so that none can stand for another."""

    def __init__(self) -> None:
        self.branch = Branch()
        self.calls: list[CallRecord] = []

    def ids(self, count: int) -> list[int]:
        """The next tokens."""
        return list(range(len(self.branch), len(self.branch) + count))

    def given(self, count: int, message: Message | None, source: str = "observation") -> None:
        """Tokens of a message, or of the template."""
        self.branch.append_given(self.ids(count), "glue" if message is None else source, message)  # type: ignore[arg-type]

    def sampled(self, count: int, turn: int, *, ends: bool = True, tool_calls: list[ToolCall] | None = None) -> None:
        """A call's tokens; a turn that was interrupted has several calls."""
        ids = self.ids(count)
        said = Message(role="assistant", content=f"turn {turn}", tool_calls=tool_calls or [])
        self.calls.append(call(len(self.calls), turn))
        self.branch.append_sampled(
            ids, [-0.5 - n for n in ids], [VersionSpan(start=0, end=count)],
            calls=[len(self.calls) - 1], message=said if ends else None, finish_reason="stop" if ends else "abort",
        )  # fmt: skip

    def made(self) -> tuple[BranchDoc, list[CompatMessage]]:
        """The branch and its messages."""
        document = branch_doc(self.branch)
        return document, messages_of(document, self.calls)


def test_the_template_between_messages_belongs_to_what_was_given():
    """After a given message it ends that one, after a turn it begins the next."""
    maker = Maker()
    maker.given(3, user("question"), "prompt")
    maker.given(2, None)
    maker.sampled(4, 0)
    maker.given(1, None)
    maker.given(3, user("more"))
    maker.given(2, None)
    maker.sampled(2, 1)
    _, messages = maker.made()
    assert [len(message.token_ids) for message in messages] == [5, 4, 6, 2]
    assert [message.role for message in messages] == ["user", "assistant", "user", "assistant"]


def test_a_turn_that_was_interrupted_is_one_message():
    """Its calls are put together; its prompt is that of the first."""
    maker = Maker()
    maker.given(3, user("question"), "prompt")
    maker.sampled(2, 0, ends=False)
    maker.sampled(3, 0)
    maker.sampled(1, 1, ends=False)
    _, messages = maker.made()
    assert [(len(message.token_ids), message.content) for message in messages[1:]] == [(5, "turn 0"), (1, "")]
    assert messages[1].input_ids == [0, 1, 2]
    assert len(messages[1].logprobs) == 5


def test_an_example_in_the_prompt_was_not_sampled():
    """An assistant's message that is given has no log-probabilities, which tells it from a turn."""
    maker = Maker()
    maker.given(3, Message(role="assistant", content="an example"), "prompt")
    _, (message,) = maker.made()
    assert (message.role, message.logprobs, message.input_ids) == ("assistant", [], [])


def test_calls_that_can_not_be_parsed_are_no_calls():
    """Calls of tools are told by name and arguments; what is none is in the text alone."""
    maker = Maker()
    maker.given(1, user("question"), "prompt")
    calls = [
        ToolCall(id="1", name="bash", arguments={"command": "ls"}),
        ToolCall(id="2", name="bash", status=CallStatus.INVALID_JSON, raw="{"),
    ]
    maker.sampled(2, 0, tool_calls=calls)
    _, messages = maker.made()
    assert isinstance(messages[1].tool_calls, list)
    assert [(one.name, one.arguments) for one in messages[1].tool_calls] == [("bash", {"command": "ls"})]


@given(st.lists(st.tuples(st.sampled_from(["given", "glue", "turn", "part"]), st.integers(0, 3)), max_size=24))
def test_joined_messages_are_the_branch(steps: list[tuple[str, int]]):
    """Whatever a branch is made of: nothing is lost, nothing twice, and turns know their prompts."""
    maker, turn = Maker(), 0
    for what, count in steps:
        if what in ("given", "glue"):
            maker.given(count, user("x") if what == "given" else None)
        else:
            maker.sampled(count, turn, ends=what == "turn")
            turn += what == "turn"
    document, messages = maker.made()
    joined: list[int] = []
    for message in messages:
        if message.logprobs:
            assert message.input_ids == joined
            assert message.logprobs == document.logprobs[len(joined) : len(joined) + len(message.token_ids)]
            assert all(document.mask[len(joined) : len(joined) + len(message.token_ids)])
        joined += message.token_ids
    assert joined == document.token_ids
    assert sum(len(message.logprobs) for message in messages) == sum(document.mask)


def test_every_end_has_its_name():
    """The nine outcomes, in the words of the original."""
    timing = CompatTiming(
        init_time=0, run_time=0, eval_time=0, others_time=0, counted_elapsed=0, timeout_triggered=False
    )
    late = CompatTiming(init_time=0, run_time=0, eval_time=0, others_time=0, counted_elapsed=0, timeout_triggered=True)
    named = {kind: critical_error(Outcome(kind=kind, stage="run"), timing) for kind in OutcomeKind}
    assert named == {
        OutcomeKind.OK: None, OutcomeKind.POLICY_LIMIT: None, OutcomeKind.TIMEOUT: "run", OutcomeKind.ENV_ERROR: "run",
        OutcomeKind.LLM_ERROR: "run", OutcomeKind.HANDLER_ERROR: "run", OutcomeKind.GRADER_ERROR: "run",
        OutcomeKind.CANCELLED: "cancelled", OutcomeKind.LOST: "run",
    }  # fmt: skip
    assert critical_error(Outcome(kind=OutcomeKind.TIMEOUT, stage="run"), late) == "timeout"
    assert critical_error(Outcome(kind=OutcomeKind.GRADER_ERROR), timing) == "eval"
