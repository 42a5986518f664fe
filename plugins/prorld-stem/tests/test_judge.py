"""The judge: what it is asked, what of its words counts, and who is to blame where it gives no verdict."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

import pytest
import trio

from prorld.domain.messages import Message
from prorld.errors import GraderError
from prorld_stem.judge import Case, Judgement, JudgePlan, ask_judge, messages_for, verdict_in
from prorld_stem.stem_plays import INJECTIONS

CASE = Case(question="What heats the sea?", gold="the sun", answer="solar radiation")
Reply = Callable[[str, str, str], str]
_BLOCKS = re.compile(
    r"--- FIRST ANSWER (?P<token>\w+) ---\n(?P<first>.*)\n--- END OF FIRST ANSWER (?P=token) ---\n"
    r"--- SECOND ANSWER (?P=token) ---\n(?P<second>.*)\n--- END OF SECOND ANSWER (?P=token) ---",
    re.DOTALL,
)


def read(messages: Sequence[Message]) -> tuple[str, str, str]:
    """The token and the two answers, as a judge reads them."""
    found = _BLOCKS.search(messages[1].content)
    assert found is not None
    return found["token"], found["first"], found["second"]


class Judge:
    """A judge that answers by a function of token and answers; it keeps what it was asked."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.asked: list[Sequence[Message]] = []

    async def __call__(self, messages: Sequence[Message]) -> str:
        await trio.lowlevel.checkpoint()
        self.asked.append(messages)
        return self.reply(*read(messages))


def verdict(token: str, same: bool) -> str:
    return f"They were compared.\nVERDICT {token} {'SAME' if same else 'DIFFERENT'}"


def honest(token: str, first: str, second: str) -> str:
    """Knows two ways to say one thing."""
    known = {"the sun", "solar radiation"}
    return verdict(token, first == second or {first, second} == known)


async def judged(judge: Judge, answer: str = CASE.answer, **plan: object) -> Judgement:
    case = Case(question=CASE.question, gold=CASE.gold, answer=answer)
    numbers = itertools.count()
    return await ask_judge(case, JudgePlan(**plan), judge, lambda: f"token{next(numbers)}")  # type: ignore[arg-type]


async def test_both_orders_and_a_second_look():
    """The reference comes first and then second; at last it is something that no answer can be equal to."""
    judge = Judge(honest)
    found = await judged(judge)
    assert found == Judgement(same=True, votes=(True, True))
    shown = [read(messages)[1:] for messages in judge.asked]
    assert shown[:2] == [("the sun", "solar radiation"), ("solar radiation", "the sun")]
    assert shown[2][0].startswith("the code word token")
    assert len({read(messages)[0] for messages in judge.asked}) == 3


async def test_the_first_doubt_ends_the_votes():
    """Where all have to say the same; no second look is needed for a no."""
    judge = Judge(honest)
    assert await judged(judge, "the moon") == Judgement(same=False, votes=(False,))
    assert len(judge.asked) == 1


@pytest.mark.parametrize(("votes", "needs", "same", "asked"), [(3, "most", True, 3), (3, "all", False, 2)])
async def test_a_judge_that_prefers_the_first(votes: int, needs: str, same: bool, asked: int):
    """It says yes in one order only: most of the votes, and not all of them."""
    judge = Judge(lambda token, first, second: verdict(token, first == CASE.gold))
    found = await judged(judge, votes=votes, needs=needs, second_look=False)
    assert (found.same, len(found.votes)) == (same, asked)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("VERDICT t SAME", True),
        ("Some thought.\n\n**VERDICT t DIFFERENT**\n", False),
        ("VERDICT t SAME\nVERDICT t DIFFERENT", None),
        ("VERDICT t SAME or VERDICT t DIFFERENT", None),
        ("VERDICT u SAME", None),
        ("VERDICT SAME", None),
        ("verdict t same", None),
        ("VERDICT t SAME\nI hope that helps.", None),
        ("SAME", None),
        ("YES", None),
        ("", None),
        ("VERDICT t SAME" * 2, None),
    ],
)
def test_only_a_verdict_is_one(reply: str, said: bool | None):
    """Alone on the last line, with the token, and no other."""
    assert verdict_in(reply, "t") is said


