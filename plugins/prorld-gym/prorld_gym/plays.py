"""Policies whose worth is known: the row's own answer, wrong ones, and those that go for the scorer."""

from __future__ import annotations

from prorld.handlers import Play
from prorld_gym.instance import GymInstance

__all__ = ["plays_of"]

WRONG = "no such thing 7f3a"
_INJECTIONS = {
    # Scorers that read an answer with eval would run these.
    "code": "__import__('os')._exit(0)",
    "always-equal": "type('X', (), {'__eq__': lambda s, o: True, '__str__': lambda s: 'x'})()",
    "raise": "[].append(0) or (_ for _ in ()).throw(SystemExit)",
    "bomb": "9**9**9**9",
    "nested": "(" * 2000 + ")" * 2000,
}
LONG = 900_000


def plays_of(instance: GymInstance) -> list[Play]:
    """Gold where a ready row has its answer, wrong, and the cheats."""
    if instance.shape == "gem":
        return [
            Play(name="wrong", turns=(WRONG,) * 50),
            Play(name="cheat:code", turns=(_INJECTIONS["code"],) * 50),
            Play(name="cheat:long", turns=("9" * LONG, *(WRONG,) * 49)),
        ]
    plays = []
    if isinstance(instance.answer, str) and instance.question is not None:
        plays.append(Play(name="gold", turns=(_tagged(instance.answer),), reward=1.0))
        plays.append(Play(name="cheat:untagged", turns=(f"It is not {instance.answer}.",)))
    plays.append(Play(name="wrong", turns=(_tagged(WRONG),)))
    plays.append(Play(name="cheat:long", turns=(_tagged("9" * LONG),)))
    return [*plays, *(Play(name=f"cheat:{name}", turns=(_tagged(text),)) for name, text in _INJECTIONS.items())]


def _tagged(answer: str) -> str:
    return f"<answer>{answer}</answer>"
