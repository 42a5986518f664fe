"""The editor and the search in real sandboxes, with whatever an agent may have done to its shell and its files."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from prorld.agents import Tool, preset
from prorld.agents.editor import Editor
from prorld.agents.editor_tool import editor_tool
from prorld.agents.listing import ENTRIES_MAX, visible
from prorld.agents.local_search import (
    RESULTS_MAX,
    find_file_tool,
    glob_tool,
    grep_tool,
    search_dir_tool,
    search_file_tool,
    search_tool,
)
from prorld.sandbox.contract import Sandbox
from tests.agents.support import named, use

TREE = r"""
mkdir -p src/deep/deeper .git; echo x > .hidden; echo x > .git/config
printf 'def one():\n\treturn 1\n' > src/one.py; printf 'one = 1\r\nTWO\n' > src/two.txt
echo needle > src/deep/deeper/three.py; printf 'bin\0needle' > src/blob; ln -s .. src/up; ln -s loop src/loop
echo 'src[0] needle' > -dash.py
"""

# What agents really do, and what only a hostile one would.
SABOTAGE = r"""
alias ls='rm -rf' find=false grep=true for=false printf=false
find() { echo fake; }; grep() { echo fake; }; printf() { builtin echo fake; }; cd() { builtin echo nope; }
head() { builtin echo fake; }; export -f find grep head printf
export BASH_ENV=/tmp/env.sh GREP_OPTIONS=-v CDPATH=/usr POSIXLY_CORRECT=1; builtin echo 'echo polluted' > /tmp/env.sh
shopt -s failglob; set -f; IFS=s; trap 'builtin echo trapped' DEBUG ERR; set -x
"""


def editor() -> Tool:
    return editor_tool(Editor())


async def test_a_directory_is_shown_two_levels_deep_without_hidden_names(sandbox: Sandbox):
    """Links are named and not followed, so one that leads to itself does no harm."""
    await sandbox.bash(TREE)
    said = await use(editor(), sandbox, command="view", path="/task")
    assert said.text.splitlines() == [
        "Files and directories up to two levels below /task, hidden ones left out:",
        "/task/-dash.py",
        "/task/src/",
        "/task/src/blob",
        "/task/src/deep/",
        "/task/src/loop",
        "/task/src/one.py",
        "/task/src/two.txt",
        "/task/src/up",
    ]


async def test_a_shell_that_was_turned_upside_down_changes_nothing(sandbox: Sandbox):
    """Functions, aliases, traps and options of the agent's shell reach neither the editor nor the search."""
    await sandbox.bash(TREE)
    before = [await use(tool, sandbox, **arguments) for tool, arguments in looks()]
    await sandbox.bash(SABOTAGE)
    after = [await use(tool, sandbox, **arguments) for tool, arguments in looks()]
    assert [each.text for each in after] == [each.text for each in before]
    assert all(not each.facts.refused for each in after)


def looks() -> list[tuple[Tool, dict[str, Any]]]:
    return [
        (editor(), {"command": "view", "path": "/task"}),
        (editor(), {"command": "view", "path": "/task/src/one.py"}),
        (grep_tool(), {"pattern": "needle|one"}),
        (glob_tool(), {"pattern": "**/*.py"}),
        (find_file_tool(), {"file_name": "*.py"}),
        (search_dir_tool(), {"search_term": "needle"}),
        (search_file_tool(), {"search_term": "one", "file": "src/one.py"}),
    ]


async def test_looking_leaves_the_shell_as_it_was(sandbox: Sandbox):
    """Directory, variables, options, jobs and the last background process are the agent's."""
    await sandbox.bash(TREE)
    await sandbox.bash("cd src; x=1; n=mine; sleep 100 & disown; set -u -o pipefail")
    ask = "echo $PWD $x $n $! $- $(set -o | grep -c on) ${#DIRSTACK[@]} $(jobs | wc -l) ${q-none}"
    before = await sandbox.bash(ask)
    for tool, arguments in looks():
        await use(tool, sandbox, **arguments)
    assert (await sandbox.bash(ask)).output == before.output


