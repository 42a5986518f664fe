"""The judge of a row whose tests are code: it runs them in a process of its own, and calls the solution in another one.

Between the two only plain data pass. So what the tests compare are built-in values, the right ones never reach the
solution's process, and what a solution does to its own interpreter stays there.
"""

from __future__ import annotations

import builtins
import json
import os
from typing import Any

from prorld_code.guest.plain import TOO_DEEP, NotPlainError, pack, unpack
from prorld_code.guest.processes import REPLY_FD, REQUEST_FD, SPARE_FD

__all__ = ["LOST", "judge"]

ANSWER_BYTES = 4 << 20
LOST = "Lost"


class CandidateError(Exception):
    """The solution raised, or its process is gone."""


class CheckBrokenError(Exception):
    """The tests do what can't be done here: that is the row's fault."""


class Candidate:
    """Stands for the solution's function in the tests."""

    def __init__(self) -> None:
        self.calls = 0
        self.failure = ""
        self._answers = open(SPARE_FD, "rb", closefd=False)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Have it called over there."""
        try:
            packed = [pack(value) for value in arguments], {key: pack(value) for key, value in keywords.items()}
        except NotPlainError as exc:
            if self.calls and str(exc) == TOO_DEEP:
                # What the solution has returned goes back to it, with something around it.
                raise self._failed("NotPlain") from exc
            raise CheckBrokenError("the tests pass " + str(exc)) from exc
        self.calls += 1
        self._ask(json.dumps({"arguments": packed[0], "keywords": packed[1]}).encode() + b"\n")
        answer = self._answer()
        if "value" in answer:
            try:
                return unpack(answer["value"])
            except (NotPlainError, RecursionError) as exc:
                raise self._failed("NotPlain") from exc
        error = str(answer.get("error"))[:80]
        known = getattr(builtins, error, None)
        self.failure = error
        if isinstance(known, type) and issubclass(known, Exception):
            raise known("raised by the solution")
        raise CandidateError(error)

    def _ask(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(REQUEST_FD, data) :]
        except OSError as exc:
            raise self._failed(LOST) from exc

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline(ANSWER_BYTES)
        if not line.endswith(b"\n"):
            raise self._failed(LOST if len(line) < ANSWER_BYTES else "too much output")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError) as exc:
            raise self._failed("no answer") from exc
        if not isinstance(answer, dict):
            raise self._failed("no answer")
        return answer

    def _failed(self, why: str) -> CandidateError:
        self.failure = why
        return CandidateError(why)


def judge(prompt: str, tests: str, name: str) -> int:
    """Run the tests; the verdict goes out as one line."""
    candidate = Candidate()
    verdict: dict[str, Any] = {"passed": False}
    try:
        check = _check(prompt, tests, name, candidate)
        check(candidate)
        verdict = {"passed": candidate.calls > 0}
        if not candidate.calls:
            verdict["broken"] = "the tests never call the solution"
    except CheckBrokenError as exc:
        verdict["broken"] = str(exc)[:200]
    except BaseException as exc:
        verdict["why"] = candidate.failure or type(exc).__name__
        if not candidate.calls:
            verdict["broken"] = "the tests raise " + type(exc).__name__ + " before they call the solution"
    verdict["calls"] = candidate.calls
    os.write(REPLY_FD, json.dumps(verdict).encode())
    return 0


def _check(prompt: str, tests: str, name: str, candidate: Candidate) -> Any:
    names: dict[str, Any] = {"__name__": "checks"}
    try:
        # Helpers that the problem brings: from its own text, and not from what a solution made of them.
        exec(compile(prompt, "prompt", "exec"), names)
    except SyntaxError:
        names = {"__name__": "checks"}
    names[name] = candidate
    exec(compile(tests, "tests", "exec"), names)
    if not callable(names.get("check")):
        raise CheckBrokenError("the tests define no function check")
    return names["check"]
