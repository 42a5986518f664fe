"""Pauses and versions of a real daemon, which is killed in between, by the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prorld.cli.main import main
from prorld.client import ClientError
from prorld.testing.scripted_engine.script import Latency, Script
from prorld.wire.policies import PutPolicy
from tests.daemon.support import Started, daemon, scripted_engine, until

pytestmark = pytest.mark.slow

SCRIPT = Script(turns=["hello"], latency=Latency(reload_s=0.2))


def prorld(here: Started, *argv: str) -> int:
    """A command on the daemon of the test."""
    return main([*argv, "--state-dir", str(here.state)])


def up(here: Started) -> bool:
    """Whether its engine has joined."""
    with here.client() as client:
        return [info.state for info in client.backends().items] == ["up"]


def test_an_id_of_an_earlier_life_is_no_engine(tmp_path: Path) -> None:
    """A removal that is sent again after a restart takes out nobody else."""
    with scripted_engine(tmp_path, SCRIPT) as engine:
        with daemon(tmp_path, engine) as here, here.client() as client:
            until(lambda: up(here), 20, "the engine has joined")
            [before] = client.backends().items
        with daemon(tmp_path, engine) as here, here.client() as client:
            until(lambda: up(here), 20, "the engine has joined")
            assert client.status().boot_id in client.backends().items[0].backend_id
            with pytest.raises(ClientError) as caught:
                client.remove_backend(before.backend_id)
            assert caught.value.status == 404
            assert len(client.backends().items) == 1


def test_a_pause_and_a_version_survive_a_kill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The next daemon has the version, the policies and the pause, and names its holder until an admin resumes."""
    with scripted_engine(tmp_path, SCRIPT) as engine:
        with daemon(tmp_path, engine) as here:
            until(lambda: up(here), 20, "the engine has joined")
            assert prorld(here, "policies", "update", "default", "--version", "3", "--path", "/weights/3") == 0
            assert "default to version 3: done" in capsys.readouterr().out
            assert prorld(here, "policies", "set", "mine", "--max-staleness", "2") == 0
            assert prorld(here, "policies", "pause", "default", "--mode", "keep", "--json") == 0
            here.process.kill()
            here.process.wait()
        with daemon(tmp_path, engine) as here, here.client() as client:
            until(lambda: up(here), 20, "the engine has joined")
            missing = {item.code: item.message for item in client.ready().missing}
            assert "paused by default" in missing["policy_paused"]
            capsys.readouterr()
            assert prorld(here, "policies", "list", "--json") == 0
            found = {item["name"]: item for item in json.loads(capsys.readouterr().out)}
            assert (found["default"]["version"], found["default"]["pause"]["mode"]) == (3, "keep")
            assert found["mine"]["max_staleness"] == 2
            assert prorld(here, "policies", "update", "default", "--version", "4", "--how", "none") == 1
            assert "is paused by" in capsys.readouterr().err
            assert prorld(here, "policies", "resume", "default") == 0
            [info] = client.backends().items
            assert f"default goes on with version 3\n  {info.backend_id}: ok" in capsys.readouterr().out
            assert "policy_paused" not in {item.code for item in client.ready().missing}
            assert prorld(here, "policies", "resume", "default") == 1
            assert prorld(here, "policies", "list") == 0
            assert "serving" in capsys.readouterr().out
            assert client.put_policy("mine", PutPolicy(max_staleness=None)).max_staleness is None
