"""The blocks of the page about the client, as they stand, beside a real daemon with a scripted engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from prorld.testing.scripted_engine.script import Script
from tests.examples.test_pages import HERE, block, home, typed

PAGE = "docs/client.md"

pytestmark = [pytest.mark.slow, pytest.mark.skipif("calc" not in HERE, reason="prorld-calc is not installed")]


def test_the_page(tmp_path: Path) -> None:
    """Groups both ways, weights both ways, arrays of what the first block left."""
    script = Script(turns=["ANSWER: 42", "ANSWER: 54", "ANSWER: 7"], pick="lot")
    with home(tmp_path, script) as (here, env), here.client() as client:
        python = [sys.executable, "-c"]
        synchronous = typed(tmp_path, env, python, block(PAGE, "python", 'batch_id="client-sync"'), client)
        record = client.batch("client-sync")
        assert len(synchronous) == record.groups.informative > 0
        assert record.acknowledged > 0
        typed(tmp_path, env, python, block(PAGE, "python", "AsyncClient"), client)
        assert client.batch("client-async").state != "running"
        [line] = typed(tmp_path, env, python, block(PAGE, "python", "client.publish"), client)
        [info] = client.backends().items
        assert line == f"3 {[info.backend_id]}"
        [line] = typed(tmp_path, env, python, block(PAGE, "python", "policy_update"), client)
        assert line == f"moving weights to {[info.backend_id]}"
        assert client.policy("default").version == 4
