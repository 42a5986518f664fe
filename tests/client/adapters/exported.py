"""What a daemon exports of a trainer's rollouts, in the classes of all the other trainers."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prorld.export.names import FORMATS
from prorld.export.reading import as_chat
from prorld.wire.trajectory import Trajectory
from tests.daemon.support import Started, environ
from tests.export.loading import LOADERS, Loaded, Row, chat_rows, expected

CALL_S = 60.0
CLI_S = 120.0


def documents(here: Started, job_ids: Sequence[str]) -> list[Trajectory]:
    """The rollouts' own records."""
    with here.client() as client:
        return [client.trajectory(job_id) for job_id in job_ids]


def asked_for(here: Started, job_id: str, form: str) -> list[Row]:
    """The rows of one rollout, over HTTP."""
    address = json.loads((here.state / "endpoint.json").read_text())["address"]
    token = (here.state / "token").read_text().strip()
    asked = urllib.request.Request(
        f"{address}/v1/jobs/{job_id}/trajectory?format={form}", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(asked, timeout=CALL_S) as answer:
        rows: list[Row] = json.load(answer)["rows"]
    return rows


def written(here: Started, job_ids: Sequence[str], form: str, place: Path) -> list[Row]:
    """The rows of all of them, as the command line writes them."""
    out = place / f"{form}.jsonl"
    jobs = [word for job_id in job_ids for word in ("--job", job_id)]
    command = [sys.executable, "-m", "prorld.cli", "export", *jobs, "--format", form, "-o", str(out)]
    done = subprocess.run(command, env=environ(here.state), capture_output=True, text=True, timeout=CLI_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in out.read_text().splitlines()]


def assert_every_trainer_has_them(here: Started, job_ids: Sequence[str], place: Path) -> list[str]:
    """Each format of each rollout is loaded, and holds what the rollout's own record says; a line for each format."""
    found = documents(here, job_ids)
    assert found
    told = []
    for form in FORMATS:
        rows = {one.job.job_id: asked_for(here, one.job.job_id, form) for one in found}
        # The other door says the same, a rollout after the other.
        assert _alike(written(here, job_ids, form, place)) == _alike([row for each in rows.values() for row in each])
        told.append(_loaded(form, found, rows))
    return told


def _loaded(form: str, found: Sequence[Trajectory], rows: dict[str, list[Row]]) -> str:
    count = sum(map(len, rows.values()))
    if form == "chat":
        _assert_said(found, rows)
        return f"chat: datasets and TRL's is_conversational, {count} rows"
    loader = LOADERS[form]
    loaded: list[Loaded] = []
    for one in found:
        own = loader.load(one, rows[one.job.job_id])
        assert sorted(own) == sorted(expected(one, to_the_end=loader.to_the_end)), (form, one.job.job_id)
        loaded += own
    sampled = sum(sum(one.mask) for one in loaded)
    return f"{form}: {loader.package or 'no package'} {loader.version}, {loader.what}, {count} rows, {sampled} sampled"


def _assert_said(found: Sequence[Trajectory], rows: dict[str, list[Row]]) -> None:
    """Conversations have no tokens: what the policy said, its weight, and the reward."""
    lines = chat_rows([row for each in rows.values() for row in each])
    # Examples in a prompt are told, and have no weight.
    told = [(line["reward"], [said["content"] for said in line["messages"] if said["weight"] == 1]) for line in lines]
    assert told == [(one.reward, _answers(one)) for one in found]


def _answers(one: Trajectory) -> list[str]:
    return [
        as_chat(segment.message)["content"]
        for branch in one.branches
        for segment in branch.segments
        if segment.source == "sampled" and segment.message is not None
    ]


def _alike(rows: Sequence[Any]) -> list[str]:
    return sorted(json.dumps(row, sort_keys=True) for row in rows)
