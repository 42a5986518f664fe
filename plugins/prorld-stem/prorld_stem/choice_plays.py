"""Policies whose reward on a multiple-choice question is known."""

from __future__ import annotations

from prorld.handlers import Play, tool_call
from prorld.handlers.cheats import search_for
from prorld_stem.choice_instance import GradingMode, Sheet

__all__ = ["choice_plays"]


def choice_plays(sheet: Sheet, mode: GradingMode, *, wrong: float = 0.0) -> list[Play]:
    """Those of one sheet, answering as its mode wants it; ``wrong`` is what a wrong answer is worth."""
    other = next(letter for letter in sheet.letters if letter != sheet.gold)
    several = ", ".join(sheet.letters)
    bad = {
        "wrong": (f"It must be this one.\n{_answer(other, mode)}",),
        "cheat:every-letter": (_answer(several, mode),),
        "cheat:every-option": (_answer("; ".join(sheet.options)[:5_000], mode),),
        "cheat:two-letters": (_answer(f"{sheet.gold} or {other}", mode),),
        "cheat:every-box": ("\n".join(_answer(letter, mode) for letter in [*sheet.letters, other]),),
        "cheat:no-such-letter": (_answer("Z" if len(sheet.options) < 26 else "?", mode),),
        "cheat:look-alike": (_answer(_look_alike(sheet.gold), mode),),
        "cheat:unmarked": (f"{sheet.gold}, {sheet.gold} and once more {sheet.gold}",),
        "cheat:environment": (
            tool_call("python", code=search_for(sheet.options[sheet.letters.index(sheet.gold)])),
            "It is what was printed.",
        ),
    }
    honest = Play(name="gold", turns=(f"One of them is right.\n{_answer(sheet.gold, mode)}",), reward=1.0)
    return [honest, *(Play(name=name, turns=turns, reward=wrong) for name, turns in bad.items())]


def _answer(text: str, mode: GradingMode) -> str:
    return f"Answer: {text}" if mode.startswith("lenient_answer_colon") else f"\\boxed{{{text}}}"


def _look_alike(letter: str) -> str:
    """A letter of another alphabet that looks the same to a reader, or a full-width one."""
    return {"A": "\u0410", "B": "\u0412", "C": "\u0421", "E": "\u0415", "H": "\u041d"}.get(
        letter, chr(ord(letter) + 0xFEE0)
    )
