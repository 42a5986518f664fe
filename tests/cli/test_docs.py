"""The documents say what is: commands, settings, codes, names and examples in them exist and work."""

from __future__ import annotations

import ast
import re
import shlex
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from prorld.cli import plugin_commands
from prorld.cli.exits import Exit
from prorld.cli.main import COMMANDS, build_parser
from prorld.cli.parser import parsed
from prorld.config import describe
from prorld.domain.outcome import DEFAULT_VERDICTS, OutcomeKind, Verdict
from prorld.http.errors import _HTTP_ERRORS
from prorld.testing.fake_sandbox import FakeRuntime
from prorld.testing.jobs import run_handler

ROOT = Path(__file__).parents[2]
DOCS = sorted(
    path.relative_to(ROOT).as_posix() for part in ("*.md", "trainers/*.md") for path in (ROOT / "docs").glob(part)
)
PAGES = ["README.md", "ARCHITECTURE.md", *DOCS]
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "prorld").rglob("*.py")))


def text(page):
    return (ROOT / page).read_text()


def blocks(page, language):
    """The fenced blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", text(page), re.DOTALL)


def command_lines():
    """Every ``prorld ...`` line in a shell block, without its comment."""
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("prorld "):
                    yield pytest.param(line, id=f"{page}: {line[:40]}")


@pytest.mark.parametrize("line", [*command_lines()])
def test_every_command_in_the_docs_can_be_typed(line):
    """The parser takes it as it stands."""
    words = [*takewhile(lambda word: word not in {"<", ">", "|", "&"}, shlex.split(line, comments=True))]
    installed = plugin_commands.find(COMMANDS)
    assert parsed(build_parser(installed.values()), words[1:]).command in {*COMMANDS, *installed}


def test_every_command_and_exit_code_is_documented():
    """docs/cli.md names all of them."""
    page = text("docs/cli.md")
    assert [name for name in COMMANDS if f"| `prorld {name}`" not in page] == []
    assert [code for code in Exit if f"\n| {int(code)} |" not in page] == []


def test_the_length_of_the_bench_is_said_once():
    """docs/bench.md and the help name the same time."""
    [said] = re.findall(r"It takes (about [a-z ]+ minutes)", text("docs/bench.md"))
    [example] = re.findall(r'"prorld bench orchestration", "every figure, (.*)"', text("prorld/cli/bench.py"))
    assert said == example


def test_every_setting_that_is_named_anywhere_exists():
    """A dotted name of a section in any page is a setting."""
    settings = {item.path for item in describe()}
    sections = {path.split(".")[0] for path in settings if "." in path}
    for page in PAGES:
        named = set(re.findall(r"`([a-z]+\.[a-z_0-9]+)`", text(page)))
        wrong = {name for name in named if name.split(".")[0] in sections} - settings
        # Names of events look like settings, too.
        wrong = {name for name in wrong if f'"{name}"' not in SOURCE}
        assert wrong - {"log.py", "metrics.py"} == set(), page


def test_every_code_in_the_docs_exists():
    """docs/errors.md names no code that nothing raises."""
    rows = re.findall(r"^\| [0-9, ]+ \| (.*?) \|", text("docs/errors.md"), re.MULTILINE)
    codes = {code for row in rows for code in re.findall(r"`([a-z_]+)`", row)}
    assert len(codes) > 15
    assert sorted(code for code in codes if f'"{code}"' not in SOURCE) == []


def named_codes(tree):
    """Codes of errors in a module: of a class, and given by name where one is raised."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
                if any(isinstance(target, ast.Name) and target.id == "code" for target in targets):
                    yield getattr(line, "value", None)
        elif isinstance(node, ast.Call):
            yield from (keyword.value for keyword in node.keywords if keyword.arg == "code")


# Never in an answer or a record: bases, what is turned into something else on its way, commands without a daemon.
WITHIN = {
    "bench_failed", "client_error", "context_overflow", "embedded_engine", "error", "library_exit", "mailbox_closed",
    "mask_sum", "vllm_process",
}  # fmt: skip


def test_every_code_that_can_come_is_documented():
    """docs/errors.md has the codes of errors, docs/operations.md those of conditions, and no list here is stale."""
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / "prorld").rglob("*.py"))]
    found = {value.value for tree in trees for value in named_codes(tree) if isinstance(value, ast.Constant)}
    codes = {code for code in found if isinstance(code, str) and code} | {code for code, _ in _HTTP_ERRORS.values()}
    assert len(codes) > 70
    documented = set(re.findall(r"`([a-z_]+)`", text("docs/errors.md") + text("docs/operations.md")))
    assert sorted(codes - documented - WITHIN) == []
    assert sorted(WITHIN - codes) == []


def test_the_table_of_verdicts_is_the_default():
    """docs/errors.md and the domain agree."""
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| .*\| `([a-z]+)` \|$", text("docs/errors.md"), re.MULTILINE))
    assert rows == {kind.value: DEFAULT_VERDICTS.get(kind, Verdict.DROP).value for kind in OutcomeKind}


async def test_the_handler_of_the_docs_works():
    """docs/handlers.md: the example runs through its three stages and grades right and wrong answers."""
    scope: dict[str, Any] = {"__name__": "example"}
    exec(compile(blocks("docs/handlers.md", "python")[0], "docs/handlers.md", "exec"), scope)
    handler = scope["ReverseHandler"]()
    handler.check()
    for said, reward in (("olleh", 1.0), ("hello", 0.0)):
        run = await run_handler(handler, {"word": "hello"}, turns=[said], runtime=FakeRuntime())
        assert run.grade.reward == reward


@pytest.mark.parametrize("page", PAGES)
def test_what_the_pages_import_exists(page):
    """Every import in a Python block works, and the block is Python."""
    for block in blocks(page, "python"):
        lines = [ast.unparse(node) for node in ast.parse(block).body if isinstance(node, ast.Import | ast.ImportFrom)]
        # The packages of trainers are not ours to have.
        ours = [line for line in lines if line.split()[1].partition(".")[0] not in {"datasets", "skyrl", "trl"}]
        exec("\n".join(ours), {})


def test_the_map_names_what_is_there():
    """ARCHITECTURE.md: paths exist, names are in the files beside which they stand, every room is on the map."""
    page = text("ARCHITECTURE.md")
    paths = set(re.findall(r"`(prorld/[a-z_/]+(?:\.py)?)`", page))
    assert [path for path in paths if not (ROOT / path).exists()] == []
    named = re.findall(
        r"`([A-Za-z_.]+)`(?: \([a-z]+\))?(?: and `[a-z_]+` \([a-z]+\))? in `(prorld/[a-z_/]+\.py)`", page
    )
    assert len(named) >= 7
    for name, path in named:
        assert re.search(rf"(def|class) {name.split('.')[-1]}\b", text(path)), (name, path)
    rooms = {path.name for path in (ROOT / "prorld").iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert rooms - {path.removeprefix("prorld/") for path in paths} == set()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    """Relative links of every page point to a file."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text(page)):
        assert ((ROOT / page).parent / target).exists(), target