async def test_a_shell_that_ends_at_every_failure_survives_looking(sandbox: Sandbox):
    """Nothing a tool runs there fails, so ``set -e`` does not end the session."""
    await sandbox.bash("set -eE; x=1")
    for tool in (editor(), grep_tool(), glob_tool()):
        await use(tool, sandbox, command="view", pattern="nothing[", path="/nowhere")
    result = await sandbox.bash("echo $x")
    assert (result.output, result.restarted) == (b"1\n", False)


async def test_files_with_hostile_names_are_named_on_one_line(sandbox: Sandbox):
    """A newline, an escape or bytes that are no text can't forge another line."""
    await sandbox.bash(r"touch $'a\nb' $'esc\e[2J' $'raw\xff' ' blank '")
    said = (await use(editor(), sandbox, command="view", path="/task")).text.splitlines()[1:]
    assert said == [r"/task/ blank ", r"/task/a\nb", r"/task/esc\x1b[2J", r"/task/raw\xff"]
    assert visible("é".encode()) == "é"


@pytest.mark.slow
async def test_a_directory_of_a_hundred_thousand_files_is_cut_and_says_so(sandbox: Sandbox):
    """So many names are listed, of them so many shown, and the shell goes on."""
    result = await sandbox.bash("mkdir many && cd many && printf '%s\\n' {1..100000} | xargs touch", limit_s=60)
    assert result.exit_code == 0
    said = await use(editor(), sandbox, command="view", path="/task")
    assert "<response clipped><NOTE>There are more" in said.text
    assert 100 < len(said.text.splitlines()) < ENTRIES_MAX + 3
    assert (await use(find_file_tool(), sandbox, file_name="7*", dir="/task/many")).text.startswith("Found 11111 files")


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/task/pipe", "unfit"),
        ("/dev/zero", "unfit"),
        ("/task/src/loop", "not_found"),
        ("/task/nowhere", "not_found"),
        ("/task/big", "unfit"),
        ("/proc/1/mem", None),
    ],
)
async def test_what_is_no_file_is_refused_at_once(sandbox: Sandbox, path: str, code: str | None):
    """A pipe, a device, a link to itself: nothing waits and nothing is read without end."""
    await sandbox.bash(TREE + "mkfifo pipe; truncate -s 100M big")
    said = await use(editor(), sandbox, command="view", path=path)
    assert said.facts.refused == code if code else said.facts.refused
    if code == "unfit":
        said = await use(editor(), sandbox, command="create", path=path, file_text="x")
        assert said.facts.refused == "exists"


async def test_a_file_of_any_bytes_goes_through_an_edit_and_back(sandbox: Sandbox):
    """What is on the disk is compared, not what the editor thinks."""
    content = bytes(range(1, 256)) + b"\tneedle\t\r\n" + bytes(range(255, 0, -1))
    await sandbox.write_file("f", content)
    tool = editor()
    await use(tool, sandbox, command="str_replace", path="/task/f", old_str="needle", new_str="thread\n\tand")
    assert await sandbox.read_file("f") == content.replace(b"needle", b"thread\n\tand")
    await use(tool, sandbox, command="undo_edit", path="/task/f")
    assert await sandbox.read_file("f") == content


async def test_an_edit_keeps_the_mode_and_goes_through_links(sandbox: Sandbox):
    """A script stays executable; a link stays a link."""
    await sandbox.bash("printf 'echo one\\n' > run.sh; chmod 750 run.sh; ln -s run.sh link")
    await use(editor(), sandbox, command="str_replace", path="/task/link", old_str="one", new_str="two")
    result = await sandbox.bash("./run.sh; stat -c %a run.sh; readlink link")
    assert result.output == b"two\n750\nrun.sh\n"


