"""What the tests run with: the interpreter, the environment and the arguments of pytest."""

from __future__ import annotations

from typing import Final

from prorld.handlers import GraderError, Sandbox
from prorld_swe.repository import ROOT
from prorld_swe.task import SweTask

__all__ = ["ARGUMENTS", "environment", "find_python", "roots"]

# The repository's own options of the command line are set aside, and a failure never ends a run.
ARGUMENTS: Final = (
    "-p",
    "no:cacheprovider",
    "-p",
    "no:randomly",
    "-o",
    "addopts=",
    "--rootdir",
    ROOT,
    "--maxfail=0",
    "--continue-on-collection-errors",
    "-q",
    "--tb=short",
    "--color=no",
)
_PYTHONS: Final = (f"{ROOT}/.venv/bin/python", "/opt/miniconda3/envs/testbed/bin/python")
_FIND: Final = """
for python in {places} "$(command -v python3)" "$(command -v python)"; do
    if [ -x "$python" ] && (cd / && "$python" -I -c 'import pytest') >/dev/null 2>&1; then echo "$python"; break; fi
done
"""


async def find_python(sandbox: Sandbox, *, image: bool) -> str:
    """The first interpreter that has pytest; ``GraderError`` where there is none."""
    places = " ".join(_PYTHONS) if image else ""
    found = (await sandbox.bash(_FIND.format(places=places), limit_s=60.0)).text.strip().splitlines()
    if not found or not found[-1].startswith("/"):
        raise GraderError("the grading sandbox has no Python with pytest", code="environment")
    return found[-1]


def roots(task: SweTask) -> list[str]:
    """Where the tested code is imported from, in the sandbox."""
    named = task.python_path or (".",)
    return [ROOT if path in {"", "."} else f"{ROOT}/{path}" for path in dict.fromkeys(named)]


def environment(task: SweTask, python: str) -> dict[str, str]:
    """All that the tests find in their environment; nothing of it is a secret."""
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"} if task.shape == "mutation" else {}
    return {
        "PATH": f"{python.rpartition('/')[0]}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/tmp",  # noqa: S108 - of the sandbox
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        **alone,
    }
