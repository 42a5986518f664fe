"""Rows of public sets, made into instances. A row that is no task with a checkable answer yields none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["aime24", "aime25", "competition", "dapo", "deepscaler", "eurus", "hmmt", "informal_minif2f", "verl"]

Instance = dict[str, Any]

_SHOWN = re.compile(r"Show that it is (?P<answer>.+?)\s*-/\s*$", re.DOTALL)
_LETTER = re.compile(r"^\\?(?:text|textbf|mathrm|bold)?\s*\{?\s*\(?[A-E]\)?\s*\}*\)?(?:[\s~]|\\(?=\s))*")
_WORDS = re.compile(r"\\text\s*\{|\\rightarrow")


def competition(row: Mapping[str, Any], _member: str) -> Iterator[Instance]:
    """NeMo Gym's competition problems: AIME 2024 and 2025, HMMT."""
    subset = _text(row, "subset_for_metrics") or "competition"
    yield from _made(_text(row, "question"), row.get("expected_answer"), subset, _text(row, "id"))


def aime24(row: Mapping[str, Any], member: str) -> Iterator[Instance]:
    """Those of AIME 2024."""
    yield from _of_subset(row, member, "aime24")


def aime25(row: Mapping[str, Any], member: str) -> Iterator[Instance]:
    """Those of AIME 2025."""
    yield from _of_subset(row, member, "aime25")


def hmmt(row: Mapping[str, Any], member: str) -> Iterator[Instance]:
    """Those of HMMT 2024 and 2025."""
    yield from _of_subset(row, member, "hmmt")


def informal_minif2f(row: Mapping[str, Any], _member: str) -> Iterator[Instance]:
    """Problems of miniF2F in words, where their statement ends in the answer; the formal proof is left alone."""
    told = _text(row, "informal_prefix").strip().removeprefix("/--").strip()
    found = _SHOWN.search(told)
    if found is None:
        return
    # Blanks and braces of the printer's, which math-verify can't read.
    answer = found["answer"].replace("~", " ").replace("\\quad", " ").replace("{-}", "-").strip().rstrip(".").strip()
    if _LETTER.match(answer):
        answer = _LETTER.sub("", answer).strip()
    # A letter alone names a choice, and words are nothing to be compared with.
    if not answer or _WORDS.search(answer) or answer.isalpha():
        return
    yield from _made(told[: found.start()].strip(), answer, "minif2f", _text(row, "name"))


def deepscaler(row: Mapping[str, Any], _member: str) -> Iterator[Instance]:
    """DeepScaleR: problem, answer, solution."""
    yield from _made(_text(row, "problem"), row.get("answer"), "deepscaler", "")


def verl(row: Mapping[str, Any], _member: str) -> Iterator[Instance]:
    """Mathematics in verl's form, AIME for one: a chat prompt, and the answer in ``reward_model``."""
    yield from _of_verl(row, _text(row, "data_source") or "aime")


def dapo(row: Mapping[str, Any], _member: str) -> Iterator[Instance]:
    """DAPO-Math-17k: verl's form; its prompts ask for a last line ``Answer:``, which is understood."""
    yield from _of_verl(row, _text(row, "data_source") or "math_dapo")


def eurus(row: Mapping[str, Any], _member: str) -> Iterator[Instance]:
    """The mathematical rows of Eurus-2-RL-Data; its code is for another handler."""
    if _text(row, "ability").lower() == "math":
        yield from _of_verl(row, _text(row, "data_source") or "numina_math")


def _of_subset(row: Mapping[str, Any], member: str, beginning: str) -> Iterator[Instance]:
    if _text(row, "subset_for_metrics").startswith(beginning):
        yield from competition(row, member)


def _of_verl(row: Mapping[str, Any], source: str) -> Iterator[Instance]:
    messages = row.get("prompt")
    model = row.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, Mapping) else None
    if isinstance(truth, list) and len(truth) == 1:
        truth = truth[0]
    if isinstance(messages, str):
        yield from _made(messages, truth, source, "")
        return
    if not isinstance(messages, list) or not messages or not _is_answer(truth):
        return
    said = [{"role": _text(one, "role"), "content": _text(one, "content")} for one in messages]
    if any(one["role"] not in {"system", "user"} or not one["content"] for one in said) or said[-1]["role"] != "user":
        return
    yield {"data_source": source, "prompt": said, "answer": truth}


def _made(problem: str, answer: object, source: str, name: str) -> Iterator[Instance]:
    if not problem or not _is_answer(answer):
        return
    made = {"data_source": source, "problem": problem, "answer": answer}
    yield {**made, "id": name} if name else made


def _is_answer(answer: object) -> bool:
    if isinstance(answer, str):
        return bool(answer.strip())
    return isinstance(answer, int | float) and not isinstance(answer, bool)


def _text(row: Mapping[str, Any], field: str) -> str:
    value = row.get(field)
    return value if isinstance(value, str) else ""