async def test_what_can_not_be_written_is_said(sandbox: Sandbox):
    """A read-only place and a file without permission are the policy's to learn about."""
    await sandbox.bash("echo a > locked; chmod 444 locked; mkdir shut; echo x > shut/f; chmod 000 shut")
    said = await use(editor(), sandbox, command="create", path="/usr/new", file_text="x")
    assert said.facts.refused == "io"
    assert said.text.startswith("The file /usr/new can't be written: ")
    said = await use(editor(), sandbox, command="str_replace", path="/task/locked", old_str="a", new_str="b")
    assert (said.facts.refused, said.text.endswith(" It is as it was.")) == ("io", True)
    assert (await use(editor(), sandbox, command="view", path="/task/shut")).facts.refused == "forbidden"


async def test_a_hanging_shell_does_not_keep_the_editor_from_files(sandbox: Sandbox):
    """Files are read beside the shell: one that ends in every command does no harm."""
    await sandbox.write_file("f", b"x\n")
    await sandbox.bash("trap 'kill -9 $$' DEBUG")
    said = await use(editor(), sandbox, command="str_replace", path="/task/f", old_str="x", new_str="y")
    assert not said.facts.refused
    assert await sandbox.read_file("f") == b"y\n"


# --- search ---------------------------------------------------------------------------------------------------------


async def test_search_finds_lines_files_and_names(sandbox: Sandbox):
    """Hidden and binary files are left out; paths are as the agent would write them."""
    await sandbox.bash(TREE)
    said = (await use(grep_tool(), sandbox, pattern="^(def|TWO)", path="/task/src")).text.splitlines()
    assert (said[0], sorted(said[1:])) == (
        "Found 2 lines for '^(def|TWO)' in /task/src:",
        ["/task/src/one.py:1:def one():", "/task/src/two.txt:2:TWO"],
    )
    assert (await use(grep_tool(), sandbox, pattern="needle", include="*.py", path="src")).text == (
        "Found 1 lines for 'needle' in src:\nsrc/deep/deeper/three.py:1:needle"
    )
    assert (await use(glob_tool(), sandbox, pattern="**/*.py")).text == (
        "Found 3 files for '**/*.py' in .:\n-dash.py\nsrc/deep/deeper/three.py\nsrc/one.py"
    )
    assert (await use(find_file_tool(), sandbox, file_name="t*", dir="src")).text == (
        "Found 2 files for 't*' in src:\nsrc/deep/deeper/three.py\nsrc/two.txt"
    )
    assert (await use(search_dir_tool(), sandbox, search_term="needle")).text == (
        "Found 2 files for 'needle' in .:\n-dash.py (1 lines)\nsrc/deep/deeper/three.py (1 lines)"
    )
    assert (await use(search_file_tool(), sandbox, search_term="src[0]", file="-dash.py")).text == (
        "Found 1 lines for 'src[0]' in -dash.py:\n-dash.py:1:src[0] needle"
    )
    assert (await use(search_tool(), sandbox, search_term="x", path=".hidden")).text == (
        "Found 1 lines for 'x' in .hidden:\n.hidden:1:x"
    )
    assert (await use(search_tool(), sandbox, search_term="nowhere to be found")).text == (
        "Found no lines for 'nowhere to be found' in .."
    )


async def test_search_begins_where_the_shell_is(sandbox: Sandbox):
    """As a command would."""
    await sandbox.bash(TREE + "cd src")
    assert (await use(glob_tool(), sandbox, pattern="*.py")).text == "Found 1 files for '*.py' in .:\none.py"


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        (grep_tool(), {"pattern": "("}, "that is no regular expression"),
        (grep_tool(), {"pattern": ""}, "nothing to look for"),
        (grep_tool(), {"pattern": "x", "path": "/nowhere"}, "/nowhere does not exist"),
        (grep_tool(), {"pattern": "x", "path": "pipe"}, "neither a file nor a directory"),
        (grep_tool(), {"pattern": "x" + chr(0)}, "NUL"),
        (grep_tool(), {"pattern": chr(0xD800)}, "lone surrogate"),
        (grep_tool(), {"pattern": "x" * 200_000}, "too long"),
        (glob_tool(), {"pattern": "*", "path": "file"}, "is not a directory"),
        (search_tool(), {"search_term": "a\nb"}, "more than one line"),
        (search_file_tool(), {"search_term": "a"}, "No file is open"),
    ],
)
async def test_what_can_not_be_searched_is_said(sandbox: Sandbox, tool: Tool, arguments: dict[str, Any], said: str):
    """In words, with a code, and never as nothing found."""
    await sandbox.bash("mkfifo pipe; touch file")
    observation = await use(tool, sandbox, **arguments)
    assert said in observation.text
    assert observation.facts.refused


