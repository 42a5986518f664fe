"""The document says what the server does: every route is in it, its types resolve, and schemathesis finds nothing."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from prorld.http.openapi import document
from prorld.http.routing import Route
from prorld.rollout import verification
from tests.http.live import live_world
from tests.http.support import ADMIN, World

HERE = Path(__file__).parent


def operations(doc):
    """Method and path of everything in the document."""
    return {(method.upper(), path) for path, item in doc["paths"].items() for method in item}


async def test_every_route_is_in_the_document_and_the_other_way_round(nursery, world: World):
    """What the application routes and what the document names is the same."""
    await world.serve(nursery)
    doc = (await (await world.connect()).call("GET", "/openapi.json")).json
    routed = {
        (method, re.sub(r"<(\w+)>", r"{\1}", rule.rule))
        for rule in world.app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    assert operations(doc) == routed
    names = [operation["operationId"] for item in doc["paths"].values() for operation in item.values()]
    assert len(names) == len(set(names))


async def test_every_reference_resolves_and_every_schema_is_used(nursery, world: World):
    """No dangling reference, and nothing that nobody points to."""
    await world.serve(nursery)
    doc = (await (await world.connect()).call("GET", "/openapi.json")).json
    text = msgspec.json.encode(doc).decode()
    used = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert used == set(doc["components"]["schemas"])


async def test_every_path_parameter_is_declared(nursery, world: World):
    """A name in a path is a parameter of each of its operations."""
    await world.serve(nursery)
    doc = (await (await world.connect()).call("GET", "/openapi.json")).json
    for path, item in doc["paths"].items():
        for operation in item.values():
            declared = {p["name"] for p in operation["parameters"] if p["in"] == "path"}
            assert declared == set(re.findall(r"\{(\w+)\}", path)), path


def test_a_document_of_no_routes_is_one():
    """The generator asks nothing of its rows."""
    rows: list[Route] = []
    assert document(rows)["paths"] == {}


@pytest.mark.slow
async def test_schemathesis_finds_nothing(tmp_path, monkeypatch):
    """Thirty examples for each operation, valid and not: no 500, no undocumented status, no body of another shape."""
    async with live_world(hold_s_max=0.02) as world:
        # Draining is for ever, and everything after it would be refused.
        monkeypatch.setattr(world.room.supervisor, "drain", lambda: None)
        # Policies are paused at random here, and scoring again waits for them.
        monkeypatch.setattr(verification, "RESCORE_S_MAX", 1.0)
        client = await world.connect()
        for job_id in ("a", "b"):
            body: dict[str, Any] = {"job_id": job_id, "handler": "fake", "instance": {}}
            assert (await client.call("POST", "/v1/jobs", body)).status == 201
        command = [
            sys.executable, "-m", "schemathesis.cli", "--config-file", str(HERE / "schemathesis.toml"),
            "run", f"{world.server.address}/openapi.json",
            "--header", f"Authorization: Bearer {ADMIN}", "--max-examples", "30", "--seed", "1",
            "--phases", "examples,coverage,fuzzing", "--checks", "all", "--no-color", "--request-timeout", "20",
        ]  # fmt: skip
        environ = os.environ | {"SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(HERE)}
        with trio.fail_after(300):
            run = await trio.run_process(
                command, capture_stdout=True, capture_stderr=True, check=False, env=environ, cwd=tmp_path
            )
        assert run.returncode == 0, run.stdout.decode()[-30000:] + run.stderr.decode()[-2000:]
