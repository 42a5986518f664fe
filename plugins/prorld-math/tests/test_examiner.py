"""Who is to blame where a comparison gives out: the answer, the right answer, or the machine; and a reward server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import h11
import pytest
import trio

from prorld.domain.job import AgentLimits
from prorld.errors import GraderError
from prorld.handlers import open_grader
from prorld.testing.jobs import run_handler
from prorld_math.examiner import Examiner
from prorld_math.handler import MathConfig, MathHandler
from prorld_math.paper import MathPaper, MathVerdict

INSTANCE = {"problem": "Expand it.", "answer": "x+1", "data_source": "aime_2024"}
NO_TOOLS = AgentLimits(tools=[])


class Grader:
    """A grader that ends as it is told to, by what it grades."""

    def __init__(self, ends: Callable[[MathPaper], str]) -> None:
        self.ends = ends
        self.graded: list[MathPaper] = []

    async def grade(self, paper: MathPaper) -> MathVerdict:
        await trio.lowlevel.checkpoint()
        self.graded.append(paper)
        end = self.ends(paper)
        if end in ("right", "wrong"):
            return MathVerdict(correct=end == "right", answer="x", how="value")
        raise GraderError("it ended", code=end)


PAPER = MathPaper(said="\\boxed{bomb}", gold="34")


def bomb(code: str, on_gold: str) -> Callable[[MathPaper], str]:
    return lambda paper: code if "bomb" in paper.said else on_gold


@pytest.mark.parametrize("code", ["grader_crashed", "grader_failed"])
async def test_an_answer_that_uses_the_grader_up_is_wrong(code: str):
    """It does so twice, and the right answer does not."""
    grader = Grader(bomb(code, "right"))
    verdict = await Examiner(grader).judge(PAPER)  # type: ignore[arg-type]
    assert (verdict.correct, verdict.how) == (False, "exhausting")
    assert [paper.said for paper in grader.graded] == ["\\boxed{bomb}", "\\boxed{bomb}", "\\boxed{34}"]
    assert grader.graded[-1].by_value


@pytest.mark.parametrize("on_gold", ["grader_crashed", "grader_failed", "grader_timeout", "wrong"])
async def test_a_right_answer_that_can_not_be_compared_is_an_error(on_gold: str):
    """Nothing is said about the policy."""
    with pytest.raises(GraderError) as caught:
        await Examiner(Grader(bomb("grader_crashed", on_gold))).judge(PAPER)  # type: ignore[arg-type]
    assert caught.value.stable_code == "grader_crashed"


@pytest.mark.parametrize("code", ["grader_timeout", "grader_lost", "grader_not_started"])
async def test_what_is_the_machines_stays_an_error(code: str):
    """A wait is no computing: a busy machine makes nobody wrong."""
    grader = Grader(bomb(code, "right"))
    with pytest.raises(GraderError):
        await Examiner(grader).judge(PAPER)  # type: ignore[arg-type]
    assert len(grader.graded) == 1


async def test_once_is_no_proof():
    """The second time it ends well."""
    ends = iter(["grader_crashed", "right"])
    verdict = await Examiner(Grader(lambda _: next(ends))).judge(PAPER)  # type: ignore[arg-type]
    assert verdict.correct


@pytest.mark.slow
async def test_real_bombs_are_wrong_within_their_limits():
    """Those that no pattern tells: their computing is ended by the kernel, or their memory is."""
    answers = [r"(x+y+z+w+v)^{300}", r"\binom{10^{9}}{5*10^{8}}", r"\prod_{n=1}^{99999} (1+\frac{1}{n^2})"]
    async with open_grader("prorld_math.grading:grade", MathVerdict, children=1, limit_s=60.0) as grader:
        examiner = Examiner(grader)
        for answer in answers:
            paper = MathPaper(said=f"\\boxed{{{answer}}}", gold="x+1", cpu_s=1.0)
            verdict = await examiner.judge(paper)
            assert not verdict.correct, answer


@asynccontextmanager
async def reward_server(reply: bytes, status: int = 200) -> AsyncIterator[tuple[str, list[Any]]]:
    """A listener that answers every score alike; its address, and what it was asked."""
    asked: list[Any] = []

    async def serve(stream: trio.abc.Stream) -> None:
        connection = h11.Connection(h11.SERVER)
        body = b""
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                connection.receive_data(bytes(await stream.receive_some(65536)))
            elif isinstance(event, h11.Data):
                body += event.data
        asked.append(json.loads(body))
        headers = [("Content-Length", str(len(reply))), ("Connection", "close")]
        answer = h11.Response(status_code=status, headers=headers)
        sent = [connection.send(one) for one in (answer, h11.Data(data=reply), h11.EndOfMessage())]
        await stream.send_all(b"".join(piece or b"" for piece in sent))
        await trio.aclose_forcefully(stream)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        yield f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}", asked
        nursery.cancel_scope.cancel("the block has ended")


async def test_a_reward_server_grades_in_the_place_of_all_else():
    """Its score is the reward; it is told the whole of what was said."""
    async with reward_server(b'{"score": 0.25}') as (address, asked):
        handler = MathHandler(MathConfig(reward_server=address))
        async with handler.open():
            run = await run_handler(handler, INSTANCE, turns=[r"So \boxed{x+1}."], limits=NO_TOOLS)
    assert run.grade.reward == 0.25
    assert run.grade.parts == {"score": 0.25, "answered": 1.0}
    assert asked == [{"solution_str": r"So \boxed{x+1}.", "ground_truth": "x+1", "data_source": "aime_2024"}]


async def test_a_reward_server_in_trouble_is_no_zero():
    """It has not graded."""
    async with reward_server(b"{}", 503) as (address, _):
        handler = MathHandler(MathConfig(reward_server=address))
        async with handler.open():
            with pytest.RaisesGroup(GraderError):
                await run_handler(handler, INSTANCE, turns=[r"\boxed{x+1}"], limits=NO_TOOLS)
