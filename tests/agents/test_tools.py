"""Tools take what policies really write, and answer what they can't take in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.agents.presets import known_tools, standard_tools
from prorld.agents.tools import CODE_BYTES, Tool, find_tool
from prorld.errors import HandlerError, Impossible, SandboxError
from prorld.sandbox.contract import CommandResult
from tests.agents.support import pretended, use


class Recorder:
    """A sandbox that notes what it is asked and answers what it is told."""

    sandbox_id = "s"
    workdir = "/work"

    def __init__(self, answer: Callable[[str], CommandResult] | None = None) -> None:
        self.asked: list[tuple[str, str, float]] = []
        self._answer = answer or (lambda code: CommandResult(exit_code=0, output=f"did {code}".encode()))

    async def bash(self, command: str, *, limit_s: float = 30.0) -> CommandResult:
        self.asked.append(("bash", command, limit_s))
        return self._answer(command)

    async def python(self, code: str, *, limit_s: float = 30.0) -> CommandResult:
        self.asked.append(("python", code, limit_s))
        return self._answer(code)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        raise FileNotFoundError(path)

    async def write_file(self, path: str, data: bytes) -> None:
        raise OSError(path)

    async def upload(self, source: Path, path: str) -> None:
        raise OSError(path)

    async def download(self, path: str, target: Path, *, max_bytes: int = 1 << 30) -> None:
        raise FileNotFoundError(path)


def tool(name: str) -> Tool:
    return standard_tools([name])[0]


def test_what_a_handler_changes_in_a_schema_is_its_own():
    """Tools are made anew for each rollout; what is remembered between them is nobody's to change."""
    before = str(tool("bash").schema)
    tool("bash").schema.parameters["properties"]["command"]["description"] = "One word."
    assert str(tool("bash").schema) == before


def test_schemas_are_plain_objects_that_name_what_is_required():
    """Chat templates get no references and no titles."""
    for each in standard_tools(["bash", "python", "finish", "think"]):
        assert each.schema.parameters["type"] == "object"
        assert "$ref" not in str(each.schema.parameters)
        assert "title" not in each.schema.parameters
        assert each.schema.description
    assert tool("bash").schema.parameters["required"] == ["command"]
    assert tool("python").schema.parameters["required"] == ["code"]


def test_each_tool_comes_once_in_the_order_asked_for():
    """An alias is the tool it stands for."""
    names = [each.schema.name for each in standard_tools(["ipython", "bash", "python", "bash"])]
    assert names == ["python", "bash"]
    there = {
        "bash",
        "ipython",
        "python",
        "finish",
        "think",
        "str_replace_editor",
        "read_file",
        "write_file",
        "grep",
        "glob",
    }
    presets = {"preset:openhands", "preset:openhands-sdk", "preset:swe-agent", "preset:mini", "preset:r2e"}
    assert there | presets == known_tools()


def test_an_unknown_tool_is_impossible_and_the_others_are_named():
    """A job that asks for it is refused before it starts."""
    with pytest.raises(Impossible, match=r"no such tool: browser; there are bash"):
        standard_tools(["bash", "browser"])


def test_a_call_of_an_alias_finds_the_tool():
    """A policy trained with ``ipython`` is understood."""
    tools = standard_tools(["python"])
    assert find_tool(tools, "ipython") is tools[0]
    assert find_tool(tools, "bash") is None


async def test_a_command_runs_in_the_sandbox_within_the_limit():
    """The tool hands over the command and the smaller of the two limits."""
    sandbox = Recorder()
    first = await tool("bash").call({"command": "ls"}, sandbox, limit_s=20)
    await tool("bash").call({"command": "ls", "timeout": "2.5"}, sandbox, limit_s=20)
    await tool("python").call({"code": "1", "timeout": 9000}, sandbox, limit_s=20)
    assert first.text == "did ls"
    assert sandbox.asked == [("bash", "ls", 20), ("bash", "ls", 2.5), ("python", "1", 20)]


