"""The pure parts: instances of every published shape, diffs, paths, findings, logs, names of images, verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prorld_swe.datasets import convert_nemo, convert_r2e, convert_swebench, convert_swesmith
from prorld_swe.diff import parse_diff
from prorld_swe.findings import find, find_in_patch
from prorld_swe.images import find_image, image_names
from prorld_swe.instance import SweInstance
from prorld_swe.judging import judge_report
from prorld_swe.logs import environment_failure
from prorld_swe.parsers import parse_log
from prorld_swe.paths import sift
from prorld_swe.testrun import Facts, TestReport

GOLD = "diff --git a/x/y.py b/x/y.py\n--- a/x/y.py\n+++ b/x/y.py\n@@ -1 +1 @@\n-a\n+b\n"
BENCH: dict[str, Any] = {
    "instance_id": "Astropy__astropy-1",
    "repo": "astropy/astropy",
    "base_commit": "a" * 40,
    "patch": GOLD,
    "test_patch": GOLD.replace("x/y.py", "x/tests/test_y.py"),
    "problem_statement": "It is wrong.",
    "FAIL_TO_PASS": '["x/tests/test_y.py::test_a"]',
    "PASS_TO_PASS": '["x/tests/test_y.py::test_b", "x/tests/test_y.py::test_b"]',
}
R2E: dict[str, Any] = {
    "repo_name": "aiohttp",
    "docker_image": "namanjain12/aiohttp_final:0123",
    "problem_statement": "x",
    "expected_output_json": '{"A.test_a": "PASSED", "test_b": "FAILED"}',
}
SMITH: dict[str, Any] = {
    **BENCH,
    "instance_id": "a__b.01234567.lm__x",
    "image_name": "swebench/swesmith.x86_64.a_1776_b.01234567",
    "FAIL_TO_PASS": ["t/test_y.py::test_a"],
    "base_commit": None,
    "test_patch": None,
}


def task(row: dict[str, Any]) -> Any:
    return msgspec.convert(row, SweInstance).task


def test_the_published_shapes_become_one_form() -> None:
    """Lists as JSON or as lists, wrapped or not, with or without a base commit."""
    bench, gym = task(BENCH), task({"instance": BENCH, "data_source": "swegym", "metadata": {"image": "/x/y.sif"}})
    assert (
        (bench.f2p, bench.p2p) == (gym.f2p, gym.p2p) == (("x/tests/test_y.py::test_a",), ("x/tests/test_y.py::test_b",))
    )
    assert (bench.shape, gym.shape, gym.images) == ("swebench", "wrapped", ("/x/y.sif",))
    assert bench.test_files == ("x/tests/test_y.py",)
    later = task(
        {**BENCH, "image": "i", "eval_script": "s", "log_parser": "parse_log_django", "eval_type": "pass_and_fail"}
    )
    assert (later.images, later.eval_script, later.log_parser) == (("i",), "s", "parse_log_django")
    assert task(R2E).expected == {"A.test_a": "PASSED", "test_b": "FAILED"}
    smith = task(SMITH)
    assert (smith.gold_reversed, smith.hidden_files) == (True, ("t/test_y.py",))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "names no test"),
        ({**BENCH, "FAIL_TO_PASS": "not json"}, "FAIL_TO_PASS is no JSON"),
        ({**BENCH, "FAIL_TO_PASS": "{}"}, "no list"),
        ({**BENCH, "PASS_TO_PASS": BENCH["FAIL_TO_PASS"]}, "in FAIL_TO_PASS and in PASS_TO_PASS"),
        ({**BENCH, "base_commit": None}, "base_commit"),
        ({**R2E, "expected_output_json": "[]"}, "no object"),
        ({**BENCH, "bug_patch": "x"}, "needs sdist"),
    ],
)
def test_a_row_that_lacks_something_says_what(row: dict[str, Any], words: str) -> None:
    """A typed error that names the field."""
    with pytest.raises(msgspec.ValidationError, match=words):
        msgspec.convert(row, SweInstance)


@pytest.mark.parametrize("field", ["test_files", "hidden_files"])
@pytest.mark.parametrize("path", ["../x.py", "/etc/passwd", "a/../../x", ".git/config", "a//b"])
def test_a_path_out_of_the_repository_is_refused(row: dict[str, Any], field: str, path: str) -> None:
    """Paths go into commands of the sandbox."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**row, field: [*row[field], path]}, SweInstance)


