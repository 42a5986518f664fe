"""Each preset's names, arguments and texts: what a policy that was trained elsewhere expects to find."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.agents import PRESETS, Observation, Tool, ToolFacts, known_tools, preset, standard_tools
from prorld.agents.editor import Editor
from prorld.errors import HandlerError, Impossible
from prorld.sandbox.contract import CommandResult
from tests.agents.support import always, named, pretended, result, use

EDITOR = {
    "command*": "string",
    "path*": "string",
    "file_text": "string",
    "old_str": "string",
    "new_str": "string",
    "insert_line": "integer",
    "view_range": "array",
}
TRACKER = {"command*": "string", "task_list": "array"}
GREP = {"pattern*": "string", "path": "string", "include": "string"}
GLOB = {"pattern*": "string", "path": "string"}

# Names and types of all arguments, the required ones with a star.
SCHEMAS: dict[str, dict[str, dict[str, str]]] = {
    "prorld": {
        "bash": {"command*": "string", "timeout": "number"},
        "python": {"code*": "string", "timeout": "number"},
        "finish": {"message": "string"},
        "think": {"thought": "string"},
        "str_replace_editor": EDITOR,
        "read_file": {"path*": "string"},
        "write_file": {"path*": "string", "content*": "string"},
        "grep": GREP,
        "glob": GLOB,
    },
    "openhands": {
        "execute_bash": {"command*": "string", "is_input": "string", "timeout": "number", "security_risk": "string"},
        "execute_ipython_cell": {"code*": "string"},
        "str_replace_editor": EDITOR,
        "think": {"thought*": "string"},
        "finish": {"message*": "string"},
        "task_tracker": TRACKER,
        "grep": GREP,
        "glob": GLOB,
    },
    "openhands-sdk": {
        "terminal": {
            "command*": "string",
            "is_input": "boolean",
            "timeout": "number",
            "reset": "boolean",
            "security_risk": "string",
        },
        "file_editor": EDITOR,
        "think": {"thought*": "string"},
        "finish": {"message*": "string"},
        "task_tracker": TRACKER,
        "grep": GREP,
        "glob": GLOB,
    },
    "swe-agent": {
        "bash": {"command*": "string"},
        "str_replace_editor": EDITOR,
        "submit": {},
        "exit_forfeit": {},
        "find_file": {"file_name*": "string", "dir": "string"},
        "search_dir": {"search_term*": "string", "dir": "string"},
        "search_file": {"search_term*": "string", "file": "string"},
        "open": {"path*": "string", "line_number": "integer"},
        "goto": {"line_number*": "integer"},
        "scroll_up": {},
        "scroll_down": {},
        "create": {"filename*": "string"},
        "edit": {"search*": "string", "replace*": "string", "replace_all": "boolean"},
        "insert": {"text*": "string", "line": "integer"},
    },
    "mini": {"bash": {"command*": "string"}},
    "r2e": {
        "execute_bash": {"cmd*": "string"},
        "file_editor": {**EDITOR, "concise": "boolean"},
        "search": {"search_term*": "string", "path": "string"},
        "finish": {"command*": "string", "result": "string"},
    },
}


def arguments_of(tool: Tool) -> dict[str, str]:
    parameters = tool.schema.parameters
    required = parameters["required"]
    return {f"{name}{'*' * (name in required)}": about["type"] for name, about in parameters["properties"].items()}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_has_the_tools_and_the_arguments_of_its_table(name: str):
    """No more, no less, each described, and no reference that a chat template could not follow."""
    tools = {tool.schema.name: tool for tool in PRESETS[name].make()}
    assert {each: arguments_of(tool) for each, tool in tools.items()} == SCHEMAS[name]
    for tool in tools.values():
        assert tool.schema.description
        assert "$ref" not in str(tool.schema.parameters)
        assert "anyOf" not in str(tool.schema.parameters)
        assert all(about["description"] for about in tool.schema.parameters["properties"].values())
    assert set(PRESETS[name].defaults) <= set(tools)


def test_words_to_choose_from_are_in_the_schema():
    """A policy reads them there."""
    bash = named(preset("openhands").tools(), "execute_bash").schema.parameters["properties"]
    assert bash["is_input"]["enum"] == ["true", "false"]
    assert bash["security_risk"]["enum"] == ["LOW", "MEDIUM", "HIGH"]
    command = named(preset("r2e").tools(), "file_editor").schema.parameters["properties"]["command"]
    assert command["enum"] == ["view", "create", "str_replace", "insert", "undo_edit"]


def only_required(tool: Tool) -> dict[str, Any]:
    (name,) = tool.schema.parameters["required"]
    return {name: "x"}


# --- choosing -------------------------------------------------------------------------------------------------------


def test_a_job_names_tools_of_the_handlers_preset_or_another_preset():
    """``preset:NAME`` is what that preset offers by itself; of two tools of one name the first is taken."""
    names = [tool.schema.name for tool in standard_tools(["think", "preset:swe-agent", "bash"])]
    assert names == ["think", "bash", "str_replace_editor", "submit"]
    assert [tool.schema.name for tool in standard_tools(["exit_forfeit", "bash"], "swe-agent")] == [
        "exit_forfeit",
        "bash",
    ]
    assert [tool.schema.name for tool in standard_tools(None, "mini")] == ["bash"]
    assert standard_tools(None) == ()
    assert "preset:openhands" in known_tools("mini")
    for names in (["preset:nowhere"], ["execute_bash"], ["preset:"]):
        with pytest.raises(Impossible, match="no such"):
            standard_tools(names)
    with pytest.raises(HandlerError, match="no such preset of tools: nowhere; there are mini, "):
        preset("nowhere")


async def test_tools_are_made_anew_for_each_episode():
    """What one episode did can't be undone, seen or planned by the next."""
    async with pretended() as sandbox:
        sandbox.files["/work/f"] = b"a"
        first, second = (named(preset("r2e").tools(), "file_editor") for _ in range(2))
        await use(first, sandbox, command="str_replace", path="/work/f", old_str="a", new_str="b")
        assert (await use(second, sandbox, command="undo_edit", path="/work/f")).facts.refused == "no_history"
        first, second = (named(preset("openhands").tools(), "task_tracker") for _ in range(2))
        await use(first, None, command="plan", task_list=[{"title": "x"}])
        assert "empty" in (await use(second, None, command="view")).text


