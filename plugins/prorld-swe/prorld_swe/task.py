"""What every shape of instance says, in one form: where the repository is, what is asked, and which tests judge it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from prorld_swe.instance import SweInstance, WrappedRow

__all__ = ["TEST_LIMIT_S", "Sdist", "SweTask", "make_task"]

# For a whole run of the tests, where the instance does not say: the field's own budget.
TEST_LIMIT_S = 1_800.0
_DIFF_FILE = re.compile(r"^diff --git a/(.+?) b/(.+)$", re.MULTILINE)

Shape = Literal["swebench", "wrapped", "r2e", "swesmith", "mutation"]


class Sdist(msgspec.Struct, frozen=True, kw_only=True):
    """A source distribution of the package index, by its hash."""

    package: Annotated[str, Meta(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?$")]
    version: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9.!+_-]{0,63}$")]
    filename: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9.!+_-]{0,198}$")]
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]


class SweTask(msgspec.Struct, frozen=True, kw_only=True):
    """One task. ``gold`` solves it, undone where ``gold_reversed``.

    ``expected`` is the status of every test, where the set asks for just that.
    """

    shape: Shape
    instance_id: str
    repo: str
    base_commit: str
    problem: str
    gold: str
    gold_reversed: bool = False
    test_patch: str = ""
    f2p: tuple[str, ...] = ()
    p2p: tuple[str, ...] = ()
    expected: dict[str, str] = {}
    test_files: tuple[str, ...] = ()
    hidden_files: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    eval_script: str | None = None
    log_parser: str = "pytest"
    sdist: Sdist | None = None
    bug_patch: str = ""
    pytest_args: tuple[str, ...] = ()
    python_path: tuple[str, ...] = ()
    limit_s: float = TEST_LIMIT_S
    suite_s: float | None = None

    @property
    def tests(self) -> tuple[str, ...]:
        """Every test that has to pass."""
        return (*self.f2p, *self.p2p)


def make_task(row: SweInstance) -> SweTask:
    """The task of an instance; ``ValueError`` names what is missing of it or contradicts itself."""
    if row.sdist is not None or row.bug_patch is not None:
        return _mutation(row)
    if row.instance is not None:
        return _wrapped(row, row.instance)
    if row.expected_output_json is not None or (row.docker_image is not None and row.FAIL_TO_PASS is None):
        return _r2e(row)
    return _swebench(row)


def _mutation(row: SweInstance) -> SweTask:
    if row.sdist is None:
        raise ValueError("a mutation needs sdist")
    if not row.bug_patch or not row.patch:
        raise ValueError("a mutation needs bug_patch and patch")
    f2p, p2p = _ids("FAIL_TO_PASS", row.FAIL_TO_PASS), _ids("PASS_TO_PASS", row.PASS_TO_PASS)
    _disjoint(f2p, p2p)
    for name, paths in (("test_files", row.test_files), ("hidden_files", row.hidden_files)):
        _inside(name, paths)
    _inside("python_path", [path for path in row.python_path if path != "."])
    files = {test.split("::", 1)[0] for test in (*f2p, *p2p)}
    if missing := sorted(files - set(row.test_files)):
        raise ValueError(f"test_files lacks {missing[0]}, which an expected test is in")
    if stray := sorted(set(row.hidden_files) - set(row.test_files)):
        raise ValueError(f"hidden_files has {stray[0]}, which is not in test_files")
    return SweTask(
        shape="mutation",
        instance_id=_need("instance_id", row.instance_id),
        repo=row.repo or f"pypi/{row.sdist.package}",
        base_commit="HEAD",
        problem=_need("problem_statement", row.problem_statement),
        gold=row.patch,
        f2p=f2p,
        p2p=p2p,
        test_files=tuple(row.test_files),
        hidden_files=tuple(row.hidden_files),
        images=(row.image,) if row.image else (),
        sdist=row.sdist,
        bug_patch=row.bug_patch,
        pytest_args=tuple(row.pytest_args),
        python_path=tuple(row.python_path),
        limit_s=row.test_limit_s or TEST_LIMIT_S,
        suite_s=row.suite_s,
    )


def _swebench(row: SweInstance) -> SweTask:
    f2p, p2p = _ids("FAIL_TO_PASS", row.FAIL_TO_PASS), _ids("PASS_TO_PASS", row.PASS_TO_PASS, empty=True)
    _disjoint(f2p, p2p)
    smith = row.image_name is not None or row.data_source.startswith("swesmith")
    return SweTask(
        shape="swesmith" if smith else "swebench",
        instance_id=_need("instance_id", row.instance_id),
        repo=_need("repo", row.repo),
        base_commit=(row.base_commit or "HEAD") if smith else _need("base_commit", row.base_commit),
        problem=_need("problem_statement", row.problem_statement),
        gold=row.patch or "",
        gold_reversed=smith,
        test_patch=row.test_patch or "",
        f2p=f2p,
        p2p=p2p,
        test_files=_test_files(row.test_patch or "", (*f2p, *p2p)),
        hidden_files=tuple(sorted({test.split("::", 1)[0] for test in f2p if "::" in test})) if smith else (),
        images=tuple(name for name in (row.image, row.image_name, row.docker_image) if name),
        eval_script=row.eval_script,
        log_parser=row.log_parser or _parser_of(row.repo or ""),
        limit_s=row.test_limit_s or TEST_LIMIT_S,
    )


def _wrapped(row: SweInstance, inner: WrappedRow) -> SweTask:
    f2p, p2p = _ids("FAIL_TO_PASS", inner.FAIL_TO_PASS), _ids("PASS_TO_PASS", inner.PASS_TO_PASS, empty=True)
    _disjoint(f2p, p2p)
    image = row.image or (row.metadata.image if row.metadata is not None else None)
    scripts = [script for script in (inner.setup_script, inner.test_script) if script]
    return SweTask(
        shape="wrapped",
        instance_id=inner.instance_id,
        repo=inner.repo,
        base_commit=inner.base_commit,
        problem=inner.problem_statement,
        gold=inner.patch,
        test_patch=inner.test_patch,
        f2p=f2p,
        p2p=p2p,
        test_files=_test_files(inner.test_patch, (*f2p, *p2p)),
        images=(image,) if image else (),
        eval_script=inner.test_script if scripts else None,
        log_parser=_parser_of(inner.repo),
        limit_s=row.test_limit_s or TEST_LIMIT_S,
    )


def _r2e(row: SweInstance) -> SweTask:
    image = _need("docker_image", row.docker_image)
    commit = row.commit_hash or row.base_commit or image.rpartition(":")[2]
    given = row.expected_output_json
    try:
        expected = json.loads(given) if isinstance(given, str) else given
    except ValueError as exc:
        raise ValueError(f"expected_output_json is no JSON: {exc}") from None
    if not isinstance(expected, dict) or not expected:
        raise ValueError("expected_output_json is no object with a status for each test")
    statuses: dict[str, str] = {str(name): str(status) for name, status in expected.items()}
    repo = _need("repo_name", row.repo_name or row.repo)
    return SweTask(
        shape="r2e",
        instance_id=row.instance_id or f"{repo}__{commit[:12]}",
        repo=repo,
        base_commit="HEAD",
        problem=_need("problem_statement", row.problem_statement),
        gold=row.patch or "",
        expected=statuses,
        images=(image,),
        eval_script=row.eval_script,
        log_parser="r2e",
        limit_s=row.test_limit_s or TEST_LIMIT_S,
    )


def _need(name: str, value: str | None) -> str:
    if not value:
        raise ValueError(f"{name} is needed")
    return value


def _ids(name: str, given: Sequence[str] | str | None, *, empty: bool = False) -> tuple[str, ...]:
    decoded: Any = given
    if isinstance(given, str):
        try:
            decoded = json.loads(given)
        except ValueError as exc:
            raise ValueError(f"{name} is no JSON: {exc}") from None
    if decoded is None:
        decoded = []
    if not isinstance(decoded, list) or not all(isinstance(each, str) and each for each in decoded):
        raise ValueError(f"{name} is no list of names of tests")
    if not decoded and not empty:
        raise ValueError(f"{name} names no test")
    # Some published rows name a test twice; it is one test.
    return tuple(dict.fromkeys(decoded))


def _disjoint(f2p: Sequence[str], p2p: Sequence[str]) -> None:
    if both := sorted(set(f2p) & set(p2p)):
        raise ValueError(f"{both[0]} is in FAIL_TO_PASS and in PASS_TO_PASS")


def _inside(name: str, paths: Sequence[str]) -> None:
    for path in paths:
        if path.startswith("/") or any(part in {"", ".", "..", ".git"} for part in path.split("/")):
            raise ValueError(f"{name} has {path[:100]!r}, which is no plain path below the repository")


def _test_files(test_patch: str, tests: Sequence[str]) -> tuple[str, ...]:
    named = {new for _, new in _DIFF_FILE.findall(test_patch)}
    named |= {test.split("::", 1)[0] for test in tests if "::" in test}
    return tuple(sorted(path for path in named if not path.startswith("/") and ".." not in path.split("/")))


def _parser_of(repo: str) -> str:
    return {"django/django": "django", "sympy/sympy": "sympy"}.get(repo, "pytest")
