"""One paper judged to its end: who is to blame where the comparison itself gives out, or what a reward server says."""

from __future__ import annotations

import msgspec

from prorld.handlers import Grader, GraderError
from prorld_math.paper import MathPaper, MathVerdict

__all__ = ["WAIT_FACTOR", "Examiner"]

# A grade may wait this many times as long as it may compute: a machine that is busy delays it, and is no one's doing.
WAIT_FACTOR = 12.0
# How a grade ends that used itself up: killed by the kernel for what it computed, or out of memory or stack.
_USED_UP = frozenset({"grader_crashed", "grader_failed"})
TRIES = 2


class Examiner:
    """Grades by math-verify in killable children."""

    def __init__(self, grader: Grader[MathVerdict]) -> None:
        self._grader = grader

    async def judge(self, paper: MathPaper) -> MathVerdict:
        """The verdict; ``GraderError`` where it says nothing about the answer.

        An answer that uses the comparison up every time, where the right answer compared with itself does not, is
        wrong: good answers are far from these limits, and a policy must not get out of its grade by such a one.
        """
        failure: GraderError | None = None
        for _ in range(TRIES):
            try:
                return await self._grader.grade(paper)
            except GraderError as exc:
                if exc.stable_code not in _USED_UP:
                    raise
                failure = exc
        assert failure is not None
        if not await self._reads(paper):
            raise failure
        return MathVerdict(correct=False, answer=None, how="exhausting")

    async def _reads(self, paper: MathPaper) -> bool:
        """Whether the right answer can be read and compared, within the same limits."""
        own = msgspec.structs.replace(paper, said=f"\\boxed{{{paper.gold}}}", by_value=True)
        try:
            verdict = await self._grader.grade(own)
        except GraderError:
            return False
        return verdict.correct
