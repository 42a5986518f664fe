"""Completion: made from the parser, and what a real shell makes of it."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from prorld.cli.completion import SHELLS, walk
from prorld.cli.main import COMMANDS, build_parser


def completed(cli, *words):
    """What bash offers for the last word."""
    _, script, _ = cli("completion", "bash")
    line = " ".join(f"'{word}'" for word in words)
    asked = f'{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _prorld; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_option_is_in_the_script(cli, shell):
    """Nothing is kept by hand, so nothing can be forgotten."""
    code, script, _ = cli("completion", shell)
    assert code == 0
    places = [*walk(build_parser())]
    for place in places:
        for option in place.options:
            for name in option.names:
                assert name in script or f"-l {name[2:]}" in script or f"-s {name[1:]}" in script, (place.path, name)
    assert {place.path[0] for place in places if place.path} == set(COMMANDS)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_reads_it(cli, shell):
    """The syntax is the shell's."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine")
    _, script, _ = cli("completion", shell)
    subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_bash_offers_commands(cli):
    """At the start, all of them, and those that begin as typed."""
    assert set(COMMANDS) <= completed(cli, "prorld", "")
    assert completed(cli, "prorld", "stat") == {"status"}


def test_bash_offers_what_belongs_to_the_command(cli):
    """Options of the command that was typed, of its own actions too, and of no other."""
    assert completed(cli, "prorld", "jobs", "--wa") == {"--watch"}
    assert completed(cli, "prorld", "status", "--wa") == set()
    assert completed(cli, "prorld", "plugin", "") >= {"new", "check"}
    assert completed(cli, "prorld", "plugin", "check", "--san") == {"--sandbox"}
    assert completed(cli, "prorld", "jobs", "--address", "x", "--limi") == {"--limit"}


def test_bash_offers_values(cli):
    """Where an option has few, those; where it takes something of the user's own, nothing."""
    assert completed(cli, "prorld", "jobs", "--state", "r") == {"running"}
    assert completed(cli, "prorld", "completion", "") >= set(SHELLS)
    assert completed(cli, "prorld", "jobs", "--group", "") == set()


def test_bash_offers_files(cli, tmp_path, monkeypatch):
    """For arguments that name one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text(json.dumps({}))
    assert "tasks.jsonl" in completed(cli, "prorld", "run", "ta")
    assert "tasks.jsonl" in completed(cli, "prorld", "serve", "--config", "ta")