@pytest.mark.parametrize(
    "term", ["-v", "--help", "$(touch /task/ran)", "`touch /task/ran`", "';touch /task/ran;'", "*"]
)
async def test_what_is_looked_for_is_never_run(sandbox: Sandbox, term: str):
    """Neither as an option nor as a command, in any place of any search."""
    for tool, names in (
        (grep_tool(), ("pattern", "path", "include")),
        (glob_tool(), ("pattern", "path")),
        (find_file_tool(), ("file_name", "dir")),
        (search_dir_tool(), ("search_term", "dir")),
        (editor(), ("command", "path")),
    ):
        for name in names:
            await tool.call({**dict.fromkeys(names, "x"), name: term}, sandbox, limit_s=30)
    await use(editor(), sandbox, command="view", path=f"/task/{term}")
    assert (await sandbox.bash("echo *")).output == b"*\n"


@pytest.mark.slow
async def test_more_than_can_be_shown_is_counted_or_said_to_be_more(sandbox: Sandbox):
    """Few enough are counted; a flood is said to be at least what was seen."""
    await sandbox.bash("seq 200 > few; yes needle | head -n 200000 > flood")
    said = (await use(search_tool(), sandbox, search_term="1", path="few")).text.splitlines()
    assert said[0].startswith("Found 119 lines")
    assert (len(said), said[-1]) == (RESULTS_MAX + 2, f"[the first {RESULTS_MAX} of them are shown]")
    said = (await use(search_tool(), sandbox, search_term="needle", path="flood")).text.splitlines()
    assert said[0].startswith("Found at least ")
    assert len(said) == RESULTS_MAX + 2


async def test_a_search_that_takes_too_long_is_stopped_and_said_so(sandbox: Sandbox):
    """The session takes the next command."""
    await sandbox.bash("mkdir bin; printf '#!/bin/sh\\nsleep 100\\n' > bin/x; chmod +x bin/x; seq 5 > f")
    said = await use(grep_tool(), sandbox, limit_s=0.001, pattern="5", path="/usr")
    assert said.facts.timed_out
    assert "[the search took too long and was stopped: look in fewer places]" in said.text
    assert (await sandbox.bash("echo on")).output == b"on\n"


# --- presets in a real shell ----------------------------------------------------------------------------------------


async def test_openhands_says_where_the_shell_is_and_which_python_it_has(sandbox: Sandbox):
    """As its own runtime does, after each command."""
    bash = named(preset("openhands").tools(), "execute_bash")
    await sandbox.bash("mkdir -p venv/bin; printf '#!/bin/sh\\n' > venv/bin/python; chmod +x venv/bin/python")
    said = await use(bash, sandbox, command="cd /tmp && PATH=/task/venv/bin:$PATH; echo hi; false")
    assert said.text.splitlines() == [
        "hi",
        "[The command completed with exit code 1.]",
        "[Current working directory: /tmp]",
        "[Python interpreter: /task/venv/bin/python]",
        "[Command finished with exit code 1]",
    ]


