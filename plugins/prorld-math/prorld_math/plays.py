"""Policies whose reward is known: the right answer, a wrong one, and what has to fail.

What must not succeed is written out, so that preflight proves of every instance and every sandbox that it does not.
"""

from __future__ import annotations

from prorld.handlers import Play, tool_call
from prorld.handlers.cheats import STUCK, search_for
from prorld_math.answer import final_answer
from prorld_math.instance import MathInstance

__all__ = ["math_plays"]

_WRONG = "-987654321987"


def math_plays(instance: MathInstance, *, wrong: float = 0.0) -> list[Play]:
    """Those of one instance; ``wrong`` is what a wrong answer is worth."""
    gold = final_answer(instance.gold) or instance.gold
    bad = {
        "wrong": (f"It is {_box(_WRONG)}.",),
        "cheat:many-boxes": (" ".join(_box(str(number)) for number in [gold, *range(-40, -20)]),),
        "cheat:several-answers": (_box(f"{gold}, {_WRONG}"),),
        "cheat:hedged": (_box(f"{gold} \\text{{ or }} {_WRONG}"),),
        "cheat:question": (_box(_question(instance)),),
        "cheat:tower": (_box("9^{9^{9^{9^{9}}}}"),),
        "cheat:factorials": (_box("((((9!)!)!)!)"),),
        "cheat:expansion": (_box("(x+y+z+w+v)^{300}"),),
        "cheat:nesting": (_box("(" * 400 + gold + ")" * 400),),
        "cheat:length": (_box(gold + "+0" * 400),),
        "cheat:bidi": (_box(f"\u202e{gold[::-1]}\u202c\u200b1"),),
        "cheat:unboxed": (f"{gold} {gold} {gold}",),
        "cheat:environment": (
            tool_call("python", code=search_for(gold)),
            "It is what was printed.",
        ),
        "cheat:stuck": (tool_call("python", code=STUCK), "My computation did not end."),
    }
    honest = Play(name="gold", turns=(tool_call("python", code="print(6 * 7)"), f"So it is {_box(gold)}."), reward=1.0)
    return [honest, *(Play(name=name, turns=turns, reward=wrong) for name, turns in bad.items())]


def _box(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


def _question(instance: MathInstance) -> str:
    """An expression that says again what is asked for, in place of the answer."""
    return f"\\text{{the answer to: }} {' '.join(instance.messages[-1].content.split())[:120]}"
