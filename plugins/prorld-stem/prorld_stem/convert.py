"""Rows of public sets, made into instances. A row that is no question with one checkable answer yields none."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

__all__ = ["big_bench", "evals_choice", "evals_short", "mcqa", "open_question", "scp116k", "verl"]

Instance = dict[str, Any]

LETTERS: Final = "ABCDEFGHIJ"
TEXT_CHARS: Final = 100_000

_OPTION = re.compile(r"^\s*\(?(?P<letter>[A-Ja-j])(?:[.):]|\))\s*(?P<text>\S.*?)\s*$", re.MULTILINE)
_ASKED_AGAIN = re.compile(r"\s*(?:Answer|Antwort|Réponse|Respuesta)\s*:\s*$")
_BRACKETED = re.compile(r"\[([^\[\]]+)\]")
_RIGHT = (
    re.compile(r"^\s*\[?\(?([A-Ja-j])\)?\]?\s*$"),
    re.compile(r"^\s*\(?([A-Ja-j])[.):]\s"),
    re.compile(r"(?:answer|option) is \(?([A-J])\)?\s*\.?$"),
)


class _Task(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a task of BIG-bench."""

    name: str = "big-bench"
    task_prefix: str = ""
    examples: list[dict[str, Any]] = []


def mcqa(row: Mapping[str, Any], member: str) -> Iterator[Instance]:
    """NeMo Gym's multiple choice, mcqa and gpqa: the question is taken out of the prompt that lists its options."""
    told = _last_user(row.get("responses_create_params"))
    listed = row.get("options")
    letter = row.get("expected_answer")
    if not told or not isinstance(listed, list) or not isinstance(letter, str):
        return
    texts = [text for one in listed if isinstance(one, Mapping) for text in one.values() if isinstance(text, str)]
    first = re.search(r"^\s*A: ", told, re.MULTILINE)
    question = told[: first.start()].strip() if first is not None else ""
    source = "gpqa" if "gpqa" in member else "mcqa"
    yield from _choice(question, texts, letter, source, _text(row, "uuid"))


def evals_choice(row: Mapping[str, Any], member: str) -> Iterator[Instance]:
    """Exams of evals: options on lines of their own in the last message, and a letter as the ideal answer."""
    told = _last_message(row)
    # The list is the last run of letters from A on: a passage before it may begin lines in the same way.
    found = list(_OPTION.finditer(told))
    starts = [number for number, one in enumerate(found) if one["letter"].upper() == "A"]
    if not starts:
        return
    run = found[starts[-1] :]
    if [one["letter"].upper() for one in run] != list(LETTERS[: len(run)]):
        return
    between = [told[one.end() : after.start()].strip() for one, after in itertools.pairwise(run)]
    rest = _ASKED_AGAIN.sub("", told[run[-1].end() :]).strip()
    letter = _letter(row.get("ideal"))
    if letter is None or rest or any(between):
        return
    source = member.rsplit("/", 2)[-2] if member.count("/") else "evals"
    yield from _choice(told[: run[0].start()].strip(), [one["text"] for one in run], letter, f"exams-{source}", "")


def evals_short(row: Mapping[str, Any], _member: str) -> Iterator[Instance]:
    """Questions of evals with one short ideal answer; the system message says in what form it is wanted."""
    ideal = row.get("ideal")
    if isinstance(ideal, list) and len(ideal) == 1:
        ideal = ideal[0]
    told = _last_message(row)
    if not isinstance(ideal, str) or not ideal.strip() or not told.strip():
        return
    rules = _first_system(row)
    # Where the answer is asked for in brackets it stands in brackets; here it goes into a box.
    bare = found[1] if (found := _BRACKETED.fullmatch(ideal.strip())) is not None else ideal.strip()
    yield {"data_source": "stem", "question": f"{rules}\n\n{told}".strip(), "answer": bare}


def open_question(row: Mapping[str, Any], _member: str) -> Iterator[Instance]:
    """NeMo Gym's questions for a judge: question and expected_answer, or a prompt and expected_answer."""
    question = _text(row, "question") or _last_user(row.get("responses_create_params"))
    answer = _text(row, "expected_answer").strip()
    if question and answer:
        yield {"data_source": "stem", "question": question, "answer": answer}


def scp116k(row: Mapping[str, Any], _member: str) -> Iterator[Instance]:
    """SCP-116K: a problem and the solution that was matched to it."""
    problem = _text(row, "problem").strip()
    solution = (_text(row, "matched_solution") or _text(row, "extracted_solution") or _text(row, "solution")).strip()
    if problem and solution and len(solution) <= 20_000:
        yield {"data_source": "scp116k", "problem": problem, "answer": solution, "domain": _text(row, "domain")[:200]}


def verl(row: Mapping[str, Any], _member: str) -> Iterator[Instance]:
    """Questions in verl's form: a prompt, and the answer in ``reward_model``."""
    model = row.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, Mapping) else None
    told = row.get("prompt")
    question = told if isinstance(told, str) else _last_message({"input": told})
    if question and isinstance(truth, str | int | float) and not isinstance(truth, bool) and str(truth).strip():
        yield {"data_source": "stem", "question": question, "answer": truth}


def big_bench(data: bytes, _member: str) -> Iterator[Instance]:
    """A task of BIG-bench with scored options; those with exactly one right one."""
    task = msgspec.json.decode(data, type=_Task)
    for number, example in enumerate(task.examples):
        scores = example.get("target_scores")
        asked = example.get("input")
        if not isinstance(scores, Mapping) or not isinstance(asked, str):
            continue
        right = [place for place, score in enumerate(scores.values()) if score == 1]
        if len(right) == 1 and right[0] < len(LETTERS):
            question = f"{task.task_prefix}{asked}".strip()
            name = f"{task.name}-{number}"
            yield from _choice(question, list(scores), LETTERS[right[0]], f"exams-{task.name}", name)


def _choice(question: str, options: Sequence[str], letter: str, source: str, name: str) -> Iterator[Instance]:
    letter = letter.strip().upper()
    known = 2 <= len(options) <= len(LETTERS) and all(option.strip() for option in options)
    # Two options that read the same can't both be wrong and right.
    told_apart = len({" ".join(option.split()) for option in options}) == len(options)
    if not question or len(question) > TEXT_CHARS or not known or not told_apart:
        return
    if len(letter) != 1 or letter not in LETTERS[: len(options)]:
        return
    made = {"data_source": source, "question": question, "options": list(options), "answer": letter}
    yield {**made, "id": name} if name else made


def _letter(ideal: object) -> str | None:
    for one in ideal if isinstance(ideal, list) else [ideal]:
        for pattern in _RIGHT:
            if isinstance(one, str) and (found := pattern.search(one)) is not None:
                return found[1].upper()
    return None


def _last_user(params: object) -> str:
    return _last_message(params) if isinstance(params, Mapping) else ""


def _last_message(row: Mapping[str, Any]) -> str:
    said = row.get("input")
    if isinstance(said, str):
        return said
    for one in reversed(said) if isinstance(said, list) else ():
        if isinstance(one, Mapping) and one.get("role") in {"user", None}:
            return _text(one, "content")
    return ""


def _first_system(row: Mapping[str, Any]) -> str:
    said = row.get("input")
    first = said[0] if isinstance(said, list) and said else None
    return _text(first, "content") if isinstance(first, Mapping) and first.get("role") == "system" else ""


def _text(row: Mapping[str, Any], field: str) -> str:
    value = row.get(field)
    return value if isinstance(value, str) else ""
