"""Bugs: what each kind makes of a program, and that the way back leads back."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorld_swe.factory import candidates
from prorld_swe.factory.candidates import OPERATORS, Candidate, combined, find_candidates, make_bug
from prorld_swe.factory.edits import Edit, Source, apply_edits, changed_lines, diff_of
from prorld_swe.factory.tree import Tree

LONG = "\n    unused = [value, value, value, value, value, value, value, value, value, value]\n    return unused\n"
CASES = [
    ("compare", "    x = value < 3", "    x = value <= 3"),
    ("compare", "    x = value not in  other", "    x = value in  other"),
    ("compare", "    x = (value) is not (None)", "    x = (value) is (None)"),
    ("arithmetic", "    x = value + other", "    x = value - other"),
    ("boolean", "    x = value and other", "    x = value or other"),
    ("drop_condition", "    x = value and other", "    x = value"),
    ("constant", "    x = value[3]", "    x = value[4]"),
    ("constant", "    x = value[3]", "    x = value[2]"),
    ("flag", "    x = call(value, strict=True)", "    x = call(value, strict=False)"),
    ("drop_not", "    x = not value", "    x = value"),
    ("swap_choice", "    x = value if other else None", "    x = None if other else value"),
    ("swap_tuple", "    return value, other", "    return other, value"),
    ("off_by_one", "    x = range(len(value))", "    x = range(len(value) - 1)"),
    ("off_by_one", "    x = value[: other - 2]", "    x = value[: (other - 2) + 1]"),
    ("swap_arguments", "    call(value, other)", "    call(other, value)"),
    ("wrong_call", "    x = value.startswith('é')", "    x = value.endswith('é')"),
    ("wrong_call", "    x = min(value)", "    x = max(value)"),
    ("drop_entry", "    x = ['a', 'b', 'c']", "    x = ['a', 'b']"),
    ("drop_guard", "    if value:\n        return None", ""),
    ("drop_branch", "    if value:\n        x = 1\n    elif other:\n        x = 2", "    if value:\n        x = 1"),
    ("drop_else", "    if value:\n        x = 1\n    else:\n        x = 2", "    if value:\n        x = 1"),
    (
        "swap_branches",
        "    if value:\n        x = 1\n    else:\n        x = 2",
        "    if value:\n        x = 2\n    else:\n        x = 1",
    ),
    ("invert_condition", "    if value == 1:\n        x = 1", "    if not (value == 1):\n        x = 1"),
    ("invert_condition", "    if not value:\n        x = 1", "    if value:\n        x = 1"),
    ("drop_statement", "    value.append(other)", ""),
    ("drop_statement", "    if value:\n        other += 1", "    if value:\n        pass"),
    (
        "narrow_except",
        "    try:\n        call()\n    except (KeyError, ValueError):\n        pass",
        "    try:\n        call()\n    except KeyError:\n        pass",
    ),
    ("drop_return", "    for x in value:\n        call(x)\n        break", "    for x in value:\n        call(x)"),
]


def _program(body: str) -> bytes:
    body = body + "\n" if body else ""
    return f"def work(value, other, flag=False):\n{body}{LONG.lstrip(chr(10))}".encode()


def _of(data: bytes, operators=OPERATORS, executed=None) -> list[Candidate]:
    tree = Tree(files={"a.py": data})
    return find_candidates(tree, ["a.py"], operators=operators, seed="1", executed=executed)


@pytest.mark.parametrize(("operator", "before", "after"), CASES)
def test_an_operator_makes_its_bug(operator, before, after):
    """And nothing else of the text changes."""
    data = _program(before)
    tree = Tree(files={"a.py": data})
    made = [make_bug(tree, candidate) for candidate in _of(data, (operator,))]
    assert _program(after) in [bug.content for bug in made if bug is not None]


def test_a_default_can_be_wrong():
    """Of a parameter by position or by name alone."""
    data = b"def work(a, b=1, *, c=True):\n    x = [a, b, c, a, b, c, a, b, c]\n    return x\n"
    made = {make_bug(Tree(files={"a.py": data}), candidate).content for candidate in _of(data, ("wrong_default",))}
    assert {data.replace(b"b=1", b"b=2"), data.replace(b"c=True", b"c=False")} == made


def test_every_operator_is_tried_here():
    """A new one needs a case."""
    assert {operator for operator, _, _ in CASES} | {"wrong_default"} == set(OPERATORS)


def test_what_is_said_and_declared_is_left_alone():
    """Annotations, decorators, texts, assertions, complaints and short functions."""
    data = (
        b"@wrap(1 + 1)\ndef work(a: 'x' + 1) -> 1 + 2:\n    assert a < 3\n    raise ValueError(1 + a)\n"
        b"    return f'{a + 1}' + a.b.c.d.e.f.g.h.i.j.k.l.m.n.o\n\n\ndef short(a):\n    return a + 1\n"
    )
    assert [c.operators for c in _of(data)] == []


def test_only_lines_that_tests_reach_are_changed():
    """Where it is known which those are."""
    data = _program("    x = value + 1\n    y = other + 1")
    assert {c.line for c in _of(data, executed={"a.py": [2]})} == {2}
    assert _of(data, executed={}) == []


def test_the_order_is_the_seeds():
    """The same for the same seed, kinds in turns."""
    data = _program("\n".join(f"    x{at} = value + {at}" for at in range(20)))
    tree = Tree(files={"a.py": data})
    orders = [
        find_candidates(tree, ["a.py"], operators=OPERATORS, seed=seed, executed=None) for seed in ("1", "1", "2")
    ]
    assert orders[0] == orders[1] != orders[2]
    assert len({c.operators for c in orders[0][:3]}) == 3


@pytest.mark.parametrize(
    "data", [b"x = (", b"\xff\xfe", b"def a():\r\n    return 1\r\n", b"\xef\xbb\xbfx = 1\n", b"\0"]
)
def test_a_file_that_can_not_be_changed_as_text_is_left_out(data):
    """It is no error of the package."""
    assert _of(data) == []


def test_two_bugs_go_together_in_different_functions():
    """And only there."""
    data = _program("    x = value + other") + b"\n\n" + _program("    y = value - other").replace(b"work", b"play")
    one, two = sorted(_of(data, ("arithmetic",)), key=lambda c: c.line)
    pair = combined(two, one)
    assert (pair.functions, pair.operators, pair.line) == (("work", "play"), ("arithmetic", "arithmetic"), one.line)
    content = make_bug(Tree(files={"a.py": data}), pair).content
    assert (b"x = value - other" in content, b"y = value + other" in content) == (True, True)
    assert combined(one, one) is None
    assert combined(pair, one) is None


def test_edits_that_overlap_are_refused():
    """Rather than applied in some order."""
    assert apply_edits(b"abcdef", [Edit(0, 3, "x"), Edit(2, 4, "y")]) is None
    assert apply_edits(b"abcdef", [Edit(4, 6, ""), Edit(0, 1, "xy")]) == b"xybcd"


def test_positions_are_those_of_bytes():
    """A line with other letters before the node."""
    source = Source("a.py", "x = 'äöü', 1 + 2\n".encode())
    node = next(node for node in ast.walk(source.tree) if isinstance(node, ast.BinOp))
    assert source.text(node) == "1 + 2"


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "", "ü", " x"]), max_size=12), st.data())
def test_git_applies_a_diff_and_its_way_back(tmp_path_factory, lines, data):
    """With and without an end of line at the end."""
    place = tmp_path_factory.mktemp("git")
    changed = data.draw(st.lists(st.sampled_from(["a", "c", "", "ü"]), max_size=12))
    ends = data.draw(st.tuples(st.sampled_from(["", "\n"]), st.sampled_from(["", "\n"])))
    before, after = (
        "\n".join([*each, "end"]).encode() + end.encode() for each, end in zip((lines, changed), ends, strict=True)
    )
    if before == after:
        return
    (place / "a.py").write_bytes(before)
    for old, new in ((before, after), (after, before)):
        patch = diff_of([("a.py", old, new)])
        subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], cwd=place, input=patch.encode(), check=True)
        assert (place / "a.py").read_bytes() == new
    assert changed_lines(diff_of([("a.py", before, after)])) >= 1


@pytest.mark.slow
def test_every_bug_of_this_plugin_can_be_undone():
    """Its own code as the package: each gold gives the file back, and each bug is another program."""
    data = Path(candidates.__file__).read_bytes()
    tree = Tree(files={"a.py": data})
    found = _of(data)
    kinds = Counter(c.operators[0] for c in found)
    assert len(kinds) > 10
    for candidate in found[:60]:
        bug = make_bug(tree, candidate)
        if bug is None:
            continue
        assert ast.dump(ast.parse(bug.content)) != ast.dump(ast.parse(data))
        assert bug.gold == diff_of([("a.py", bug.content, data)])
        assert 1 <= bug.changed_lines <= 30
