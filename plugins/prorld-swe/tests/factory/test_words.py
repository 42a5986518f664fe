"""Problem statements, and the journal."""

from __future__ import annotations

import msgspec
import pytest

from prorld.errors import BadRequest, Conflict
from prorld_swe.factory.candidates import OPERATORS, find_candidates, make_bug
from prorld_swe.factory.journal import Measured, Tried, open_journal
from prorld_swe.factory.layout import Wishes
from prorld_swe.factory.settings import Settings, read_list
from prorld_swe.factory.suite import decode_report
from prorld_swe.factory.tree import Tree
from prorld_swe.factory.wording import Subject, problem_statement, symptom_of

MESSAGE = "AssertionError: assert 4 == 3\n +  where 4 = clamp(4, 0, 3)\n"


def _subjects(kit):
    tree = Tree(files={"src/wordy/core.py": kit.CODE.encode()})
    for candidate in find_candidates(tree, list(tree.files), operators=OPERATORS, seed="1", executed=None):
        bug = make_bug(tree, candidate)
        if bug is not None:
            tests = ("tests/test_w.py::TestX::test_clamp[a-1]", "tests/test_w.py::test_other")
            yield Subject(package="wordy", version="1.0", bug=bug, f2p=tests, messages={tests[0]: MESSAGE})


def test_a_statement_tells_a_symptom_and_no_secret(kit):
    """No line that is wrong or right, no kind of bug; the same bug has the same words, and bugs have many."""
    texts = set()
    for subject in _subjects(kit):
        statement = problem_statement(subject)
        assert statement == problem_statement(subject)
        assert "where 4 = clamp(4, 0, 3)" in statement.text
        assert "a-1" not in statement.text
        for operator in subject.bug.candidate.operators:
            assert operator not in statement.text
        changed = [line[1:].strip() for line in subject.bug.patch.splitlines() if line[0] in "+-"][2:]
        assert not [line for line in changed if len(line) >= 8 and line in statement.text]
        assert (statement.hint == "function") == (f"`{subject.bug.candidate.functions[0]}`" in statement.text)
        assert (statement.hint == "package") == ("wordy.core" not in statement.text)
        texts.add(statement.text)
    assert len(texts) > 15


def test_a_symptom_that_shows_the_line_is_not_told(kit):
    """What fails is still named."""
    for subject in _subjects(kit):
        lines = [line[1:].strip() for line in subject.bug.patch.splitlines() if line.startswith("-")][1:]
        if not lines or len(lines[0]) < 8:
            continue
        told = msgspec.structs.replace(subject, messages=dict.fromkeys(subject.f2p, f"NameError: {lines[0]}"))
        assert lines[0] not in problem_statement(told).text
        assert "test_clamp" in problem_statement(told).text


@pytest.mark.parametrize(
    ("message", "symptom"),
    [
        ("ValueError: in /testbed/src/wordy/core.py", "ValueError: in ..."),
        ("<wordy.X object at 0x7f0123456789>", "<wordy.X object at 0x...>"),
        ("x = 1 (core.py, line 12)", "x = 1"),
        ("a\n\n\n", "a"),
        ("```\nrm\n```", "'''\nrm\n'''"),
        ("\n".join("x" * 5 for _ in range(40)), "\n".join(["xxxxx"] * 14 + ["..."])),
    ],
)
def test_a_symptom_is_bounded_and_has_no_places(message, symptom):
    """Places are for who knows the source."""
    assert symptom_of(message, []) == symptom
    assert len(symptom_of("y" * 10_000, [])) < 1_000


def _tried(digest: str, row=None) -> Tried:
    return Tried(
        package="p", digest=digest, verdict="kept" if row else "no_effect", operators=("flag",), functions=("f",),
        seconds=1.0, row=row,
    )  # fmt: skip


def test_a_journal_is_read_again_without_what_a_kill_left(tmp_path):
    """A torn line is cut off, and what comes next is whole."""
    with open_journal(tmp_path / "w") as journal:
        journal.add(Measured(package="p", name="n", version="1", refused="no"))
        journal.add(_tried("a", {"instance_id": "i"}))
    path = tmp_path / "w/journal.jsonl"
    whole = path.read_bytes()
    line = whole.splitlines()[0]
    for cut in (1, 20, len(line)):
        path.write_bytes(whole + line[:cut])
        with open_journal(tmp_path / "w") as journal:
            assert journal.measured("p").refused == "no"
            assert [row["instance_id"] for row in journal.rows()] == ["i"]
            journal.add(_tried("b"))
        assert [line[:1] for line in path.read_bytes().splitlines()] == [b"{"] * 3


def test_a_journal_has_one_owner(tmp_path):
    """The second one is told so."""
    with open_journal(tmp_path), pytest.raises(Conflict, match="another process"), open_journal(tmp_path):
        pass


def test_a_journal_of_something_else_is_left_alone(tmp_path):
    """Nothing is written over what can't be read."""
    (tmp_path / "journal.jsonl").write_bytes(b'{"kind":"other"}\n')
    with pytest.raises(Conflict, match="line 1"), open_journal(tmp_path):
        pass
    assert (tmp_path / "journal.jsonl").read_bytes() == b'{"kind":"other"}\n'


def test_a_package_that_is_asked_otherwise_is_another_one():
    """Its old answers would be wrong."""
    one, two = Settings(), Settings(limit_s=7.0)
    assert one.key("s" * 64, Wishes()) == Settings(seed=9, per_package=50).key("s" * 64, Wishes())
    assert len({one.key("s" * 64, Wishes()), two.key("s" * 64, Wishes()), one.key("s" * 64, Wishes(tests=("t",)))}) == 3


def test_a_list_has_options_by_line(tmp_path):
    """And an error names the line."""
    path = tmp_path / "list.txt"
    path.write_text("# all\n\na==1 --tests checks --pytest-arg=-x # why\nb\n")
    orders = list(read_list(path))
    assert [(order.what, order.wishes.tests, order.wishes.pytest_args) for order in orders] == [
        ("a==1", ("checks",), ("-x",)),
        ("b", (), ()),
    ]
    for bad in ("a --nothing x", "a b", "'a", "a --tests ../x", "a>=2", "a --code /etc"):
        path.write_text(f"ok\n{bad}\n")
        with pytest.raises(BadRequest, match="line 2"):
            list(read_list(path))


@pytest.mark.parametrize(
    "report",
    [
        b"",
        b"{}",
        b"x\n",
        b'{"kind":"test","id":3}',
        b'{"kind":"end","status":5}',
        b'{"kind":"end","status":"0"}',
        b"\xff",
    ],
)
def test_a_report_that_does_not_say_how_it_ended_is_none(report):
    """Nothing of it counts as a run."""
    run = decode_report(report, 1.0, "said")
    assert (run.ended, run.tests) == (False, {})