def section(path: str, body: str = "--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-a\n+b\n", head: str = "") -> str:
    return f"diff --git a/{path} b/{path}\n{head}{body.format(path)}"


NEW = "new file mode 100644\nindex 0000000..1234567\n"
ADDED = "--- /dev/null\n+++ b/{0}\n@@ -0,0 +1 @@\n+x\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (section("../x.py"), "a path out of the repository"),
        (section("a/.git/config"), "a file of git"),
        (section(".gitattributes"), "a file of git"),
        ("diff --git a/x b/y\nsimilarity index 100%\nrename from x\nrename to y\n", "a renamed or copied file"),
        (section("x", ADDED, "new file mode 120000\nindex 0000000..1234567\n"), "no plain file"),
        (section("x", ADDED, "new file mode 160000\nindex 0000000..1234567\n"), "no plain file"),
        (section("x", "", "old mode 100644\nnew mode 100755\n"), "only its mode changes"),
        (section("x", "--- a/x\n+++ b/other\n@@ -1 +1 @@\n-a\n+b\n"), "names that do not fit"),
        (section("x", "--- a/x\n+++ b/x\n@@ -1 +1,2 @@\n-a\n+b\n"), "a hunk that ends early"),
        (
            section("x", "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n--- a/y\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n"),
            "a hunk that is",
        ),
        ('diff --git "a/x\\n" "b/x\\n"\n--- a\n', "a name with odd characters"),
        (section("x", head="copy from z\n"), "a header that is not understood"),
        (section("x", "GIT binary patch\nliteral 1\nnot base85 at all\n\n"), "a binary change that is not understood"),
    ],
)
def test_what_is_no_change_of_a_plain_file_is_refused(text: str, why: str) -> None:
    """The sections beside it stand."""
    diff = parse_diff((section("good.py") + text + section("better.py")).encode())
    assert [change.path for change in diff.changes] == ["good.py", "better.py"]
    assert [reason.startswith(why) for _, reason in diff.refused] == [True]


def test_what_is_kept_is_as_it_came() -> None:
    """Text, files that come and go, binaries, and lines without an end; modes are left as they are."""
    ended = "--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+b\n\\ No newline at end of file\n"
    binary = "GIT binary patch\nliteral 3\nKcmZQzWMT#Y01f~L\n\nliteral 0\nHcmV?d00001\n\n"
    texts = [
        section("a b.py", "--- a/{0}\t\n+++ b/{0}\t\n@@ -1 +1 @@\n-a\n+b\n"),
        section("n.py", ADDED, NEW),
        section(
            "d.py",
            "--- a/{0}\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n",
            "deleted file mode 100644\nindex 1234567..0000000\n",
        ),
        section("b.bin", binary, NEW),
        section("e.py", ended),
    ]
    diff = parse_diff("".join(texts).encode())
    assert diff.refused == ()
    assert [change.text.decode() for change in diff.changes] == texts
    assert [change.kind for change in diff.changes] == ["changed", "added", "deleted", "added", "changed"]
    moded = parse_diff(section("m.py", head="old mode 100644\nnew mode 100755\nindex 1234567..2345678\n").encode())
    assert b"mode" not in moded.changes[0].text


