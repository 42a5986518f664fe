"""Keeps what a policy answers from being run as a program by scorers that read it with ``eval``.

Some scorers of reasoning-gym hand the answer to ``eval``, or to ``parse_expr`` of sympy, which is ``eval`` again. In
their process these become readers of plain values and formulas; the files of the environments are not changed. Standard
library only: it is also loaded by interpreters that have nothing of prorld.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["Refused", "guard", "leave_out_drawing", "plain_value"]

LENGTH_MAX = 20_000
EXPONENT_MAX = 10_000
_NODES = (
    ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Load, ast.UnaryOp, ast.USub, ast.UAdd,
    ast.Invert, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.BitAnd, ast.BitOr,
    ast.BitXor, ast.LShift, ast.RShift,
)  # fmt: skip
_FORMULA = re.compile(r"[\w\s+\-*/^().,=|]*", re.ASCII)
_WORD = re.compile(r"[^\W\d]\w*", re.ASCII)
_FUNCTIONS = frozenset({
    "Abs", "C", "E", "I", "Integer", "Rational", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh",
    "cot", "csc", "erf", "exp", "ln", "log", "oo", "pi", "sec", "sin", "sinh", "sqrt", "tan", "tanh",
})  # fmt: skip


class Refused(ValueError):
    """An answer that is no plain value or formula."""


def plain_value(source: Any, *_spaces: Any) -> Any:
    """What ``eval`` gives for values and arithmetic; anything with a name, a call or an attribute is refused."""
    if not isinstance(source, str):
        raise Refused("only text is read")
    if len(source) > LENGTH_MAX:
        raise Refused("too long")
    try:
        tree = ast.parse(source.strip(), mode="eval")
        for node in ast.walk(tree):
            if not isinstance(node, _NODES):
                raise Refused(f"{type(node).__name__} is no plain value")
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow | ast.LShift):
                _small(node.right)
    except (SyntaxError, RecursionError, MemoryError) as exc:
        raise Refused("it can't be read") from exc
    # Nothing but constants and arithmetic is left in it.
    return builtins.eval(compile(tree, "<answer>", "eval"), {"__builtins__": {}})  # noqa: S307


def _small(node: ast.expr) -> None:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, int) or abs(node.value) > EXPONENT_MAX:
        raise Refused("an exponent that is too large")


def guard() -> None:
    """Put the readers in place of ``eval`` and ``parse_expr``, in whatever was imported of the libraries so far."""
    parser = sys.modules.get("sympy.parsing.sympy_parser")
    original = getattr(parser, "parse_expr", None)
    guarded = None if original is None or hasattr(original, "guarded") else _formula_reader(original)
    for name in list(sys.modules):
        module = sys.modules.get(name)
        if module is None or not name.startswith(("reasoning_gym", "sympy")):
            continue
        space = vars(module)
        if name.startswith("reasoning_gym"):
            space["eval"] = plain_value
        if guarded is not None and space.get("parse_expr") is original:
            space["parse_expr"] = guarded


def _formula_reader(original: Any) -> Any:
    def parse_expr(text: Any, local_dict: Any = None, *args: Any, **kwargs: Any) -> Any:
        text = str(text)
        if len(text) > LENGTH_MAX or not _FORMULA.fullmatch(text) or "__" in text:
            raise Refused("no formula")
        known = set(local_dict or ())
        for word in _WORD.findall(text):
            if len(word) > 1 and word not in _FUNCTIONS and word not in known:
                raise Refused(f"{word} is no part of a formula")
        # A point is for decimals; after a name or a bracket it would reach into what is there.
        if re.search(r"[^\W\d]\w*\s*\.|[)\]]\s*\.|\.\s*[^\W\d]", text, re.ASCII):
            raise Refused("no formula")
        return original(text, local_dict, *args, **kwargs)

    parse_expr.guarded = True  # type: ignore[attr-defined]
    return parse_expr


class _Nothing:
    """Stands for whatever a library of drawings has."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        return

    def __getattr__(self, name: str) -> Any:
        return _Nothing()

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        return _Nothing()


class _NoDrawing(MetaPathFinder, Loader):
    """Finds matplotlib, and nothing in it."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname.partition(".")[0] not in {"matplotlib", "mpl_toolkits"}:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        def anything(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _Nothing

        vars(module)["__getattr__"] = anything


def leave_out_drawing() -> None:
    """Import matplotlib as an empty one from here on: libraries of texts import it, and it wants to write files."""
    if not any(isinstance(finder, _NoDrawing) for finder in sys.meta_path):
        sys.meta_path.insert(0, _NoDrawing())
