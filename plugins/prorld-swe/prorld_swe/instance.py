"""The instance: a repository with something wrong in it, in the shapes that the published sets have.

``SweInstance`` takes every shape as it is published; ``SweInstance.task`` is what all of them say, in one form.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from prorld_swe.task import Sdist, SweTask, make_task

__all__ = ["Difficulty", "Metadata", "Sdist", "SweInstance", "WrappedRow"]

TEXT_CHARS = 4 << 20
IDS_MAX = 100_000

Text = Annotated[str, Meta(max_length=TEXT_CHARS)]
Line = Annotated[str, Meta(min_length=1, max_length=500)]
TestId = Annotated[str, Meta(min_length=1, max_length=4_000)]
# Both are published: a list, and a list written as JSON.
TestIds = Annotated[list[TestId], Meta(max_length=IDS_MAX)] | Annotated[str, Meta(max_length=64 << 20)]
Path = Annotated[str, Meta(min_length=1, max_length=1_000, pattern=r"^[^/\x00-\x1f][^\x00-\x1f]*$")]
Paths = Annotated[list[Path], Meta(max_length=10_000)]


class Difficulty(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of how hard a made task is, before any policy has tried it."""

    operator: str = ""
    f2p: int = 0
    p2p: int = 0
    changed_lines: int = 0
    depth: int = 0
    file_lines: int = 0


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """What NeMo Gym's rows say beside the row they wrap."""

    image: str | None = None


class WrappedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row that another one wraps: SWE-Gym's in SkyRL's and NeMo Gym's files."""

    instance_id: Line
    repo: Line
    base_commit: Line
    problem_statement: Text
    FAIL_TO_PASS: TestIds
    PASS_TO_PASS: TestIds = []
    patch: Text = ""
    test_patch: Text = ""
    hints_text: Text = ""
    version: str = ""
    setup_script: Text | None = None
    test_script: Text | None = None
    regression_script: Text | None = None


class SweInstance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A repository, what is wrong with it, and the tests that say so.

    SWE-bench, SWE-Gym: ``instance_id`` to ``PASS_TO_PASS``, with ``image``, ``eval_script`` and ``log_parser`` in the
    later form. SkyRL and NeMo Gym: ``instance`` wraps such a row. R2E: ``docker_image`` and ``expected_output_json``.
    SWE-smith: ``image_name``, and ``patch`` is the bug. Mutation: ``sdist`` and ``bug_patch``. What else a row has is
    not looked at.
    """

    data_source: str = ""
    instance_id: Line | None = None
    repo: Line | None = None
    version: str | float | int | None = None
    base_commit: Line | None = None
    patch: Text | None = None
    test_patch: Text | None = None
    problem_statement: Text | None = None
    hints_text: Text | None = None
    FAIL_TO_PASS: TestIds | None = None
    PASS_TO_PASS: TestIds | None = None
    created_at: str | None = None
    environment_setup_commit: str | None = None

    image: Line | None = None
    eval_script: Text | None = None
    log_parser: Line | None = None
    eval_type: str | None = None

    instance: WrappedRow | None = None
    metadata: Metadata | None = None

    repo_name: Line | None = None
    docker_image: Line | None = None
    commit_hash: Line | None = None
    parsed_commit_content: Text | dict[str, Any] | None = None
    expected_output_json: Text | dict[str, str] | None = None

    image_name: Line | None = None

    sdist: Sdist | None = None
    bug_patch: Text | None = None
    # The files that hold the expected tests, and those of them that the agent does not see.
    test_files: Paths = []
    hidden_files: Paths = []
    pytest_args: Annotated[list[Annotated[str, Meta(max_length=1_000)]], Meta(max_length=64)] = []
    python_path: Annotated[list[Annotated[str, Meta(max_length=200)]], Meta(max_length=8)] = []
    test_limit_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    suite_s: Annotated[float, Meta(ge=0, le=86_400)] | None = None
    difficulty: Difficulty | str | None = None

    def __post_init__(self) -> None:
        make_task(self)

    @property
    def task(self) -> SweTask:
        """The same in one form."""
        return make_task(self)
