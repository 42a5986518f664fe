"""Bugs that are a statement, or several: a guard that is missing, branches the wrong way round, a call left out."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from prorld_swe.factory.edits import Edit, Source
from prorld_swe.factory.operators import Found

__all__ = ["STATEMENT_OPERATORS", "default_bugs", "statement_bugs"]

BLOCK_LINES_MAX = 12
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)

STATEMENT_OPERATORS = (
    "drop_guard", "drop_branch", "drop_else", "swap_branches", "invert_condition", "drop_statement", "narrow_except",
    "drop_return", "wrong_default",
)  # fmt: skip


def statement_bugs(source: Source, block: Sequence[ast.stmt]) -> Iterator[Found]:
    """The bugs that the statements of one block can have."""
    for node in block:
        match node:
            case ast.If():
                yield from _of_if(source, node, alone=len(block) == 1)
            case ast.Expr(value=ast.Call()) | ast.AugAssign():
                yield from _without(source, "drop_statement", node, alone=len(block) == 1)
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield from _without(source, "drop_statement", node, alone=len(block) == 1)
            case ast.Assign(targets=[ast.Name(id=name)]) if name in _names_of(node.value):
                yield from _without(source, "drop_statement", node, alone=len(block) == 1)
            case ast.Try():
                yield from _narrower(source, node)
            case ast.Continue() | ast.Break():
                yield from _without(source, "drop_return", node, alone=len(block) == 1)
            case _:
                pass


def default_bugs(source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Found]:
    """Wrong defaults of a function's parameters."""
    given = function.args
    for default in (*given.defaults, *(each for each in given.kw_defaults if each is not None)):
        if not isinstance(default, ast.Constant):
            continue
        if isinstance(default.value, bool):
            yield "wrong_default", default, (source.replace(default, str(not default.value)),)
        elif type(default.value) is int and source.text(default).isdigit():
            yield "wrong_default", default, (source.replace(default, str(default.value + 1)),)


def _names_of(value: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}


def _of_if(source: Source, node: ast.If, *, alone: bool) -> Iterator[Found]:
    if source.between(source.start(node), source.start(node) + 4) == "elif":
        yield from _branch(source, node)
        return
    yield "invert_condition", node, _inverted(source, node.test)
    if not node.orelse:
        if isinstance(node.body[-1], _LEAVES):
            yield from _without(source, "drop_guard", node, alone=alone)
        return
    if source.between(source.start(node.orelse[0]), source.start(node.orelse[0]) + 4) == "elif":
        # The chain's next branch is a block of its own to the walk, but with no indentation of its own to cut along.
        yield from statement_bugs(source, node.orelse)
        return
    yield from _with_else(source, node)


def _inverted(source: Source, test: ast.expr) -> tuple[Edit, ...]:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return (Edit(source.start(test), source.start(test.operand), ""),)
    text = source.text(test)
    simple = isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
    return (source.replace(test, f"not {text}" if simple else f"not ({text})"),)


def _branch(source: Source, node: ast.If) -> Iterator[Found]:
    """One ``elif`` with its block; what follows it stays."""
    yield "invert_condition", node, _inverted(source, node.test)
    lines = source.whole_lines(node, node.body[-1])
    if lines is not None and _is_short(node.body[-1], node):
        yield "drop_branch", node, (Edit(*lines, ""),)
    if node.orelse:
        if isinstance(node.orelse[0], ast.If) and len(node.orelse) == 1:
            yield from statement_bugs(source, node.orelse)
        else:
            yield from _with_else(source, node)


def _with_else(source: Source, node: ast.If) -> Iterator[Found]:
    body, other = (source.whole_lines(block[0], block[-1]) for block in (node.body, node.orelse))
    if body is None or other is None or not _is_short(node.orelse[-1], node):
        return
    if source.between(body[1], other[0]).strip() != "else:":
        return
    yield "drop_else", node, (Edit(body[1], other[1], ""),)
    if node.body[0].col_offset == node.orelse[0].col_offset and source.data[other[1] - 1 : other[1]] == b"\n":
        yield "swap_branches", node, (Edit(*body, source.between(*other)), Edit(*other, source.between(*body)))


def _is_short(last: ast.stmt, first: ast.stmt) -> bool:
    return (last.end_lineno or last.lineno) - first.lineno < BLOCK_LINES_MAX


def _without(source: Source, operator: str, node: ast.stmt, *, alone: bool) -> Iterator[Found]:
    lines = source.whole_lines(node, node)
    if lines is None or not _is_short(node, node):
        return
    stand_in = " " * node.col_offset + "pass\n" if alone else ""
    yield operator, node, (Edit(*lines, stand_in),)


def _narrower(source: Source, node: ast.Try) -> Iterator[Found]:
    for handler in node.handlers:
        if isinstance(handler.type, ast.Tuple) and len(handler.type.elts) >= 2:
            for kept in (handler.type.elts[0], handler.type.elts[-1]):
                yield "narrow_except", node, (source.replace(handler.type, source.text(kept)),)
