"""Commands of plugins: found, loaded late, contained, and lent a workshop."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys

import pytest

from prorld.cli import plugin_commands
from prorld.cli.completion import walk
from prorld.cli.main import COMMANDS, build_parser
from prorld.cli.moving_line import MovingLine
from prorld.handlers.commands import COMMANDS_GROUP
from tests.cli.simple_index import serve_index

GOOD = '''
"""A command."""
import json
import trio
from prorld.errors import HandlerError
SUMMARY = "counts 100% of the letters"

def add_arguments(parser):
    parser.description = "Counts."
    parser.add_argument("word")

async def run(args, workshop):
    if args.word == "error":
        raise HandlerError("that word\\ncan't be counted", code="no_count")
    if args.word == "exit":
        raise SystemExit(3)
    if args.word == "none":
        return None
    if args.word == "wait":
        try:
            workshop.say("waiting")
            await trio.sleep(60)
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.05)
                workshop.say("cleaned up")
    if args.word == "sandbox":
        async with workshop.runtime() as runtime:
            workshop.say(type(runtime).__name__)
    workshop.progress("counting")
    workshop.warn("one \\x1b[2J word")
    (workshop.cache_dir / "seen").write_text(args.word)
    workshop.say(json.dumps({"letters": len(args.word), "json": args.json, "program": workshop.program}))
    return 7
'''

LENDS = """
import trio
from prorld.handlers import SandboxSpec
SUMMARY = "uses what it is lent"

def add_arguments(parser):
    pass

async def run(args, workshop):
    path = await workshop.package("sample==1.0", kind="wheel")
    workshop.say(path.read_text())
    async with workshop.runtime() as runtime, trio.open_nursery() as nursery:
        sandbox = await nursery.start(lambda task_status: runtime.run(
            SandboxSpec(), sandbox_id="one", job_id="one", task_status=task_status
        ))
        result = await sandbox.bash("echo from $((40 + 2)); id -u")
        workshop.say(result.text)
        nursery.cancel_scope.cancel()
    return 0
"""

BROKEN = {
    "imports": "import no_such_module_anywhere",
    "exits": "raise SystemExit(1)",
    "summary": "SUMMARY = 3\ndef add_arguments(parser): pass\nasync def run(args, workshop): return 0",
    "functions": "SUMMARY = 'words'\ndef add_arguments(parser): pass",
    "arguments": "SUMMARY = 'words'\ndef add_arguments(parser): 1 / 0\nasync def run(args, workshop): return 0",
    "clashes": (
        "SUMMARY = 'words'\ndef add_arguments(parser): parser.add_argument('--json')\n"
        "async def run(args, workshop): return 0"
    ),
    "format": (
        "SUMMARY = 'words'\ndef add_arguments(parser): parser.add_argument('--share', help='100% of it')\n"
        "async def run(args, workshop): return 0"
    ),
}


@pytest.fixture
def install(site):
    """Install a distribution with these commands, a module each."""

    def put(distribution, **commands):
        points = {}
        for name, source in commands.items():
            module = f"{distribution}_{name}"
            site.module(module, source)
            points[name.replace("_", "-")] = module
        site.install(distribution, COMMANDS_GROUP, points)
        return site.path

    return put


def test_the_group_is_that_of_the_plugins():
    """The name is written out twice, so that help needs no trio."""
    assert plugin_commands.GROUP == COMMANDS_GROUP


def test_a_command_runs_and_its_code_is_the_exit_code(cli, install, tmp_path):
    """It gets its arguments and a workshop, and what it says is clean."""
    install("tiny", letters=GOOD)
    code, out, err = cli("letters", "word")
    assert code == 7
    assert json.loads(out) == {"letters": 4, "json": False, "program": "prorld"}
    assert err.splitlines() == ["counting", "one \\x1b[2J word"]
    assert (tmp_path / "state" / "cache" / "letters" / "seen").read_text() == "word"
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0


def test_it_has_the_options_of_sandboxes_and_json(cli, install):
    """Declared by prorld, so that they are the same for all."""
    install("tiny", letters=GOOD)
    code, out, _ = cli("letters", "--help")
    assert code == 0
    for option in ("--json", "--sandbox", "--config", "--state-dir"):
        assert option in out
    assert json.loads(cli("letters", "word", "--json")[1])["json"] is True
    assert cli("letters", "sandbox", "--sandbox", "fake")[1].splitlines()[0] == "FakeRuntime"
    assert cli("letters", "word", "--sandbox", "rubber")[0] == 2


def test_errors_of_the_project_are_one_line(cli, install):
    """With its code where JSON is asked for; leaving by sys.exit and returning nothing are errors, too."""
    install("tiny", letters=GOOD)
    code, out, err = cli("letters", "error")
    assert (code, out) == (1, "")
    assert err.startswith("prorld: that word")
    assert json.loads(cli("letters", "error", "--json")[2])["error"]["code"] == "no_count"
    assert "called sys.exit" in cli("letters", "exit")[2]
    assert cli("letters", "none") == (
        1,
        "",
        "prorld: the command letters of tiny 1.5 returned None, and no exit code\n",
    )


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_command_is_one_line_and_breaks_no_other(cli, install, kind):
    """Called it says what is wrong, whatever follows; the list has it, and the others work."""
    install("tiny", broken=BROKEN[kind], letters=GOOD)
    for words in ((), ("--help",), ("--some", "thing")):
        code, out, err = cli("broken", *words)
        assert (code, out) == (1, "")
        assert err.startswith("prorld: the command broken of tiny 1.5 can't be used: ")
        assert err.count("\n") == 1
    assert json.loads(cli("broken", "--json")[2])["error"]["code"] == "command_broken"
    code, out, _ = cli("--help")
    assert code == 0
    assert "counts 100% of the letters" in out
    assert "broken: " in out
    assert cli("letters", "word")[0] == 7


def test_none_comes_before_what_prorld_brings(cli, install):
    """A plugin's ``status`` is not even imported."""
    site = install("tiny", status="open(__file__ + '.seen', 'w').close()\n" + GOOD)
    code, _, err = cli("status")
    assert code == 69
    assert "prorld serve" in err
    found = plugin_commands.find(COMMANDS)["status"]
    assert found.error == "prorld has a command status of its own"
    assert cli("--help")[1].count("\n    status ") == 1
    assert sorted(path.name for path in site.glob("tiny_*")) == ["tiny_status.py"]