@pytest.mark.parametrize(
    "path",
    [
        *("tests/test_x.py", "pkg/tests/data.txt", "pkg/test_x.py", "x_test.py", "conftest.py", "a/conftest.py"),
        *("pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "a.pth", "sitecustomize.py", "a/b.so"),
        *("pkg/__pycache__/x.pyc", "pytest.py", "_pytest/__init__.py", "src/json.py", "src/unittest/case.py"),
        *("evil.dist-info/entry_points.txt", "src/evil.egg-info/x", "pkg/testing/tool.py", "pkg/_testing.py"),
    ],
)
def test_what_decides_a_grade_is_not_the_policys_to_change(path: str) -> None:
    """However it is called, at the root or at a root of imports."""
    sifted = sift(parse_diff(section(path, ADDED, NEW).encode()), tests=["other"], right=[], roots=["src"])
    assert sifted.changes == ()


def test_what_a_repair_changes_may_be_changed() -> None:
    """The files of the right patch, ordinary ones, and ordinary ones with telling names."""
    paths = ["pkg/a.py", "setup.cfg", "pkg/json.py", "pkg/latest.py", "pkg/contest.py"]
    diff = parse_diff("".join(section(path) for path in paths).encode())
    sifted = sift(diff, tests=[], right=["setup.cfg"], roots=["."])
    assert [change.path for change in sifted.changes] == paths
    assert sift(diff, tests=["pkg/a.py"], right=["pkg/a.py"], roots=["."]).tests_touched == 2


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("class A:\n    def __eq__(self, other):\n        return True", "eq"),
        ("class A:\n    __eq__ = lambda self, other: True", "eq"),
        ("A = type('A', (), {'__eq__': lambda a, b: 1 == 1})", "eq"),
        ("setattr(A, '__eq__', lambda *a: True)", "eq"),
        ("import _pytest.runner", "pytest"),
        ("from pytest import hookimpl", "pytest"),
        ("import os as x\nx._exit(0)", "exit"),
        ("from os import kill", "exit"),
        ("import sys\nsys._getframe(1)", "frames"),
        ("import gc", "gc"),
        ("open('/proc/self/mem')", "proc"),
        ("import ctypes", "ctypes"),
        ("__import__('a' + 'b')", "dynamic"),
        ("import sys\nsys.modules['a']", "dynamic"),
        ("getattr(x, 'a' + 'b')", "dynamic"),
    ],
)
def test_what_no_repair_needs_is_found(source: str, found: str) -> None:
    """Each once."""
    assert list(find(source)) == [found]


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def __eq__(self, other):\n        return self.x == other.x",
        "class A:\n    def __eq__(self, other):\n        return NotImplemented",
        "class A:\n    def __eq__(self, other):\n        raise TypeError",
        "class A:\n    def __eq__(self, other):\n        return False",
        '"""Says /proc/self and pytest in its docstring."""',
        "self.process.kill()\nre.compile('x')\ngetattr(x, name)\nabort(404)",
        "not python at all (",
    ],
)
def test_what_a_repair_may_need_is_not(source: str) -> None:
    """Comparisons that compare, methods of the same names, words in docstrings."""
    assert not find(source)


def test_the_right_patch_excuses_what_it_has() -> None:
    """Also where only its lines are known."""
    assert find_in_patch("+++ b/x\n+import gc\n+sys._getframe()\n-import ctypes\n") >= {"gc", "frames"}
    assert "ctypes" not in find_in_patch("-import ctypes\n")


def test_logs_are_read() -> None:
    """Colours, reasons, skips, both orders, and a test with two statuses, which has failed."""
    log = (
        "\x1b[32mPASSED\x1b[0m a.py::b\nFAILED a.py::c - assert 1 == 2\nERROR a.py::d\nSKIPPED [1] a.py:3: why\n"
        "a.py::e PASSED [ 50%]\nXFAIL a.py::f\nPASSED a.py::c\nPASSED [100%]\n"
    )
    wanted = {"b": "passed", "c": "failed", "d": "error", "e": "passed", "f": "xfail"}
    assert parse_log("pytest", log) == {f"a.py::{name}": status for name, status in wanted.items()} | {
        "[100%]": "passed"
    }
    assert parse_log("parse_log_pytest_options", "PASSED a.py::b[/x/y/z.txt]") == {"a.py::b[/z.txt]": "passed"}
    django = "test_a (x.T) ... ok\ntest_b (x.T) ... FAIL\ntest_c (x.T) ... skipped 'no'\ntest_d (x.T) ... noise\nok\n"
    assert parse_log("django", django) == {
        "test_a (x.T)": "passed",
        "test_b (x.T)": "failed",
        "test_c (x.T)": "skipped",
        "test_d (x.T)": "passed",
    }
    assert parse_log("sympy", "test_a ok\ntest_b F\ntest_c E [FAIL]\n") == {
        "test_a": "passed",
        "test_b": "failed",
        "test_c": "error",
    }
    summary = "PASSED x\n= short test summary info =\nPASSED r.py::A::test_a\nFAILED r.py::test_b - no\n"
    assert parse_log("r2e", summary) == {"A.test_a": "passed", "test_b": "failed"}


def test_the_machine_is_to_blame_only_before_the_first_test() -> None:
    """What a test prints is what tested code has it print."""
    assert environment_failure("OSError: No space left on device") == "No space left on device"
    assert environment_failure("== test session starts ==\nNo space left on device") is None


