"""docs/tools.md says what is: its tables are those of the presets, and its examples run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from prorld.agents import PRESETS
from prorld.testing.fake_sandbox import FakeRuntime
from prorld.testing.sandbox_contract import open_sandbox

PAGE = (Path(__file__).parents[2] / "docs/tools.md").read_text()


def table(name: str) -> list[tuple[str, str, str]]:
    """The rows of a preset."""
    [section] = re.findall(rf"^### `{name}`.*?\n(.*?)(?=^##|\nWhere a value)", PAGE, re.DOTALL | re.MULTILINE)
    return re.findall(r"^\| `([a-z_]+)` \| (?:`(.*?)`|none) \| (yes|) ?\|$", section, re.MULTILINE)


def test_the_tables_are_those_of_the_presets():
    """Every tool with its arguments in order, and whether it is offered without being named."""
    for name, each in PRESETS.items():
        rows: list[tuple[str, str, str]] = []
        for tool in each.make():
            required = tool.schema.parameters["required"]
            arguments = ", ".join(
                f"{argument}{'*' * (argument in required)}: {about['type']}"
                for argument, about in tool.schema.parameters["properties"].items()
            )
            rows.append((tool.schema.name, arguments, "yes" if tool.schema.name in each.defaults else ""))
        assert table(name) == rows, name


async def test_the_examples_run():
    """Each block as it stands; the tool of the page is called."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        scope: dict[str, Any] = {"__name__": "example"}
        exec(compile(block, "docs/tools.md", "exec", dont_inherit=True), scope)
        if "tool" in scope:
            async with open_sandbox(FakeRuntime()) as sandbox:
                observation = await scope["tool"].call({"query": "x"}, sandbox, limit_s=5)
            assert observation.text
