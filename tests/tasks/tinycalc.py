"""A small package of our own with a bug, as a distribution in a cache of packages, and the task to repair it."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

__all__ = ["row_of", "write_sdist"]

CALC = '''"""Sums."""


def add(one, other):
    """The sum."""
    return one + other


def scale(value, factor):
    """The product."""
    result = value * factor
    return result
'''
FILES = {
    "PKG-INFO": "Metadata-Version: 2.1\nName: tinycalc\nVersion: 1.0\n",
    "pyproject.toml": (
        '[project]\nname = "tinycalc"\nversion = "1.0"\n\n[tool.pytest.ini_options]\naddopts = "-x --nothing"\n'
    ),
    "src/tinycalc/__init__.py": "from tinycalc.calc import add, scale\n",
    "src/tinycalc/calc.py": CALC,
    "tests/test_add.py": (
        "import pytest\nfrom tinycalc import add\n\n\n"
        "@pytest.mark.parametrize('one', [1, 2])\ndef test_add(one):\n    assert add(one, 3) == one + 3\n"
    ),
    "tests/test_scale.py": (
        "import unittest\nfrom tinycalc import add, scale\n\n\n"
        "def test_scale():\n    assert scale(2, 3) == 6\n\n\n"
        "class TestScale(unittest.TestCase):\n    def test_zero(self):\n        self.assertEqual(scale(2, 0), 0)\n"
        "        self.assertEqual(add(1, 0), 1)\n"
    ),
}
PATCH = (
    "diff --git a/src/tinycalc/calc.py b/src/tinycalc/calc.py\n"
    "--- a/src/tinycalc/calc.py\n"
    "+++ b/src/tinycalc/calc.py\n"
    "@@ -3,7 +3,7 @@\n"
    " \n"
    " def add(one, other):\n"
    '     """The sum."""\n'
    "-    return one {0} other\n"
    "+    return one {1} other\n"
    " \n"
    " \n"
    " def scale(value, factor):\n"
)


def write_sdist(packages: Path) -> Path:
    """The distribution, in this cache of packages."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, text in FILES.items():
            info = tarfile.TarInfo(f"tinycalc-1.0/{name}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    data = packed.getvalue()
    place = packages / hashlib.sha256(data).hexdigest()
    place.mkdir(parents=True)
    path = place / "tinycalc-1.0.tar.gz"
    path.write_bytes(data)
    return path


def row_of(sdist: Path) -> dict[str, Any]:
    """The instance of that distribution with its bug."""
    return {
        "data_source": "mutation",
        "instance_id": "tinycalc-1.0__add",
        "repo": "pypi/tinycalc",
        "version": "1.0",
        "base_commit": "bug",
        "sdist": {"package": "tinycalc", "version": "1.0", "filename": sdist.name, "sha256": sdist.parent.name},
        "bug_patch": PATCH.format("+", "-"),
        "patch": PATCH.format("-", "+"),
        "test_patch": "",
        "test_files": ["tests/test_add.py", "tests/test_scale.py"],
        "hidden_files": ["tests/test_add.py"],
        "pytest_args": [],
        "python_path": ["src"],
        "test_limit_s": 60.0,
        "suite_s": 0.1,
        "FAIL_TO_PASS": ["tests/test_add.py::test_add[1]", "tests/test_add.py::test_add[2]"],
        "PASS_TO_PASS": ["tests/test_scale.py::test_scale", "tests/test_scale.py::TestScale::test_zero"],
        "problem_statement": "Sums are wrong.",
        "hints_text": "",
        "image": None,
        "difficulty": {"operator": "arithmetic", "f2p": 2, "p2p": 2, "changed_lines": 1},
        "created_at": "2026-01-01T00:00:00Z",
    }
