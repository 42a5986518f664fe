"""A kept bug as an instance of the handler ``swe``: what it is made from, by hash, and what a grade of it needs."""

from __future__ import annotations

from typing import Any

import msgspec

from prorld.handlers import Impossible
from prorld_swe.factory.baseline import Baseline
from prorld_swe.factory.candidates import Bug
from prorld_swe.factory.layout import name_and_version
from prorld_swe.factory.tree import Tree
from prorld_swe.factory.trial import Trial
from prorld_swe.factory.wording import Subject, problem_statement
from prorld_swe.instance import SweInstance

__all__ = ["Origin", "row_of"]

TEST_LIMIT_LEAST_S = 60.0


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """A source distribution by name, version and hash."""

    name: str
    version: str
    filename: str
    sha256: str

    @classmethod
    def of(cls, filename: str, sha256: str) -> Origin:
        """By its file's name. Raises ``Impossible`` where that says no name and version."""
        name, version = name_and_version(filename)
        return cls(name=name, version=version, filename=filename, sha256=sha256)


def row_of(
    origin: Origin, tree: Tree, bug: Bug, trial: Trial, baseline: Baseline, *, image: str | None, made: str
) -> dict[str, Any]:
    """The row, decoded as the handler does before it is handed out. Raises ``Impossible`` where it is none."""
    operator = "+".join(bug.candidate.operators)
    statement = problem_statement(
        Subject(package=origin.name, version=origin.version, bug=bug, f2p=trial.f2p, messages=trial.messages)
    )
    files = sorted({test.split("::", 1)[0] for test in (*trial.f2p, *trial.p2p)})
    row: dict[str, Any] = {
        "data_source": "mutation",
        # A digest alone tells bugs apart: a name that says what was done would say how to undo it.
        "instance_id": f"{origin.name}__{origin.version}.{bug.name}",
        "repo": f"pypi/{origin.name}",
        "version": origin.version,
        "base_commit": "bug",
        "sdist": {
            "package": origin.name,
            "version": origin.version,
            "filename": origin.filename,
            "sha256": origin.sha256,
        },
        "bug_patch": bug.patch,
        "patch": bug.gold,
        "test_patch": "",
        "test_files": files,
        "hidden_files": sorted({test.split("::", 1)[0] for test in trial.f2p}),
        "pytest_args": list(baseline.plan.args),
        "python_path": list(baseline.plan.python_path),
        "test_limit_s": round(max(TEST_LIMIT_LEAST_S, 10 * baseline.suite_s), 1),
        "suite_s": baseline.suite_s,
        "FAIL_TO_PASS": list(trial.f2p),
        "PASS_TO_PASS": list(trial.p2p),
        "problem_statement": statement.text,
        "hints_text": "",
        "image": image,
        "difficulty": {
            "operator": operator,
            "f2p": len(trial.f2p),
            "p2p": len(trial.p2p),
            "changed_lines": bug.changed_lines,
            "bugs": len(bug.candidate.operators),
            "file_lines": tree.files[bug.candidate.path].count(b"\n"),
            "depth": max(name.count(".") + 1 for name in bug.candidate.functions),
            "hint": statement.hint,
            "suite_s": baseline.suite_s,
            "tests": len(baseline.stable),
        },
        "created_at": made,
    }
    try:
        msgspec.convert(row, SweInstance)
    except msgspec.ValidationError as exc:
        raise Impossible(f"what was made of {origin.filename} is no instance: {exc}") from exc
    return row
