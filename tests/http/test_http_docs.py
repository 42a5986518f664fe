"""docs/http.md says what is: its table is that of the routes, and its examples run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.http.live import live_world
from tests.http.support import World

# Of the page's engines. The daemon of this test gives its own no boot's id.
BOOT = "0f3c9a1e-"
PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text()


def table(doc: dict[str, Any]) -> str:
    """The reference, from the document that the server gives."""
    lines = ["| route | what | parameters | answers | errors |", "|---|---|---|---|---|"]
    for path, item in sorted(doc["paths"].items()):
        for method, operation in item.items():
            names = ", ".join(f"`{p['name']}`" for p in operation["parameters"] if p["in"] == "query")
            good = [status for status in operation["responses"] if status < "300"]
            bad = [status for status in operation["responses"] if status >= "300"]
            lines.append(
                f"| `{method.upper()} {path}` | {operation['summary']} | {names} | {' '.join(sorted(good))}"
                f" | {' '.join(sorted(bad))} |"
            )
    return "\n".join(lines)


class Example(NamedTuple):
    """A request and what its answer holds."""

    method: str
    target: str
    body: Any
    status: int
    fields: Any


def examples() -> list[Example]:
    """All examples of the page, in order."""
    found: list[Example] = []
    for block in re.findall(r"```http\n(.*?)```", PAGE, re.DOTALL):
        for text in block.strip().split("\n\n"):
            first, *between, last = text.split("\n")
            method, target = first.split(" ")
            body = msgspec.json.decode("\n".join(between)) if between else None
            arrow, status, fields = last.replace(BOOT, "").split(" ", 2)
            assert arrow == "->"
            found.append(Example(method, target, body, int(status), msgspec.json.decode(fields)))
    return found


def holds(found: Any, said: Any) -> bool:
    """Whether everything that is said is in what was found."""
    if isinstance(said, dict):
        return isinstance(found, dict) and all(key in found and holds(found[key], said[key]) for key in said)
    if isinstance(said, list):
        return len(found) == len(said) and all(holds(a, b) for a, b in zip(found, said, strict=True))
    return bool(found == said)


async def test_the_table_of_routes_is_that_of_the_server(nursery, world: World):
    """Every route with its parameters and statuses, in order."""
    await world.serve(nursery)
    doc = (await (await world.connect()).call("GET", "/openapi.json")).json
    assert table(doc) in PAGE


async def test_the_examples_run():
    """One after the other, against real jobs; each answer has the status and the fields that the page says."""
    run = examples()
    assert len(run) > 20
    async with live_world() as world:
        client = await world.connect()
        for example in run:
            reply = await client.call(example.method, example.target, example.body)
            assert reply.status == example.status, (example, reply.body)
            assert holds(reply.json, example.fields), (example, reply.body)