async def test_openhands_asks_a_difficult_shell_in_the_same_way(sandbox: Sandbox):
    """Traces, traps and ``set -e`` neither hide the answer nor end the shell."""
    bash = named(preset("openhands").tools(), "execute_bash")
    await sandbox.bash("trap 'echo trapped' DEBUG; set -eux; PATH=/nowhere")
    said = await use(bash, sandbox, command="cd /tmp")
    assert said.text.splitlines()[-2:] == ["[Current working directory: /tmp]", "[Command finished with exit code 0]"]
    assert not said.facts.restarted
    assert (await sandbox.bash("x=$-; set +x; builtin echo $x")).output.count(b"e")


async def test_who_looks_first_says_that_the_shell_had_died(sandbox: Sandbox):
    """A search or a listing that finds a fresh shell does not keep it to itself."""
    for tool, arguments in ((glob_tool(), {"pattern": "*"}), (editor(), {"command": "view", "path": "/task"})):
        await sandbox.bash("(sleep 0.2; kill -9 $$) & disown")
        await trio.sleep(0.6)
        said = await tool.call(arguments, sandbox, limit_s=30)
        assert said.facts.restarted
        assert said.text.endswith("[the shell had ended and was started again; what was set in it is gone]")


async def test_a_terminal_begins_anew_when_asked(sandbox: Sandbox):
    """What was set is gone, and a command that came along runs in the new one."""
    terminal = named(preset("openhands-sdk").tools(), "terminal")
    await use(terminal, sandbox, command="x=1; kill() { echo no; }")
    said = await use(terminal, sandbox, command="echo [$x]", reset="true")
    assert said.text.splitlines()[:2] == ["[The session was started anew.]", "[]"]
    assert said.facts.restarted


async def test_each_command_of_mini_has_a_shell_of_its_own(sandbox: Sandbox):
    """Neither directory nor variables stay; syntax errors, quotes and exits are its own; a submission is the answer."""
    (bash,) = preset("mini").tools()
    assert (await use(bash, sandbox, command="cd /tmp; x='a b'; echo \"$x\"; exit 3")).text == (
        "<returncode>3</returncode>\n<output>\na b\n</output>"
    )
    said = await use(bash, sandbox, command="echo $PWD[$x]")
    assert said.text == "<returncode>0</returncode>\n<output>\n/task[]\n</output>"
    assert not said.facts.restarted
    said = await use(bash, sandbox, command="echo 'unbalanced")
    assert said.text.startswith("<returncode>")
    assert "<returncode>0" not in said.text
    submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat <<'E'\nthe\npatch\nE"
    said = await use(bash, sandbox, command=submit)
    assert (said.finished, said.text) == (True, "the\npatch\n")
    assert not (await use(bash, sandbox, command=f"{submit}\nfalse")).finished


async def test_the_window_of_swe_agent(sandbox: Sandbox):
    """Open, go, scroll, edit and insert in one file; the editor of the same set can take the edits back."""
    tools = preset("swe-agent").tools(["open", "goto", "scroll_down", "edit", "insert", "create", "str_replace_editor"])
    await sandbox.bash("seq 250 > f")
    said = (await use(named(tools, "open"), sandbox, path="f", line_number=100)).text.splitlines()
    assert said[:4] == ["OBSERVATION:", "[File: /task/f (250 lines total)]", "(49 more lines above)", "50:50"]
    assert said[-1] == "(101 more lines below)"
    said = (await use(named(tools, "scroll_down"), sandbox)).text.splitlines()
    assert said[3] == "148:148"
    await use(named(tools, "edit"), sandbox, search="\n200\n", replace="\ntwo hundred\n")
    await use(named(tools, "insert"), sandbox, text="the end")
    assert (await sandbox.bash("sed -n 200p f; tail -n 1 f")).output == b"two hundred\nthe end\n"
    await use(named(tools, "str_replace_editor"), sandbox, command="undo_edit", path="/task/f")
    await use(named(tools, "str_replace_editor"), sandbox, command="undo_edit", path="/task/f")
    assert (await sandbox.bash("seq 250 | cmp - f && echo same")).output == b"same\n"
    made = await use(named(tools, "create"), sandbox, filename="new")
    assert made.text == "OBSERVATION:\n[File: /task/new (0 lines total)]"