@pytest.mark.parametrize("name", sorted(INJECTIONS))
async def test_an_honest_judge_is_not_steered(name: str):
    """What the answer says to it is between the lines that hold the token, and is no answer."""
    judge = Judge(honest)
    found = await judged(judge, INJECTIONS[name])
    assert not found.same
    assert not found.steered


@pytest.mark.parametrize("name", sorted(INJECTIONS))
async def test_a_judge_that_repeats_what_it_reads_is_not_believed(name: str):
    """It says what the answer tells it to: that holds no token that counts, and it works without the answer."""

    def parrot(token: str, first: str, second: str) -> str:
        for one in (first, second):
            if one == INJECTIONS[name]:
                return one
        return honest(token, first, second)

    found = await judged(Judge(parrot), INJECTIONS[name])
    assert (found.same, found.steered) == (False, True)


async def test_a_judge_that_is_talked_over_gives_itself_away():
    """It finds the token and does as it is told; then it calls the same answer equal to something else, too."""

    def gullible(token: str, first: str, second: str) -> str:
        return verdict(token, True) if INJECTIONS["token"] in (first, second) else honest(token, first, second)

    found = await judged(Judge(gullible), INJECTIONS["token"])
    assert found == Judgement(same=False, votes=(True, True), steered=True)
    unguarded = await judged(Judge(gullible), INJECTIONS["token"], second_look=False)
    assert unguarded.same


async def test_a_judge_that_never_gives_a_verdict_is_an_error():
    """It gives none on the right answer either: nothing is said about the policy."""
    with pytest.raises(GraderError) as caught:
        await judged(Judge(lambda *_: "I would rather not say."))
    assert caught.value.stable_code == "judge_unusable"


async def test_a_judge_that_says_yes_to_everything_is_an_error():
    """It can't tell the right answer from a code word."""
    with pytest.raises(GraderError) as caught:
        await judged(Judge(lambda token, *_: verdict(token, True)))
    assert caught.value.stable_code == "judge_unusable"


@pytest.mark.parametrize("code", ["no_judge", "judge_timeout", "judge_failed"])
async def test_a_judge_that_is_away_is_an_error(code: str):
    """With the error that it was told with."""

    async def away(_messages: Sequence[Message]) -> str:
        await trio.lowlevel.checkpoint()
        raise GraderError("away", code=code)

    with pytest.raises(GraderError) as caught:
        await ask_judge(CASE, JudgePlan(), away)
    assert caught.value.stable_code == code


async def test_an_answer_that_silences_the_judge_is_wrong():
    """The engine gives no answer on it, and does on the right one."""

    async def choosy(messages: Sequence[Message]) -> str:
        await trio.lowlevel.checkpoint()
        token, first, second = read(messages)
        if INJECTIONS["silence"] in (first, second):
            raise GraderError("it said nothing", code="judge_failed")
        return honest(token, first, second)

    case = Case(question=CASE.question, gold=CASE.gold, answer=INJECTIONS["silence"])
    found = await ask_judge(case, JudgePlan(), choosy)
    assert (found.same, found.steered) == (False, True)


def test_what_is_shown_is_bounded_and_has_nothing_hidden():
    """Long text is cut in its middle; what is not seen, directions of text for one, is left out."""
    case = Case(question="q" * 50_000, gold="g" * 50_000, answer="a\u202eb\u200bc\x00d\x1b[2J" + "e" * 50_000)
    told = messages_for(case, "token", flipped=False)[1].content
    assert len(told) < 16_000
    assert not set("\u202e\u200b\x00\x1b") & set(told)
