"""Repositories as images have them: what is left of their history, and grades by witness and by log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from prorld.handlers import GraderError, Sandbox, SandboxSpec
from prorld.sandbox.runtime import Runtime
from prorld.testing.sandbox_opening import open_sandbox
from prorld_swe.carrying import NotCarried, take_diff
from prorld_swe.config import SweConfig
from prorld_swe.diff import parse_diff
from prorld_swe.grading import Examiner, Marks
from prorld_swe.instance import SweInstance
from prorld_swe.paths import changed_paths, sift
from prorld_swe.repository import ROOT, prepare_image
from prorld_swe.task import SweTask

pytestmark = pytest.mark.slow

MADE = rf"""
set -e
cd {ROOT}
git init -q -b main .
git config user.name a; git config user.email a@b
mkdir pkg tests
printf 'def add(a, b):\n    return a - b\n' >pkg/calc.py; touch pkg/__init__.py
printf 'from pkg.calc import add\n\ndef test_zero():\n    assert add(1, 0) == 1\n' >tests/test_calc.py
git add -A; git commit -qm past
echo past >NOTES; git add -A; git commit -qm base; git tag before
git rev-parse HEAD >/tmp/base
printf 'def add(a, b):\n    return a + b\n' >pkg/calc.py; git add -A; git commit -qm 'fix secret-word'; git tag v2
git branch later; git checkout -q -B main "$(cat /tmp/base)"
git notes add -m 'note secret-word' HEAD; echo stashed >NOTES; git stash -q
git remote add origin https://example.org/x
git update-ref refs/remotes/origin/main v2; git update-ref refs/pull/1/head v2
mkdir -p .git/hooks; echo 'touch /tmp/hooked' >.git/hooks/post-checkout; chmod +x .git/hooks/post-checkout
cat /tmp/base
"""
FIX = """diff --git a/pkg/calc.py b/pkg/calc.py
--- a/pkg/calc.py
+++ b/pkg/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
TEST_PATCH = """diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -4,1 +4,4 @@
     assert add(1, 0) == 1
+
+def test_sum():
+    assert add(1, 2) == 3
"""
SCRIPT = f"cd {ROOT} && python -m pytest -rA -p no:cacheprovider tests/test_calc.py"


@pytest.fixture
async def sandbox(runtime: Runtime) -> AsyncIterator[Sandbox]:
    """A sandbox with a repository that has a past, a future and whatever else git keeps."""
    async with open_sandbox(runtime, SandboxSpec(workdir=ROOT)) as opened:
        made = await opened.bash(f"({MADE})")
        assert made.exit_code == 0, made.text
        yield opened


async def task_of(sandbox: Sandbox, **more: Any) -> SweTask:
    base = (await sandbox.bash("cat /tmp/base")).text.strip()
    row = {
        "data_source": "swebench",
        "instance_id": "a__b-1",
        "repo": "a/b",
        "base_commit": base,
        "patch": FIX,
        "test_patch": TEST_PATCH,
        "problem_statement": "Sums are wrong.",
        "FAIL_TO_PASS": '["tests/test_calc.py::test_sum"]',
        "PASS_TO_PASS": ["tests/test_calc.py::test_zero"],
        **more,
    }
    return msgspec.convert(row, SweInstance).task


async def graded(sandbox: Sandbox, task: SweTask, patch: str, **settings: Any) -> Marks:
    diff = parse_diff(patch.encode())
    sifted = sift(diff, tests=task.test_files, right=changed_paths(task.gold), roots=())
    return await Examiner(SweConfig(**settings), task, sandbox, None).examine(sifted)


async def test_nothing_later_than_the_base_commit_is_left(sandbox: Sandbox) -> None:
    """No branch, tag, note, stash, remote or loose object leads on, and no hook ran."""
    base = await prepare_image(sandbox, await task_of(sandbox), squash=False, hide=True, limit_s=60)
    assert base.history.commits == 2
    assert base.history.is_clean
    seen = await sandbox.bash(
        "git log --all --format=%s; git for-each-ref; git remote; git stash list; git reflog; git status -s"
    )
    assert seen.text.split() == ["base", "past", base.commit, "commit", "refs/heads/main"]
    everything = "git cat-file --batch-all-objects --batch-check='%(objectname)' | git cat-file --batch"
    found = await sandbox.bash(f"{everything} | grep -ac -e secret-word -e 'a + b'; ls /tmp/hooked")
    assert found.text.splitlines()[0] == "0"
    assert "No such file" in found.text


async def test_the_past_can_be_left_out_too(sandbox: Sandbox) -> None:
    """One commit with the base's tree."""
    base = await prepare_image(sandbox, await task_of(sandbox), squash=True, hide=True, limit_s=60)
    assert base.history.commits == 1
    assert (await sandbox.bash("cat NOTES; git log --format=%s")).text.split() == ["past", "base"]


async def test_the_agents_own_git_has_no_say_in_its_diff(sandbox: Sandbox) -> None:
    """Filters, watchers, external diffs, attributes, aliases and a path of its own change nothing."""
    base = await prepare_image(sandbox, await task_of(sandbox), squash=False, hide=True, limit_s=60)
    await sandbox.bash(
        "git config core.fsmonitor 'touch /tmp/ran;'; git config diff.external 'touch /tmp/ran;';"
        "git config filter.x.clean 'touch /tmp/ran; echo nothing'; git config core.worktree /tmp;"
        "git update-index --assume-unchanged pkg/calc.py; echo '* filter=x -diff' >.gitattributes;"
        "echo '*' >.git/info/exclude; git() { touch /tmp/ran; }; mkdir -p /tmp/bin;"
        "printf '#!/bin/sh\\ntouch /tmp/ran' >/tmp/bin/git; chmod +x /tmp/bin/git;"
        "export PATH=/tmp/bin:$PATH GIT_DIR=/tmp/none; sed -i 's/a - b/a + b/' pkg/calc.py; echo new >pkg/more.py;"
        "rm -f /tmp/ran"
    )
    diff = parse_diff(await take_diff(sandbox, base, max_bytes=1 << 20))
    assert {change.path for change in diff.changes} == {"pkg/calc.py", "pkg/more.py"}
    assert {name for name, _ in diff.refused} == {".gitattributes"}
    assert (await sandbox.bash("ls /tmp/ran")).exit_code != 0


