"""Help, exit codes, errors on one line, start-up."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from itertools import takewhile

import pytest

from prorld import __version__
from prorld.cli import status
from prorld.cli.exits import Exit, UsageError, exit_of
from prorld.cli.main import COMMANDS, build_parser
from prorld.cli.parser import parsed
from prorld.client import ClientError
from prorld.errors import BadRequest, ConfigError, ProrldError

CLIENT_COMMANDS = [
    ("jobs",),
    ("show", "job-1"),
    ("cancel", "job-1"),
    ("status",),
    ("handlers",),
    ("submit", "--handler", "calc", "--instance", "{}"),
]


def python(*argv, **env):
    """A fresh interpreter."""
    environ = {"PATH": os.environ["PATH"], "HOME": "/nowhere", "PYTHONPATH": os.pathsep.join(sys.path), **env}
    return subprocess.run([sys.executable, *argv], env=environ, capture_output=True, text=True, check=False)


ACTIONS = [f"image {name}" for name in ("list", "pull", "build", "rootfs", "inspect", "rm", "gc")]
ACTIONS += ["plugin new", "plugin check", "data list", "data show", "data fetch", "data convert"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_teaches(cli, command):
    """Help of every command exits 0, shows examples of that very command and the exit codes."""
    code, out, _ = cli(command, "--help")
    assert code == 0
    assert f"prorld {command}" in out.partition("examples:")[2]
    assert "exit codes:" in out


@pytest.mark.parametrize("action", ACTIONS)
def test_actions_teach_as_commands_do(cli, action):
    """With an example of that very action."""
    code, out, _ = cli(*action.split(), "--help")
    assert code == 0
    assert f"prorld {action}" in out.partition("examples:")[2]


def test_the_list_of_commands_fits_a_terminal(cli):
    """The first help names every command on a line of its own, in 80 columns."""
    _, out, _ = cli("--help")
    for name, command in COMMANDS.items():
        assert name in out
        assert len(command.SUMMARY) <= 60


def examples(cli):
    """What every help shows to be typed, as words; what a shell keeps for itself is left out."""
    for command in [*COMMANDS, *ACTIONS]:
        _, out, _ = cli(*command.split(), "--help")
        shown = out.partition("examples:")[2].partition("exit codes:")[0]
        for line in shown.splitlines():
            typed = re.search(r"^(?:source <\(| *)\b(prorld [^#)]*)", line.strip())
            if typed is not None:
                yield [*takewhile(lambda word: word not in {"<", ">", "|", "&&"}, shlex.split(typed[1]))]


def test_every_example_can_be_typed(cli):
    """The parser takes each of them, and what follows ``--`` arrives where it is handed on."""
    found = [*examples(cli)]
    assert len(found) > 50
    for words in found:
        assert parsed(build_parser(), words[1:]).command in COMMANDS, words
    handed_on = [parsed(build_parser(), words[1:]).more for words in found if "--" in words]
    assert handed_on == [["--tensor-parallel-size", "2"]]


@pytest.mark.parametrize("command", ["backends", "policies"])
def test_a_list_needs_no_action(command):
    """The command alone, also with options of its list; its help stays its own."""
    for words in ((), ("--json",), ("--address", "h:1", "--json")):
        alone = parsed(build_parser(), (command, *words))
        assert alone == parsed(build_parser(), (command, "list", *words))
    with pytest.raises(SystemExit):
        parsed(build_parser(), (command, "lisst"))


@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_of_help_is_wider_than_a_screen(cli, command, monkeypatch):
    """What is written as it stands fits 120 columns."""
    monkeypatch.setenv("COLUMNS", "100")
    _, out, _ = cli(command, "--help")
    assert max(len(line) for line in out.splitlines()) <= 120


def test_version(cli):
    """The version is printed."""
    assert cli("--version") == (0, f"prorld {__version__}\n", "")


def test_a_wrong_command_is_usage(cli):
    """What is not a command ends with 2."""
    assert cli("fly")[0] == 2
    assert cli()[0] == 2


@pytest.mark.parametrize("argv", CLIENT_COMMANDS)
def test_without_a_daemon_the_cure_is_told(cli, argv):
    """No daemon: exit 69 and one line that says what to type."""
    code, out, err = cli(*argv)
    assert (code, out) == (69, "")
    assert "prorld serve" in err
    assert err.count("\n") == 1


def test_json_errors_are_json(cli):
    """With --json a script reads the error's code."""
    code, _, err = cli("status", "--json", "--address", "127.0.0.1:1")
    assert code == 69
    assert json.loads(err)["error"]["code"] == "no_daemon"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("c"), Exit.CONFIG),
        (UsageError("u"), Exit.USAGE),
        (BadRequest("b", code="invalid_field"), Exit.USAGE),
        (ClientError("x", code="no_daemon", retryable=True), Exit.UNAVAILABLE),
        (ClientError("x", code="connection_lost", retryable=True), Exit.UNAVAILABLE),
        (ClientError("x", code="overloaded", retryable=True), Exit.TEMPORARY),
        (ClientError("x", code="unknown_token", status=401), Exit.PERMISSION),
        (ClientError("x", code="admin_only", status=403), Exit.PERMISSION),
        (ClientError("x", code="bad_instance", status=400), Exit.USAGE),
        (ClientError("x", code="unknown_handler", status=422), Exit.FAILED),
        (ClientError("x", code="token_exposed"), Exit.PERMISSION),
        (ClientError("x", code="unknown_job", status=404), Exit.FAILED),
        (ProrldError("x"), Exit.FAILED),
    ],
)
def test_exit_codes(error, code):
    """Every family of errors has its exit code."""
    assert exit_of(error) is code


