"""A small file of the state directory that can't be read is nothing to go on without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from prorld.store.engine_file import ENGINE_FILE
from prorld.store.policy_file import POLICY_FILE
from tests.daemon.support import environ

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "content"),
    [(POLICY_FILE, '{"schema": 1, "policies": [{'), (ENGINE_FILE, '{"schema": 1, "engines": [{')],
)
def test_a_damaged_file_ends_the_start(tmp_path: Path, name: str, content: str) -> None:
    """Exit code 78, the file by its name, and not a byte of it changed."""
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    (state / name).write_text(content)
    command = [sys.executable, "-m", "prorld.cli", "serve", "--port", "0", "--no-embedded"]
    ended = subprocess.run(command, env=environ(state), capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 78, ended.stderr
    assert str(state / name) in ended.stderr
    assert (state / name).read_text() == content
