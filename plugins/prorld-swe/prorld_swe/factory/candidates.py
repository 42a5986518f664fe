"""The bugs that a package can have, in an order that a seed fixes: kinds take turns, and so do functions."""

from __future__ import annotations

import ast
import hashlib
import random
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from prorld_swe.factory.edits import Edit, Source, apply_edits, changed_lines, diff_of
from prorld_swe.factory.operators import EXPRESSION_OPERATORS, Found, expression_bugs
from prorld_swe.factory.statements import STATEMENT_OPERATORS, default_bugs, statement_bugs
from prorld_swe.factory.tree import Tree

__all__ = ["OPERATORS", "Bug", "Candidate", "combined", "find_candidates", "make_bug"]

OPERATORS: tuple[str, ...] = (*EXPRESSION_OPERATORS, *STATEMENT_OPERATORS)
FUNCTION_NODES_MIN = 20
CANDIDATES_MAX = 20_000
CHANGED_LINES_MAX = 30
_SKIPPED_FIELDS = frozenset({"annotation", "returns", "decorator_list", "type_comment", "keywords_of_class"})
# Where a change shows in words alone, or in what nobody relies on.
_SKIPPED_FUNCTIONS = frozenset({"__repr__", "__str__", "main", "__del__"})


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One change that may be a bug; ``functions`` are the qualified names of those it is in."""

    operators: tuple[str, ...]
    path: str
    functions: tuple[str, ...]
    line: int
    edits: tuple[Edit, ...]


class Bug(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate that can be written: the changed file, and the diffs there and back. ``digest`` is its identity."""

    candidate: Candidate
    content: bytes
    patch: str
    gold: str
    digest: str

    @property
    def name(self) -> str:
        """What its task is called by, within a package."""
        return self.digest[:10]

    @property
    def changed_lines(self) -> int:
        """The lines that a solution has to change."""
        return changed_lines(self.gold)


def find_candidates(
    tree: Tree,
    paths: Sequence[str],
    *,
    operators: Collection[str],
    seed: str,
    executed: Mapping[str, Collection[int]] | None,
) -> list[Candidate]:
    """All that there are, shuffled by ``seed``. ``executed`` are the lines that tests reach, where that is known."""
    found: dict[str, list[Candidate]] = defaultdict(list)
    for path in paths:
        try:
            source = Source(path, tree.files[path])
        except (ValueError, UnicodeDecodeError):
            continue
        reached = None if executed is None else set(executed.get(path, ()))
        for candidate in _of_file(source):
            if candidate.operators[0] in operators and (reached is None or candidate.line in reached):
                found[candidate.operators[0]].append(candidate)
    rng = random.Random(seed)  # noqa: S311 - an order that can be had again is what is wanted.
    for kind in found.values():
        rng.shuffle(kind)
    return list(_in_turns(found, rng))[:CANDIDATES_MAX]


def _in_turns(found: Mapping[str, Sequence[Candidate]], rng: random.Random) -> Iterator[Candidate]:
    """Kinds in rounds, each in an order of its own."""
    queues = {kind: deque(each) for kind, each in sorted(found.items())}
    while queues:
        kinds = list(queues)
        rng.shuffle(kinds)
        for kind in kinds:
            yield queues[kind].popleft()
            if not queues[kind]:
                del queues[kind]


def _of_file(source: Source) -> Iterator[Candidate]:
    for name, function in _functions(source.tree, ()):
        if function.name in _SKIPPED_FUNCTIONS or sum(1 for _ in ast.walk(function)) < FUNCTION_NODES_MIN:
            continue
        for operator, node, edits in _of_function(source, function):
            if edits:
                yield Candidate(
                    operators=(operator,), path=source.path, functions=(name,), line=node.lineno, edits=edits
                )


_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(node: ast.AST, above: tuple[str, ...]) -> Iterator[tuple[str, _Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function):
            yield ".".join((*above, child.name)), child
        named = isinstance(child, _Function | ast.ClassDef)
        yield from _functions(child, (*above, child.name) if named else above)  # type: ignore[attr-defined]


def _of_function(source: Source, function: _Function) -> Iterator[Found]:
    yield from default_bugs(source, function)
    yield from statement_bugs(source, function.body)
    for node in _inner(function.body):
        if isinstance(node, ast.expr):
            yield from expression_bugs(source, node)
        for block in _blocks(node):
            yield from statement_bugs(source, block)


def _inner(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions within it, annotations, text and what only complains."""
    for node in nodes:
        # Positions within f-strings are not to be relied on before 3.12; what is raised or asserted is said, not done.
        if isinstance(node, _Function | ast.ClassDef | ast.JoinedStr | ast.Raise | ast.Assert | ast.Import):
            continue
        yield node
        for field, value in ast.iter_fields(node):
            if field in _SKIPPED_FIELDS:
                continue
            children = value if isinstance(value, list) else [value]
            yield from _inner(child for child in children if isinstance(child, ast.AST))


def _blocks(node: ast.AST) -> Iterator[Sequence[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
            # An ``elif`` is seen from the ``if`` above it, which knows where it is cut.
            chained = field == "orelse" and isinstance(node, ast.If) and isinstance(block[0], ast.If)
            if not chained:
                yield block


def make_bug(tree: Tree, candidate: Candidate) -> Bug | None:
    """The change, written; ``None`` where that makes no other, valid program."""
    before = tree.files[candidate.path]
    after = apply_edits(before, candidate.edits)
    if after is None or after == before:
        return None
    try:
        old, new = ast.parse(before), ast.parse(after)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if ast.dump(old) == ast.dump(new):
        return None
    patch, gold = diff_of([(candidate.path, before, after)]), diff_of([(candidate.path, after, before)])
    if changed_lines(gold) > CHANGED_LINES_MAX:
        return None
    digest = hashlib.sha256(patch.encode()).hexdigest()
    return Bug(candidate=candidate, content=after, patch=patch, gold=gold, digest=digest)


def combined(one: Candidate, other: Candidate) -> Candidate | None:
    """Two bugs at once, in different functions of one file; ``None`` for two that do not go together."""
    if one.path != other.path or set(one.functions) & set(other.functions):
        return None
    if len(one.operators) + len(other.operators) > 2:
        return None
    first, second = sorted((one, other), key=lambda each: each.line)
    return Candidate(
        operators=(*first.operators, *second.operators),
        path=one.path,
        functions=(*first.functions, *second.functions),
        line=first.line,
        edits=tuple(sorted((*first.edits, *second.edits))),
    )