def test_a_named_token_file_that_is_missing_is_usage(cli):
    """A file that the user named and that can't be read is the user's to fix."""
    code, _, err = cli("status", "--token-file", "/nowhere")
    assert code == 2
    assert "/nowhere" in err


def test_help_imports_nothing_heavy():
    """Help of a client's command loads neither trio nor msgspec nor the server."""
    script = (
        "import sys\nfrom prorld.cli.main import main\n"
        "try: main(['status', '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'trio', 'msgspec', 'quart', 'structlog', 'asyncio', 'importlib.metadata'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert python("-c", script).stdout.splitlines()[-1] == "[]"


def test_a_client_command_needs_no_event_loop():
    """``prorld status`` loads no trio and nothing of the daemon, even when it really looks for one."""
    script = (
        "import sys\nfrom prorld.cli.main import main\n"
        "code = main(['status', '--address', '127.0.0.1:1'])\n"
        "print(int(code), sorted({'trio', 'quart', 'structlog'} & set(sys.modules)))"
    )
    assert python("-c", script).stdout.splitlines()[-1] == "69 []"


def test_a_reader_that_goes_away_is_no_error():
    """``prorld ... | head`` says nothing on stderr."""
    script = (
        "import os, sys\nfrom prorld.cli.main import main\n"
        "r, w = os.pipe(); os.close(r); os.dup2(w, 1)\n"
        "sys.exit(main(['check-config']))"
    )
    done = python("-c", script)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("submit", "--max-turn2", "3"), "prorld submit: error: unrecognized arguments: --max-turn2"),
        (("submit", "--max-turnz", "3"), "did you mean --max-turns?"),
        (("engine", "start", "--registr3"), "did you mean --register?"),
        (("submt",), "did you mean submit?"),
        (("jobs", "--state", "runing"), "did you mean running?"),
        (("jobs", "--limit", "x"), "'x' is not a whole number from 1 up"),
    ],
)
def test_what_is_mistyped_is_told_by_its_own_command(cli, argv, words):
    """Usage of the sub-command that was meant, and what was probably meant in it."""
    code, out, err = cli(*argv)
    assert (code, out) == (2, "")
    assert words in err
    assert f"usage: prorld {argv[0]}" in err or len(argv) == 1


def test_hints_begin_as_the_caller_began(cli, monkeypatch):
    """Where prorld is not on the PATH, nothing that is printed to be typed says it were."""
    monkeypatch.setenv("PRORLD_PROGRAM", "./just prorld")
    assert "start one with `./just prorld serve`" in cli("status")[2]
    _, out, _ = cli("submit", "--help")
    assert "usage: ./just prorld submit" in out
    assert "  ./just prorld submit job.json" in out
    assert "`./just prorld handlers`" in out


def test_a_token_file_that_others_can_read_is_refused(cli, tmp_path):
    """A named one, too; and one that is fine is taken."""
    file = tmp_path / "token"
    file.write_text("secret\n")
    file.chmod(0o644)
    code, _, err = cli("status", "--address", "127.0.0.1:1", "--token-file", str(file))
    assert code == 77
    assert "can be read by others" in err
    file.chmod(0o600)
    assert cli("status", "--address", "127.0.0.1:1", "--token-file", str(file))[0] == 69


def test_a_host_that_does_not_exist_is_named(cli):
    """The name is what is wrong, not the daemon."""
    code, _, err = cli("status", "--address", "nowhere.invalid:1")
    assert code == 69
    assert "the host nowhere.invalid is not known" in err


def test_ctrl_c_is_quiet(cli, monkeypatch):
    """An interrupt ends with 130 and no traceback."""

    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(status, "run", interrupted)
    monkeypatch.setitem(COMMANDS, "status", status)
    code, out, err = cli("status")
    assert (code, out, err) == (130, "", "\n")
