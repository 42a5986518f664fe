"""Bugs within expressions: each operator finds the places where it could have happened, and says how it would look."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from prorld_swe.factory.edits import Edit, Source

__all__ = ["EXPRESSION_OPERATORS", "Found", "expression_bugs"]

Found = tuple[str, ast.expr | ast.stmt, tuple[Edit, ...]]

_COMPARE: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),  # codespell:ignore notin
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "%"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
_METHODS = {
    "startswith": "endswith", "endswith": "startswith", "lstrip": "rstrip", "rstrip": "lstrip", "find": "rfind",
    "rfind": "find", "split": "rsplit", "rsplit": "split", "partition": "rpartition", "rpartition": "partition",
    "appendleft": "append", "popleft": "pop", "lower": "upper", "upper": "lower", "keys": "values",
    "ljust": "rjust", "rjust": "ljust",
}  # fmt: skip
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_CONSTANT_MAX = 100
_ENTRIES_MIN = 3

EXPRESSION_OPERATORS = (
    "compare", "arithmetic", "boolean", "constant", "flag", "drop_not", "swap_choice", "swap_tuple", "off_by_one",
    "swap_arguments", "wrong_call", "drop_entry", "drop_condition",
)  # fmt: skip


def expression_bugs(source: Source, node: ast.expr) -> Iterator[Found]:
    """The bugs that one expression can have."""
    match node:
        case ast.Compare():
            yield from _compare(source, node)
        case ast.BinOp():
            yield from _arithmetic(source, node)
        case ast.BoolOp():
            yield from _boolean(source, node)
        case ast.Constant():
            yield from _constant(source, node)
        case ast.UnaryOp(op=ast.Not()):
            yield "drop_not", node, (Edit(source.start(node), source.start(node.operand), ""),)
        case ast.IfExp():
            yield "swap_choice", node, _swapped(source, node.body, node.orelse)
        case ast.List() | ast.Set() | ast.Tuple():
            yield from _entries(source, node)
        case ast.Call():
            yield from _call(source, node)
        case ast.Subscript(slice=ast.Slice() as cut):
            yield from _slice(source, cut)
        case _:
            pass


def _gap(source: Source, left: ast.expr, right: ast.expr, pattern: str, to: str) -> tuple[Edit, ...]:
    """The operator between two operands; nothing where the gap holds more than that, a comment for instance."""
    start, end = source.end(left), source.start(right)
    gap = source.between(start, end)
    match = re.fullmatch(rf"([\s()\\]*)({pattern})([\s()\\]*)", gap)
    if match is None:
        return ()
    offset = start + len(match[1].encode())
    return (Edit(offset, offset + len(match[2].encode()), to),)


def _compare(source: Source, node: ast.Compare) -> Iterator[Found]:
    operands = [node.left, *node.comparators]
    for at, op in enumerate(node.ops):
        pattern, to = _COMPARE[type(op)]
        if edits := _gap(source, operands[at], operands[at + 1], pattern, to):
            yield "compare", node, edits


def _arithmetic(source: Source, node: ast.BinOp) -> Iterator[Found]:
    text = isinstance(node.left, ast.Constant | ast.JoinedStr) and not _is_number(node.left)
    text = text or (isinstance(node.right, ast.Constant | ast.JoinedStr) and not _is_number(node.right))
    if text or type(node.op) not in _ARITHMETIC:
        return
    sign, to = _ARITHMETIC[type(node.op)]
    if edits := _gap(source, node.left, node.right, re.escape(sign), to):
        yield "arithmetic", node, edits


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _boolean(source: Source, node: ast.BoolOp) -> Iterator[Found]:
    sign, to = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
    if len(node.values) == 2 and (edits := _gap(source, node.values[0], node.values[1], sign, to)):
        yield "boolean", node, edits
    last, before = node.values[-1], node.values[-2]
    if ")" not in source.between(source.end(before), source.start(last)):
        yield "drop_condition", node, (Edit(source.end(before), source.end(last), ""),)


def _constant(source: Source, node: ast.Constant) -> Iterator[Found]:
    value = node.value
    if isinstance(value, bool):
        yield "flag", node, (source.replace(node, str(not value)),)
    elif type(value) is int and 0 <= value <= _CONSTANT_MAX and source.text(node).isdigit():
        yield "constant", node, (source.replace(node, str(value + 1)),)
        if value > 0:
            yield "constant", node, (source.replace(node, str(value - 1)),)


def _swapped(source: Source, one: ast.expr, other: ast.expr) -> tuple[Edit, ...]:
    return source.replace(one, source.text(other)), source.replace(other, source.text(one))


def _call(source: Source, node: ast.Call) -> Iterator[Found]:
    name = node.func
    if isinstance(name, ast.Attribute) and name.attr in _METHODS:
        start = source.end(name) - len(name.attr.encode())
        yield "wrong_call", node, (Edit(start, source.end(name), _METHODS[name.attr]),)
    if isinstance(name, ast.Name) and name.id in _FUNCTIONS:
        yield "wrong_call", node, (source.replace(name, _FUNCTIONS[name.id]),)
    if isinstance(name, ast.Name) and name.id == "range" and node.args and not _stars(node):
        last = node.args[min(1, len(node.args) - 1)]
        for step in ("+ 1", "- 1"):
            yield "off_by_one", node, (source.replace(last, f"{_operand(source, last)} {step}"),)
    if len(node.args) >= 2 and not _stars(node):
        first, second = node.args[:2]
        if ast.dump(first) != ast.dump(second) and all(_is_plain(each) for each in (first, second)):
            yield "swap_arguments", node, _swapped(source, first, second)


def _stars(node: ast.Call) -> bool:
    return any(isinstance(each, ast.Starred) for each in node.args)


def _is_plain(node: ast.expr) -> bool:
    return isinstance(node, ast.Name | ast.Attribute | ast.Subscript)


def _slice(source: Source, cut: ast.Slice) -> Iterator[Found]:
    for bound in (cut.lower, cut.upper):
        if bound is not None and not isinstance(bound, ast.Constant):
            for step in ("+ 1", "- 1"):
                yield "off_by_one", bound, (source.replace(bound, f"{_operand(source, bound)} {step}"),)


def _operand(source: Source, node: ast.expr) -> str:
    text = source.text(node)
    simple = isinstance(node, ast.Name | ast.Attribute | ast.Subscript | ast.Call | ast.Constant)
    return text if simple else f"({text})"


def _entries(source: Source, node: ast.List | ast.Set | ast.Tuple) -> Iterator[Found]:
    if isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(node.ctx, ast.Load):
        if not any(isinstance(each, ast.Starred) for each in node.elts):
            yield "swap_tuple", node, _swapped(source, *node.elts)
    elif len(node.elts) >= _ENTRIES_MIN and not (isinstance(node, ast.Tuple) and not isinstance(node.ctx, ast.Load)):
        last, before = node.elts[-1], node.elts[-2]
        if source.between(source.end(before), source.start(last)).strip() == ",":
            yield "drop_entry", node, (Edit(source.end(before), source.end(last), ""),)