async def test_unknown_arguments_are_ignored():
    """Policies add what other tool sets had, such as a security risk."""
    sandbox = Recorder()
    observation = await tool("bash").call({"command": "ls", "security_risk": "LOW"}, sandbox, limit_s=1)
    assert observation.text == "did ls"


@pytest.mark.parametrize(
    ("given_value", "text"), [(42, "42"), (True, "true"), ({"answer": 5}, '{"answer":5}'), ("x", "x"), (1.5, "1.5")]
)
async def test_text_may_be_written_as_any_json(given_value: Any, text: str):
    """An answer of 42 without quotes is still an answer."""
    observation = await tool("finish").call({"message": given_value}, None, limit_s=1)
    assert observation.finished
    assert observation.text == text


@pytest.mark.parametrize("arguments", [{}, {"cmd": "ls"}, {"command": None}, {"command": "ls", "timeout": "soon"}])
async def test_wrong_arguments_are_an_observation_with_the_usage(arguments: dict[str, Any]):
    """The policy reads what was wrong and what the tool takes; nothing runs."""
    sandbox = Recorder()
    observation = await tool("bash").call(arguments, sandbox, limit_s=1)
    assert observation.text.startswith("[bash was not called: ")
    assert "command (string, required), timeout (number)" in observation.text
    assert not sandbox.asked


@pytest.mark.parametrize("command", ["a\0b", "\ud800", "x" * (CODE_BYTES + 1)])
async def test_text_that_no_sandbox_can_take_is_refused_in_words(command: str):
    """A NUL, a lone surrogate or a megabyte must not look like a fault of the sandbox."""
    sandbox = Recorder()
    for name, key in (("bash", "command"), ("python", "code")):
        observation = await tool(name).call({key: command}, sandbox, limit_s=1)
        assert "was not run" in observation.text
    assert not sandbox.asked


async def test_trouble_of_the_sandbox_is_not_an_observation():
    """The provider's failure is never shown as the command's output."""

    def fail(_: str) -> CommandResult:
        raise SandboxError("gone")

    with pytest.raises(SandboxError, match="gone"):
        await tool("bash").call({"command": "ls"}, Recorder(fail), limit_s=1)


async def test_a_tool_without_its_sandbox_is_the_handlers_fault():
    """It is not something that the policy could learn from."""
    with pytest.raises(HandlerError, match="needs a sandbox"):
        await tool("bash").call({"command": "ls"}, None, limit_s=1)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from(sorted(name for name in known_tools() if ":" not in name)),
    st.dictionaries(st.sampled_from(["command", "code", "timeout", "message", "thought"]), json_values),
)
async def test_no_arguments_raise(name: str, arguments: dict[str, Any]):
    """Whatever JSON the policy writes, there is an observation."""
    observation = await tool(name).call(arguments, Recorder(), limit_s=1)
    assert isinstance(observation.text, str)


async def test_files_are_read_and_written_as_a_whole():
    """What can't be had or put is said; what is long is cut and counted."""
    async with pretended() as sandbox:
        for content in ("first", "second\n" * 10_000):
            said = await use(tool("write_file"), sandbox, path="dir/f", content=content)
            assert said.text == f"[{len(content)} bytes written to dir/f]"
        assert sandbox.files == {"/work/dir/f": b"second\n" * 10_000}
        said = await use(tool("read_file"), sandbox, path="/work/dir/f")
        assert said.text.startswith("second\n")
        assert "bytes left out" in said.text
        assert said.facts.output_bytes == 70_000
        assert said.facts.omitted_bytes > 50_000
        assert (await use(tool("read_file"), sandbox, path="nowhere")).text == "[not read: no such file: nowhere]"
        assert (await use(tool("write_file"), sandbox, path="dir", content="x")).facts.refused == "not_written"
        assert (await use(tool("write_file"), sandbox, path="f", content=chr(0xD800))).facts.refused == "not_written"
        await use(tool("write_file"), sandbox, path="f", content="")
        assert (await use(tool("read_file"), sandbox, path="f")).text == "[the file is empty]"