def test_two_of_one_name_are_both_refused(cli, install):
    """Neither can be told from the other."""
    install("tiny", letters=GOOD)
    install("other", letters=GOOD)
    assert "more than one distribution" in cli("letters", "word")[2]


def test_only_what_is_asked_for_is_loaded(cli, install):
    """No other command's module is imported, and none for prorld's own."""
    install("tiny", letters=GOOD, quiet_one="raise KeyboardInterrupt")
    assert cli("letters", "word")[0] == 7
    assert cli("--version")[0] == 0
    assert cli("status")[0] == 69
    assert cli("status", "--help")[0] == 0


def test_what_was_meant_is_told_of_plugins_too(cli, install):
    """Without loading any."""
    install("tiny", letters=GOOD, quiet_one="raise KeyboardInterrupt")
    code, _, err = cli("leters", "word")
    assert code == 2
    assert "did you mean letters?" in err


def test_completion_knows_them(cli, install):
    """Those that work, with their options."""
    install("tiny", letters=GOOD, broken=BROKEN["imports"])
    places = {place.path: place for place in walk(build_parser(plugin_commands.find(COMMANDS).values()))}
    assert "--sandbox" in {name for option in places["letters",].options for name in option.names}
    out = cli("completion", "bash")[1]
    assert "/letters" in out
    assert "broken" not in out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_waits_for_its_clean_up(install, tmp_path, number):
    """Exit 130, no traceback, and what it had to clear away is cleared away."""
    site = install("tiny", letters=GOOD)
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(site), *sys.path])}
    argv = [sys.executable, "-m", "prorld.cli", "letters", "wait"]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "cleaned up\n", "\n")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_moving_line_moves_on_a_terminal_alone(monkeypatch):
    """Elsewhere: the first line, and then none until its time has come."""
    now = 100.0
    monkeypatch.setattr("prorld.cli.moving_line.time.monotonic", lambda: now)
    live, plain = Terminal(), io.StringIO()
    for stream in (live, plain):
        line = MovingLine(stream)
        now = 100.0
        for step in range(30):
            now += 1.0
            line.show(f"step {step}\n\x1b[31m")
        line.clear()
    assert live.getvalue().count("\r\x1b[K") == 31
    assert live.getvalue().endswith("\r\x1b[K")
    assert "\x1b[31m" not in live.getvalue()
    assert [text.split("\\")[0].strip() for text in plain.getvalue().splitlines()] == ["step 0", "step 10", "step 20"]


@pytest.mark.slow
def test_what_the_workshop_lends_is_real(cli, install, monkeypatch, tmp_path):
    """A distribution from the user's index, and a sandbox as the daemon would make it."""
    install("tiny", lends=LENDS)
    monkeypatch.setenv("PRORLD_PACKAGES", str(tmp_path / "packages"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with serve_index() as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.root)
        index.put("sample", ("sample-1.0-py3-none-any.whl", b"a wheel"))
        code, out, err = cli("lends", "--sandbox", "bubblewrap")
    assert (code, out.splitlines()[:2]) == (0, ["a wheel", "from 42"]), err
    assert out.splitlines()[2] != "0"
    assert "asking the index for sample==1.0 (wheel)" in err