# --- texts ----------------------------------------------------------------------------------------------------------

SUCCESS = result("hi\n", duration_s=0.5)
FAILURE = result("no\n", exit_code=2)
QUIET = result()
QUIET_FAILURE = result(exit_code=1)
TIMEOUT = result("half", exit_code=124, timed_out=True)
RESTART = result("bye\n", exit_code=3, restarted=True)

BASH_TEXTS: dict[tuple[str, str], list[str]] = {
    ("prorld", "bash"): [
        "hi",
        "no\n[exit code 2]",
        "[no output]",
        "[no output]\n[exit code 1]",
        "half\n[stopped after 9 s; the shell is still there]",
        "bye\n[the shell had ended and was started again; what was set in it is gone]\n[exit code 3]",
    ],
    ("openhands", "execute_bash"): [
        "hi\n[The command completed with exit code 0.]\n[Command finished with exit code 0]",
        "no\n[The command completed with exit code 2.]\n[Command finished with exit code 2]",
        "[The command completed with exit code 0.]\n[Command finished with exit code 0]",
        "[The command completed with exit code 1.]\n[Command finished with exit code 1]",
        (
            "half\n[The command has no new output after 9 seconds. It was stopped; the session goes on.]\n"
            "[Command finished with exit code -1]"
        ),
        (
            "bye\n[The session had ended and was started again: what was set in it is gone.]\n"
            "[The command completed with exit code 3.]\n[Command finished with exit code 3]"
        ),
    ],
    ("swe-agent", "bash"): [
        "OBSERVATION:\nhi",
        "OBSERVATION:\nno",
        "Your command ran successfully and did not produce any output.",
        "OBSERVATION:\nYour command did not produce any output and ended with exit code 1.",
        "OBSERVATION:\nhalf\nThe command was stopped after 9 seconds; the session goes on.",
        "OBSERVATION:\nbye\nThe shell had ended and was started again: what was set in it is gone.",
    ],
    ("mini", "bash"): [
        "<returncode>0</returncode>\n<output>\nhi\n</output>",
        "<returncode>2</returncode>\n<output>\nno\n</output>",
        "<returncode>0</returncode>\n<output>\n</output>",
        "<returncode>1</returncode>\n<output>\n</output>",
        "The command was stopped after 9 seconds.\n<returncode>-1</returncode>\n<output>\nhalf\n</output>",
        (
            "The shell had ended and was started again: what was set in it is gone.\n"
            "<returncode>3</returncode>\n<output>\nbye\n</output>"
        ),
    ],
    ("r2e", "execute_bash"): [
        "hi",
        "no\n[exit code 2]",
        "[no output]",
        "[no output]\n[exit code 1]",
        "half\n[stopped after 9 s; the shell is still there]",
        "bye\n[the shell had ended and was started again; what was set in it is gone]\n[exit code 3]",
    ],
    ("openhands", "execute_ipython_cell"): [
        "hi",
        "no",
        "[Code executed successfully with no output]",
        "[The code ended with exit code 1 and no output]",
        "half\n[Execution timed out (9 seconds).]",
        "bye\n[The session had ended and was started again: what was set in it is gone.]",
    ],
}
BASH_TEXTS["openhands-sdk", "terminal"] = BASH_TEXTS["openhands", "execute_bash"]
EVENTS = [SUCCESS, FAILURE, QUIET, QUIET_FAILURE, TIMEOUT, RESTART]


