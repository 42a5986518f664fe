"""The grade: a fresh sandbox, the same repository, the policy's patch without what it may not touch, the tests."""

from __future__ import annotations

import secrets
from collections import Counter

import msgspec

from prorld.handlers import USED_UP, GraderError, Sandbox, SandboxError
from prorld_swe.config import SweConfig
from prorld_swe.environment import ARGUMENTS, environment, find_python, roots
from prorld_swe.findings import Finding, find, find_in_patch
from prorld_swe.judging import Verdict, judge_report
from prorld_swe.logs import check_logged, run_logged
from prorld_swe.paths import Sifted, changed_paths, without_shadows
from prorld_swe.repository import ROOT, make_repository, prepare_image
from prorld_swe.shell import GIT, run_script
from prorld_swe.sources import Tree
from prorld_swe.task import SweTask
from prorld_swe.testrun import TestReport, run_tests

__all__ = ["Examiner", "Marks"]

READ_BYTES = 4 << 20
LOOKED_AT_MAX = 2_000
APPLY_S = 120.0

# As the field tries it: plainly, then by what the patch says of its base, then with some tolerance.
_APPLY = f"""
cd {ROOT}
git() {{ command {GIT} "$@"; }}
git apply --whitespace=nowarn "$PATCH" || git apply --3way --whitespace=nowarn "$PATCH" ||
    patch --batch --forward --fuzz=5 -p1 -i "$PATCH"
"""
_RESTORE = f"""
set -e
cd {ROOT}
git() {{ command {GIT} "$@"; }}
printf '%s' "$FILES" | while IFS= read -r path; do
    if git cat-file -e "HEAD:$path" 2>/dev/null; then git checkout -q HEAD -- "$path"; fi
done
if [ -s "$PATCH" ]; then git apply --whitespace=nowarn "$PATCH"; fi
"""


# What is installed beside the repository, and what the repository has where modules are looked for.
_KNOWN = """
cd /
"$PYTHON" -I -c 'import os, sys
for path in sys.path:
    if os.path.isdir(path) and not os.path.realpath(path).startswith("{root}"):
        print("\\n".join(sorted(os.listdir(path))))'
""".replace("{root}", ROOT)
_THERE = f"""
cd {ROOT}
git() {{ command {GIT} "$@"; }}
printf '%s' "$ROOTS" | while IFS= read -r place; do git ls-tree --name-only HEAD $place; done
"""


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """What a patch came to: whether it applied, what the tests say, what was found in it."""

    applied: bool
    verdict: Verdict
    findings: tuple[Finding, ...] = ()