async def test_what_can_not_be_carried_is_said(sandbox: Sandbox) -> None:
    """Too much of it, and no repository any more."""
    base = await prepare_image(sandbox, await task_of(sandbox), squash=False, hide=True, limit_s=60)
    await sandbox.bash("head -c 100000 /dev/urandom >pkg/blob")
    with pytest.raises(NotCarried, match="more than 5000"):
        await take_diff(sandbox, base, max_bytes=5000)
    await sandbox.bash("rm -rf .git")
    with pytest.raises(NotCarried, match="compared"):
        await take_diff(sandbox, base, max_bytes=5000)


@pytest.mark.parametrize("grader", ["witness", "log"])
async def test_a_repair_is_seen(sandbox: Sandbox, grader: str) -> None:
    """By our witness, and by the log of the set's own script."""
    task = await task_of(sandbox, eval_script=SCRIPT)
    marks = await graded(sandbox, task, FIX, grader=grader)
    assert marks.verdict.resolved, marks
    assert (marks.verdict.f2p, marks.verdict.p2p) == (1.0, 1.0)


@pytest.mark.parametrize("grader", ["witness", "log"])
async def test_a_half_repair_is_none(sandbox: Sandbox, grader: str) -> None:
    """The parts say how far it came."""
    task = await task_of(sandbox, eval_script=SCRIPT)
    marks = await graded(sandbox, task, FIX.replace("+    return a + b", "+    return a * 1"), grader=grader)
    assert not marks.verdict.resolved
    assert (marks.verdict.f2p, marks.verdict.p2p) == (0.0, 1.0)


async def test_a_patch_that_does_not_apply_is_worth_nothing(sandbox: Sandbox) -> None:
    """And is told from one that repairs nothing."""
    marks = await graded(sandbox, await task_of(sandbox), FIX.replace("a - b", "a / b"))
    assert not marks.applied
    assert marks.verdict.why == "the patch does not apply"


@pytest.mark.parametrize(
    ("script", "words"),
    [("echo 'python3: command not found'; exit 127", "not found"), ("echo nothing", "can't be run: nothing")],
)
async def test_a_broken_environment_is_no_verdict(sandbox: Sandbox, script: str, words: str) -> None:
    """A script that fails, or tells of no test, before the patch is there."""
    task = await task_of(sandbox, eval_script=script)
    with pytest.raises(GraderError, match=words):
        await graded(sandbox, task, FIX, grader="log")


async def test_tests_of_a_script_that_do_not_end_are_timed_out(sandbox: Sandbox) -> None:
    """Its processes are gone, and the log counts for nothing."""
    task = await task_of(sandbox, eval_script="echo PASSED tests/test_calc.py::test_sum; trap '' TERM; sleep 100")
    marks = await graded(sandbox, task, FIX, grader="log", check_environment=False, test_limit_s=1.0, test_least_s=1.0)
    assert marks.verdict.timed_out


async def test_a_bug_of_swe_smith_is_put_in_and_its_tests_taken_out(sandbox: Sandbox) -> None:
    """The patch of such a row is the bug, its history would be the answer."""
    await sandbox.bash("git checkout -q v2; git checkout -qB main")
    bug = FIX.replace("-    return a - b\n+    return a + b", "-    return a + b\n+    return a - b")
    more = {"data_source": "swesmith", "image_name": "x", "patch": bug, "test_patch": "", "base_commit": None}
    task = await task_of(sandbox, **more, FAIL_TO_PASS=["tests/test_calc.py::test_zero"], PASS_TO_PASS=[])
    base = await prepare_image(sandbox, task, squash=False, hide=True, limit_s=60)
    seen = (await sandbox.bash("cat pkg/calc.py; ls tests; git log --oneline | wc -l")).text
    assert "a - b" in seen
    assert "test_calc.py" not in seen
    assert base.history.commits == 1


async def test_r2e_wants_exactly_the_statuses_that_are_written_down(sandbox: Sandbox) -> None:
    """Expected failures too; its tests and their script are not for the agent's eyes."""
    await sandbox.bash(
        f"mkdir r2e_tests; git show v2:tests/test_calc.py >r2e_tests/test_1.py;"
        f"printf 'from pkg.calc import add\\ndef test_no():\\n    assert add(1, 2) == 4\\n' >>r2e_tests/test_1.py;"
        f"printf 'cd {ROOT}; python -m pytest -rA -p no:cacheprovider r2e_tests' >run_tests.sh"
    )
    row = {
        "repo_name": "a",
        "docker_image": "namanjain12/a_final:0123",
        "commit_hash": "0123456789abcdef",
        "problem_statement": "x",
        "expected_output_json": '{"test_zero": "PASSED", "test_no": "FAILED"}',
        "patch": FIX,
    }
    task = msgspec.convert(row, SweInstance).task
    assert (await graded(sandbox, task, FIX)).verdict.resolved
    assert not (
        await graded(sandbox, task, FIX.replace("+    return a + b", "+    return a + b + (b > 1)"))
    ).verdict.resolved
    await prepare_image(sandbox, task, squash=False, hide=True, limit_s=60)
    assert "run_tests.sh" not in (await sandbox.bash("ls -R")).text