@pytest.mark.parametrize(
    ("of", "name", "event", "text"),
    [(*key, event, text) for key, texts in BASH_TEXTS.items() for event, text in zip(EVENTS, texts, strict=True)],
)
async def test_what_a_command_did_is_said_in_the_words_of_the_preset(
    of: str, name: str, event: CommandResult, text: str
):
    """Success, failure, silence, a limit, a restart; and the same as data beside the text."""
    async with pretended(always(event)) as sandbox:
        tool = named(standard_tools([name], of), name)
        argument = only_required(tool)
        observation = await use(tool, sandbox, limit_s=9, **argument)
    assert observation.text == text
    facts = observation.facts
    assert (facts.exit_code, facts.timed_out, facts.restarted) == (event.exit_code, event.timed_out, event.restarted)
    assert (facts.output_bytes, facts.omitted_bytes, facts.refused) == (len(event.output), 0, "")


@pytest.mark.parametrize(
    ("of", "name", "chars", "note"),
    [
        ("openhands", "execute_bash", 30_000, "[... 70000 characters left out ...]"),
        ("openhands", "execute_ipython_cell", 30_000, "[... 70000 characters left out ...]"),
        ("mini", "bash", 10_000, "<elided_chars>\n90000 characters elided\n</elided_chars>"),
        ("prorld", "bash", 16 << 10, "[... 83616 bytes left out ...]"),
        ("r2e", "execute_bash", 16 << 10, "[... 83616 bytes left out ...]"),
    ],
)
async def test_long_output_is_cut_in_the_middle_and_counted(of: str, name: str, chars: int, note: str):
    """Head and tail stay; the note and the facts agree; what the sandbox left out is counted, too."""
    printed = "H" * 50_000 + "T" * 50_000
    async with pretended(always(result(printed))) as sandbox:
        tool = named(standard_tools([name], of), name)
        argument = only_required(tool)
        observation = await use(tool, sandbox, **argument)
    assert note in observation.text
    assert (observation.text.count("H"), observation.text.count("T")) in {
        (chars // 2, chars // 2),
        (chars // 2, chars // 2 + 1),  # "The command completed"
    }
    assert (observation.facts.output_bytes, observation.facts.omitted_bytes) == (100_000, 100_000 - chars)
    async with pretended(always(result(printed, omitted_bytes=77))) as sandbox:
        assert "77 bytes more" in (await use(tool, sandbox, **argument)).text or of in ("prorld", "r2e")
    async with pretended(always(result("x", omitted_bytes=77))) as sandbox:
        observation = await use(tool, sandbox, **argument)
    assert (observation.facts.output_bytes, observation.facts.omitted_bytes) == (78, 77)


async def test_the_form_of_minis_long_output():
    """Head, number, tail, each in its tags."""
    async with pretended(always(result("a" * 5000 + "b" * 3 + "c" * 5000))) as sandbox:
        (bash,) = preset("mini").tools()
        said = (await use(bash, sandbox, command="x")).text
    head, tail = "a" * 5000, "c" * 5000
    assert said == (
        f"<returncode>0</returncode>\n<output_head>\n{head}\n</output_head>\n"
        f"<elided_chars>\n3 characters elided\n</elided_chars>\n<output_tail>\n{tail}\n</output_tail>"
    )


@pytest.mark.parametrize(
    ("given_result", "finished"),
    [
        (result("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\nthe patch\n"), True),
        (result("\n  COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT  \nthe patch\n"), True),
        (result("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\nthe patch\n", exit_code=1), False),
        (result("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\nthe patch\n", exit_code=124, timed_out=True), False),
        (result("first\nCOMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n"), False),
        (result("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT now\n"), False),
    ],
)
async def test_mini_submits_by_what_a_command_prints(given_result: CommandResult, finished: bool):
    """The mark alone on the first line of a command that went well; what follows is the answer."""
    async with pretended(always(given_result)) as sandbox:
        observation = await use(preset("mini").tools()[0], sandbox, command="x")
    assert observation.finished == finished
    if finished:
        assert (observation.text, observation.data["submitted"]) == ("the patch\n", True)


@pytest.mark.parametrize("is_input", ["true", True, "True", " TRUE "])
async def test_input_for_a_running_command_is_refused_in_words(is_input: Any):
    """Nothing runs between two calls, so there is nothing that could read it; and nothing is run instead."""
    async with pretended(always(SUCCESS)) as sandbox:
        for of, name in (("openhands", "execute_bash"), ("openhands-sdk", "terminal")):
            tool = named(preset(of).tools(), name)
            observation = await use(tool, sandbox, command="C-c", is_input=is_input)
            assert observation.text.startswith("[Nothing was sent: no command is waiting for input.")
            assert observation.facts.refused == "no_input"
            observation = await use(tool, sandbox, command="  ")
            assert observation.facts.refused == "no_input"
        assert not sandbox.calls


@pytest.mark.parametrize("is_input", ["false", False, None, "False"])
async def test_arguments_are_taken_as_policies_write_them(is_input: Any):
    """Booleans as words, numbers as texts, nulls for what is not given, and what other sets of tools have."""
    async with pretended(always(SUCCESS)) as sandbox:
        bash = named(preset("openhands").tools(), "execute_bash")
        terminal = named(preset("openhands-sdk").tools(), "terminal")
        more = {"timeout": "5", "security_risk": "LOW", "blocking": "false", "is_input": is_input}
        assert (await use(bash, sandbox, command="x", **more)).text.startswith("hi\n")
        assert (await use(terminal, sandbox, command="x", reset=None, **more)).text.startswith("hi\n")
        said = await use(bash, sandbox, command="x", is_input="perhaps")
        assert (said.facts.refused, said.text) == (
            "bad_arguments",
            "[execute_bash was not called: is_input is true or false]",
        )


async def test_escapes_of_a_terminal_are_not_shown():
    """Colours and titles are for people."""
    async with pretended(always(result("\x1b[1;31mred\x1b[0m \x1b]0;title\x07plain\n"))) as sandbox:
        cell = named(preset("openhands").tools(), "execute_ipython_cell")
        assert (await use(cell, sandbox, code="x")).text == "red plain"


async def test_a_reset_that_does_not_come_about_is_not_claimed():
    """A sandbox that can't replace its shell says so."""
    async with pretended(always(SUCCESS)) as sandbox:
        terminal = named(preset("openhands-sdk").tools(), "terminal")
        assert (await use(terminal, sandbox, command="", reset=True)).text == (
            "[The session could not be started anew.]"
        )
        assert (await use(terminal, sandbox, command="x", reset=True, is_input=True)).facts.refused == "bad_arguments"


@pytest.mark.parametrize(
    ("of", "name", "arguments", "text", "data"),
    [
        ("openhands", "finish", {"message": "done", "task_completed": "true"}, "done", {}),
        ("openhands-sdk", "finish", {"message": "done"}, "done", {}),
        ("swe-agent", "submit", {}, "", {"submitted": True}),
        ("swe-agent", "exit_forfeit", {}, "", {"forfeited": True}),
        ("r2e", "finish", {"command": "submit", "result": "done"}, "done", {"submitted": True}),
        ("r2e", "finish", {"command": "submit"}, "", {"submitted": True}),
    ],
)
async def test_the_end_of_an_episode(of: str, name: str, arguments: dict[str, Any], text: str, data: dict[str, Any]):
    """The answer is what was said, and nothing is put before it."""
    observation = await use(named(standard_tools([name], of), name), None, **arguments)
    assert observation == Observation(text=text, finished=True, data=data, facts=ToolFacts())


async def test_a_concise_view_shows_what_a_python_file_defines():
    """With the numbers that the lines have in the file; other files are shown whole."""
    async with pretended() as sandbox:
        sandbox.files |= {
            "/work/f.py": b"import os\nx = 1\n@cache\ndef f():\n\treturn 1\nclass C:\n    async def g(self): ...\n",
            "/work/f.txt": b"x\n",
        }
        tool = named(preset("r2e").tools(), "file_editor")
        said = await use(tool, sandbox, command="view", path="/work/f.py", concise="true")
        assert [line.split("\t", 1)[0].strip() for line in said.text.splitlines()[1:]] == ["1", "3", "4", "6", "7"]
        said = await use(tool, sandbox, command="view", path="/work/f.txt", concise=True)
        assert said.text.endswith("     1\tx\n")


async def test_swe_agents_observations_all_begin_alike():
    """What was wrong with a call is an observation, too."""
    async with pretended() as sandbox:
        tools = standard_tools(["bash", "search_file", "open", "goto"], "swe-agent")
        calls: list[tuple[str, dict[str, Any]]] = [
            ("bash", {}),
            ("search_file", {"search_term": "x"}),
            ("goto", {"line_number": 1}),
        ]
        for name, arguments in calls:
            assert (await use(named(tools, name), sandbox, **arguments)).text.startswith("OBSERVATION:\n")


# --- the task list --------------------------------------------------------------------------------------------------


async def test_a_list_of_tasks_is_kept_and_shown():
    """``plan`` puts another list in the place of the last; a bad one changes nothing."""
    tool = named(preset("openhands").tools(), "task_tracker")
    tasks = [{"id": 1, "title": "look", "status": "done"}, {"title": "do", "status": "in_progress", "notes": "soon"}]
    said = await use(tool, None, command="plan", task_list=tasks)
    shown = "1. [x] look\n2. [~] do\n   soon"
    assert said.text == f"The list has 2 tasks now.\n{shown}"
    bad: list[Any] = [
        None,
        "nonsense",
        [{"status": "done"}],
        [{"title": "x", "status": "later"}],
        [1],
        [{"title": "x"}] * 101,
    ]
    for task_list in bad:
        assert (await use(tool, None, command="plan", task_list=task_list)).facts.refused == "bad_arguments"
    assert (await use(tool, None, command="view")).text == shown
    assert (await use(tool, None, command="forget")).facts.refused == "command"
    said = await use(tool, None, command="plan", task_list='[{"title": "written as JSON"}]')
    assert said.text.endswith("1. [ ] written as JSON")


# --- whatever a policy writes ---------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["/work/f", "[1,", "true"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
EVERY_TOOL = [(of, tool.schema.name) for of in sorted(PRESETS) for tool in PRESETS[of].make()]


@given(st.sampled_from(EVERY_TOOL), st.data())
async def test_no_arguments_of_any_tool_raise(key: tuple[str, str], data: st.DataObject):
    """Whatever JSON is written for the arguments that there are, there is an observation in proper text."""
    of, name = key
    tool = named(PRESETS[of].make(), name)
    names = list(tool.schema.parameters["properties"]) or ["nothing"]
    arguments: dict[str, Any] = data.draw(st.dictionaries(st.sampled_from(names), json_values))
    commands = tool.schema.parameters["properties"].get("command", {}).get("enum")
    if commands:
        arguments["command"] = data.draw(st.sampled_from(commands))
    async with pretended() as sandbox:
        sandbox.files["/work/f"] = b"one\ntwo\n"
        observation = await use(tool, sandbox, **arguments)
    assert isinstance(observation.text, str)
    assert observation.facts.omitted_bytes >= 0


def test_an_editor_is_not_shared_by_presets():
    """Two presets of one job would otherwise undo each other's edits."""
    assert Editor() is not Editor()
    first, second = (preset("openhands").tools(["str_replace_editor"]) for _ in range(2))
    assert first[0].run is not second[0].run