class Examiner:
    """Grades one patch in one fresh sandbox."""

    def __init__(self, config: SweConfig, task: SweTask, sandbox: Sandbox, tree: Tree | None) -> None:
        self._config = config
        self._task = task
        self._sandbox = sandbox
        self._tree = tree
        self._right = task.gold

    async def examine(self, sifted: Sifted) -> Marks:
        """All of it; what the sandbox or the instance lacks is a ``GraderError``."""
        baseline = await self._prepare()
        sifted = await self._without_shadows(sifted)
        if not sifted.changes:
            return Marks(applied=False, verdict=Verdict(why="nothing is left of the patch"))
        before = await self._counts(sifted)
        if not await self._apply(sifted.patch):
            return Marks(applied=False, verdict=Verdict(why="the patch does not apply"))
        findings = self._fresh(before, await self._counts(sifted))
        forbidden = [finding for finding in findings if finding in self._config.forbidden]
        if forbidden:
            why = f"the patch does what no repair needs: {', '.join(forbidden)}"
            return Marks(applied=True, verdict=Verdict(cheat=True, why=why), findings=findings)
        try:
            verdict = await self._judge(baseline)
        except SandboxError as exc:
            if exc.stable_code not in USED_UP:
                raise
            # The limits are wide for what the tests of a repository need, and these had been collected within them.
            verdict = Verdict(why=f"the tests used the sandbox up: {exc.message}", suspicious={"used_up": 1.0})
        return Marks(applied=True, verdict=verdict, findings=findings)

    # --- before anything of the policy is there ---------------------------------------------------------------------

    async def _prepare(self) -> TestReport | None:
        config, task = self._config, self._task
        try:
            if self._tree is not None:
                await make_repository(self._sandbox, task, self._tree, hide=False, limit_s=config.prepare_s)
            else:
                squash = config.history == "squash"
                await prepare_image(self._sandbox, task, squash=squash, hide=False, limit_s=config.prepare_s)
                await self._put_tests()
        except OSError as exc:
            raise GraderError(f"the grading sandbox can't be prepared: {exc}", code="environment") from exc
        self._python = "" if await self._by_log() else await find_python(self._sandbox, image=self._tree is None)
        if not config.check_environment:
            return None
        if not self._python:
            await check_logged(self._sandbox, task, parser=config.parser, limit_s=self._limit_s)
            return None
        report = await self._tests("--collect-only", limit_s=min(self._limit_s, config.prepare_s))
        self._check(report)
        return report

    def _check(self, report: TestReport) -> None:
        """The tests can be collected with the bug in place; else nothing that they say is the policy's doing."""
        if not report.signed or not report.finished:
            raise GraderError(f"the tests can't be collected: {report.tail[-300:].strip()}", code="environment")
        if not report.closed:
            raise GraderError("the runner of the tests can't be closed to other processes", code="environment")
        if report.wrong:
            raise GraderError(f"{report.wrong[0]} is not what it was published as", code="environment")
        collected = set(report.collected)
        missing = [test for test in self._task.p2p if test not in collected]
        if self._tree is not None and (missing or not collected):
            first = missing[0] if missing else "none at all is there"
            raise GraderError(f"{len(missing)} tests are not there before the patch: {first}", code="environment")

    async def _put_tests(self) -> None:
        """The tests as the set has them: those of the base commit, and its patch of tests on top."""
        task = self._task
        patch = f"/tmp/{secrets.token_hex(16)}"  # noqa: S108 - of the sandbox
        await self._sandbox.write_file(patch, task.test_patch.encode())
        files = "".join(f"{path}\n" for path in task.test_files)
        done = await run_script(self._sandbox, _RESTORE, limit_s=APPLY_S, FILES=files, PATCH=patch)
        if done.exit_code or done.timed_out:
            raise GraderError(f"the tests can't be put in place: {done.text[-300:].strip()}", code="environment")

    # --- the patch -----------------------------------------------------------------------------------------------

    async def _without_shadows(self, sifted: Sifted) -> Sifted:
        """Tests import what is installed, too: no new file of the patch may come in its place."""
        if not self._python or not any(change.kind == "added" for change in sifted.changes):
            return sifted
        places = dict.fromkeys(root.rstrip("/") for root in self._task.python_path if root not in {"", "."})
        listing = "".join(f"{place}\n" for place in ["", *(f"{place}/" for place in places)])
        known = await run_script(self._sandbox, _KNOWN, limit_s=APPLY_S, PYTHON=self._python)
        there = await run_script(self._sandbox, _THERE, limit_s=APPLY_S, ROOTS=listing)
        if known.exit_code or known.timed_out or there.exit_code or there.timed_out:
            raise GraderError("what is installed for the tests can't be listed", code="environment")
        return without_shadows(
            sifted,
            self._task.python_path,
            there=frozenset(there.text.splitlines()),
            known=frozenset(name.partition(".")[0] for name in known.text.splitlines()),
        )

    async def _apply(self, patch: bytes) -> bool:
        place = f"/tmp/{secrets.token_hex(16)}"  # noqa: S108 - of the sandbox
        await self._sandbox.write_file(place, patch)
        done = await run_script(self._sandbox, _APPLY, limit_s=APPLY_S, PATCH=place)
        return done.exit_code == 0 and not done.timed_out

    async def _counts(self, sifted: Sifted) -> Counter[Finding]:
        """What the changed programs have in them now. No tested code has run yet, so what is read is what is there."""
        counts: Counter[Finding] = Counter()
        changed = [change.path for change in sifted.changes if change.path.endswith((".py", ".pyi"))]
        for path in changed[:LOOKED_AT_MAX]:
            try:
                source = await self._sandbox.read_file(f"{ROOT}/{path}", max_bytes=READ_BYTES)
            except (OSError, ValueError):
                continue
            counts += find(source.decode("utf-8", "replace"))
        return counts

    def _fresh(self, before: Counter[Finding], after: Counter[Finding]) -> tuple[Finding, ...]:
        allowed = find_in_patch(self._right)
        return tuple(sorted(finding for finding in after - before if finding not in allowed))

    # --- the tests -----------------------------------------------------------------------------------------------

    async def _judge(self, baseline: TestReport | None) -> Verdict:
        task, config = self._task, self._config
        if not self._python:
            return await run_logged(self._sandbox, task, parser=config.parser, limit_s=self._limit_s)
        report = await self._tests(limit_s=self._limit_s)
        if report.wrong:
            # The tests were right when they were collected, and the patch does not touch them.
            raise GraderError(f"{report.wrong[0]} changed under the patch", code="environment")
        return judge_report(task, report, baseline, equal_counts="eq" in config.forbidden)

    async def _by_log(self) -> bool:
        if self._tree is not None or self._config.grader == "witness":
            return False
        if self._config.grader == "log" or self._task.shape == "r2e" or "pytest" not in self._task.log_parser:
            return True
        try:
            await find_python(self._sandbox, image=True)
        except GraderError:
            return True
        return False

    async def _tests(self, *more: str, limit_s: float) -> TestReport:
        task = self._task
        tests = [path for path in task.test_files if path.endswith(".py")]
        return await run_tests(
            self._sandbox,
            root=ROOT,
            python=self._python,
            args=[*task.pytest_args, *ARGUMENTS, *more],
            tests=tests,
            path=roots(task),
            env=environment(task, self._python),
            pinned=self._pinned(),
            limit_s=limit_s,
        )

    def _pinned(self) -> dict[str, str | None]:
        if self._tree is None:
            return {}
        free = changed_paths(self._right) - set(self._task.test_files)
        return {path: digest for path, digest in self._tree.pinned.items() if path not in free}

    @property
    def _limit_s(self) -> float:
        return min(max(self._task.limit_s, self._config.test_least_s), self._config.test_limit_s)