def test_an_image_is_found_by_the_names_of_the_field(tmp_path: Path) -> None:
    """Each spelling, file or directory, and no longer name of another instance."""
    bench = task(BENCH)
    for name in ("sweb.eval.x86_64.astropy_1776_astropy-1.sif", "xingyaoww_sweb.eval.x86_64.astropy_s_astropy-1"):
        place = tmp_path / name
        place.mkdir()
        assert find_image(bench, tmp_path) == str(place)
        place.rmdir()
    (tmp_path / "sweb.eval.x86_64.astropy_1776_astropy-12.sif").touch()
    assert find_image(bench, tmp_path) == "docker://docker.io/swebench/sweb.eval.x86_64.astropy_1776_astropy-1:latest"
    other = tmp_path / "mirror.astropy_1776_astropy-1_latest.sif"
    other.touch()
    assert find_image(bench, tmp_path) == str(other)
    assert find_image(task({**BENCH, "image": "swebench/x:latest"}), None) == "docker://swebench/x:latest"
    assert find_image(task({**BENCH, "image": "stored"}), None) == "stored"
    assert find_image(task({**BENCH, "image": str(tmp_path / "none.sif")}), None) is None
    assert "aiohttp_final_0123" in image_names(task(R2E))


def report(**more: Any) -> TestReport:
    good = [("x/tests/test_y.py::test_a", "passed"), ("x/tests/test_y.py::test_b", "passed")]
    facts = {
        "results": good,
        "collected": [name for name, _ in good],
        "canaries": 10,
        "canaries_true": 10,
        "finished": True,
    }
    return TestReport(**{**facts, **more})


@pytest.mark.parametrize(
    "more",
    [
        {"signed": False},
        {"forged": "x"},
        {"canaries_true": 9},
        {"canaries_true": 9, "canaries_false": 1},
        {"finished": False},
        {"timed_out": True},
        {"facts": Facts(tampered=["a"])},
        {"facts": Facts(equal=["a"])},
        {"results": [("x/tests/test_y.py::test_a", "passed")]},
        {"results": [("x/tests/test_y.py::test_a", "passed")] * 2 + [("x/tests/test_y.py::test_b", "passed")]},
        {"collected": ["x/tests/test_y.py::test_a"] * 2},
        {"results": [("x/tests/test_y.py::test_a", "passed"), ("x/tests/test_y.py::test_b", "skipped")]},
    ],
)
def test_each_flaw_of_a_report_makes_it_none(more: dict[str, Any]) -> None:
    """And without any it is good."""
    baseline = report(results=[])
    assert judge_report(task(BENCH), report(), baseline, equal_counts=True).resolved
    verdict = judge_report(task(BENCH), report(**more), baseline, equal_counts=True)
    assert not verdict.resolved
    assert verdict.why


def test_a_name_that_ends_at_a_blank_stands_for_all_that_begin_so() -> None:
    """Names that were read from logs are cut there."""
    cut = task({**BENCH, "FAIL_TO_PASS": ["t.py::a[one"], "PASS_TO_PASS": []})
    good = {"collected": ["t.py::a[one two]", "t.py::a[one three]"]}
    both = report(**good, results=[("t.py::a[one two]", "passed"), ("t.py::a[one three]", "passed")])
    assert judge_report(cut, both, None, equal_counts=True).resolved
    half = report(**good, results=[("t.py::a[one two]", "failed"), ("t.py::a[one three]", "passed")])
    assert not judge_report(cut, half, None, equal_counts=True).resolved


def test_rows_are_converted_and_come_out_as_instances() -> None:
    """With the source that the set has; a row that is none says which it was."""
    for convert, row, source in (
        (convert_swebench, {**BENCH, "extra": 1}, "swebench"),
        (convert_r2e, R2E, "r2egym"),
        (convert_swesmith, SMITH, "swesmith"),
        (convert_nemo, {"instance": BENCH, "metadata": {"image": "/a/b.sif"}, "responses_create_params": {}}, "swegym"),
    ):
        (instance,) = convert(row, "member")
        assert instance["data_source"] == source
        assert task(json.loads(json.dumps(instance))).problem
    assert list(convert_swesmith({**SMITH, "problem_statement": ""}, "member")) == []
    with pytest.raises(ValueError, match="member: Astropy__astropy-1: "):
        list(convert_swebench({**BENCH, "FAIL_TO_PASS": "x"}, "member"))
