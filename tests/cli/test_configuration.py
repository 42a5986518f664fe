"""Flags as configuration, ``check-config`` and ``doctor`` on the command line."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import get_args

import pytest

from prorld.cli.configuration import BACKEND_KINDS, SANDBOX_KINDS, add_config_options, backend, flags_of, load_of
from prorld.cli.doctor import line
from prorld.cli.jobs import STATES
from prorld.cli.output import Style
from prorld.domain.job import JobState
from prorld.ops.findings import Finding
from prorld.sandbox.kinds import KINDS
from prorld.wire.ops import BackendKindName


def parse(*argv):
    parser = argparse.ArgumentParser()
    add_config_options(parser)
    return parser.parse_args(argv)


def test_every_flag_is_a_setting(tmp_path):
    """All flags at once give a configuration in which each value says that it came from the command line."""
    args = parse(
        "--host", "::1", "--port", "0", "--unix-socket", "/tmp/s", "--state-dir", str(tmp_path), "--no-auth",
        "--log-level", "error", "--log-format", "json", "--max-init-workers", "1", "--max-run-workers", "2",
        "--max-eval-workers", "3", "--backend", "vllm=http://a:1", "--backend", "llamacpp=http://b:2", "--embedded",
        "--compat-bind", "127.0.0.1:0", "--compat-open", "--timeout", "9",
    )  # fmt: skip
    loaded = load_of(args, {"HOME": str(tmp_path)})
    config = loaded.config
    assert set(loaded.origins) == set(flags_of(args))
    assert set(loaded.origins.values()) == {"command line"}
    assert (config.server.host, config.server.port, config.server.no_auth) == ("::1", 0, True)
    assert (config.stages.init, config.stages.run, config.stages.eval) == (1, 2, 3)
    assert [(entry.kind, entry.url) for entry in config.backends] == [
        ("vllm", "http://a:1"),
        ("llamacpp", "http://b:2"),
    ]
    assert config.embedded_engine


def test_no_flag_changes_nothing(tmp_path):
    """Flags that were not given leave file and environment alone."""
    loaded = load_of(parse(), {"HOME": str(tmp_path), "PRORLD__SERVER__PORT": "7"})
    assert loaded.config.server.port == 7
    assert set(loaded.origins) == {"server.port"}


@pytest.mark.parametrize("text", ["http://a", "vllm", "vllm=a:1", "gpt=http://a"])
def test_a_wrong_engine_is_refused(text):
    """KIND=URL, nothing else."""
    with pytest.raises(argparse.ArgumentTypeError, match="KIND"):
        backend(text)


def test_words_that_are_written_out_are_those_of_the_contract():
    """Names repeated for a quick start have not drifted away."""
    assert set(BACKEND_KINDS) == set(get_args(BackendKindName))
    assert SANDBOX_KINDS == KINDS
    assert set(STATES) == {state.value for state in JobState}


def test_check_config_names_value_and_origin(cli, tmp_path):
    """What is in force and since where; only changes on request; JSON for scripts."""
    file = tmp_path / "p.toml"
    file.write_text("[stages]\nrun = 5\n")
    code, out, _ = cli("check-config", "--config", str(file), "--port", "1", "--changed")
    assert code == 0
    assert ["server.port", "1", "command", "line"] in [row.split() for row in out.splitlines()]
    assert ["stages.run", "5", str(file)] in [row.split() for row in out.splitlines()]
    assert "log.level" not in out
    _, out, _ = cli("check-config", "--config", str(file), "--json")
    rows = {row["path"]: row for row in json.loads(out)["settings"]}
    assert rows["stages.run"] == {"path": "stages.run", "value": 5, "origin": str(file)}
    assert rows["log.level"]["origin"] == "default"


def test_check_config_explains_every_setting(cli):
    """The whole reference, for people and for scripts."""
    code, out, _ = cli("check-config", "--explain")
    assert code == 0
    assert "timeouts.drain_s" in out
    _, out, _ = cli("check-config", "--explain", "--json")
    assert {"path", "kind", "default", "description"} <= set(json.loads(out)[0])


def test_check_config_refuses_what_can_not_work(tmp_path):
    """Handlers that were asked for and tokenizers are looked at before a restart meets them, each told on one line."""
    file = tmp_path / "p.toml"
    file.write_text(
        '[handlers]\nenabled = ["nowhere", "bench"]\n[handlers.config.bench]\nno_such_setting = 1\n'
        '[policies.default]\ntokenizer = "/nowhere/tok"\n'
    )
    # A process of its own: what it logs is silenced for good.
    argv = [sys.executable, "-m", "prorld.cli", "check-config", "--config", str(file)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (78, "")
    for words in ("no installed distribution has a handler nowhere", "no_such_setting", "/nowhere/tok"):
        assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["check-config", "serve", "doctor"])
def test_a_wrong_configuration_ends_with_78(cli, tmp_path, command):
    """A name that is not a setting is one line with its place."""
    file = tmp_path / "p.toml"
    file.write_text("[stages]\nrum = 5\n")
    code, out, err = cli(command, "--config", str(file))
    assert (code, out) == (78, "")
    assert "stages.rum" in err
    assert err.count("\n") == 1


def test_a_finding_is_one_line_with_its_cure():
    """However long the trouble is."""
    text = line(Finding(name="disk", state="fail", message="no\nroom", cure="make some"), Style(on=False))
    assert text == "FAIL  disk              no room; make some"
