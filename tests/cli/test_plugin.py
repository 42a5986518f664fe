"""``prorld plugin`` and ``prorld try``: what an author makes, checks and sees, without a daemon."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib

import pytest
import trio

from prorld.cli.exits import UsageError
from prorld.cli.plugin_files import NAME_CHARS_MAX, check_name, rendered
from prorld.kit.lanes import Lane
from prorld.sandbox.tiny_image import make_tiny_image
from prorld.testing.handler_contract import HANDLER_CONTRACT

TOOL = '<tool_call>{"name": "python", "arguments": {"code": "print(\'3\')"}}</tool_call>'


@pytest.fixture
def project(cli, tmp_path, monkeypatch):
    """A project of its own name for each test, since what was imported stays; and its package."""
    name = f"word-{abs(hash(str(tmp_path))) % 10**8}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    assert cli("plugin", "new", name)[0] == 0
    yield tmp_path / f"prorld-{name}", f"prorld_{name.replace('-', '_')}"
    for module in set(sys.modules) - before:
        if module.startswith("prorld_word"):
            del sys.modules[module]


def edit(project, old, new):
    """Change the handler."""
    place, package = project
    file = place / package / "handler.py"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize("name", ["a", "word-count", "x2", "a-1", "a" * NAME_CHARS_MAX])
def test_names_that_fit(name):
    """Words of small letters and digits."""
    check_name(name)
    assert any(place.startswith(f"prorld_{name.replace('-', '_')}/") for place in rendered(name))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "A",
        "1a",
        "a_b",
        "a--b",
        "-a",
        "a-",
        "a b",
        "a/b",
        "../a",
        "é",
        "a.b",
        "prorld-a",
        "a" * (NAME_CHARS_MAX + 1),
    ],
)
def test_names_that_do_not(name):
    """Whatever would make no package, no path or no entry point is refused before anything is written."""
    with pytest.raises(UsageError):
        check_name(name)


def test_a_handler_that_is_installed_is_not_made_again(cli, tmp_path, monkeypatch):
    """Two of one name would put both out."""
    pytest.importorskip("prorld_calc")
    monkeypatch.chdir(tmp_path)
    code, _, err = cli("plugin", "new", "calc")
    assert (code, [*tmp_path.iterdir()]) == (2, [])
    assert "prorld-calc" in err


def test_nothing_is_overwritten(cli, project):
    """A directory with anything in it stays as it is."""
    place, _ = project
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    code, _, err = cli("plugin", "new", place.name.removeprefix("prorld-"))
    assert code == 2
    assert "not empty" in err
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_the_directory_can_be_chosen(cli, tmp_path):
    """With all that leads to it."""
    place = tmp_path / "a" / "b"
    assert cli("plugin", "new", "chosen", "--dir", str(place))[0] == 0
    assert (place / "pyproject.toml").is_file()


def test_every_file_is_what_its_name_says():
    """Python compiles, TOML and JSON can be read, no placeholder is left, and the package is typed."""
    files = rendered("word-count")
    for place, text in files.items():
        assert "$" not in text, place
        if place.endswith(".py"):
            compile(text, place, "exec")
    project = tomllib.loads(files["pyproject.toml"])["project"]
    assert project["entry-points"]["prorld.handlers"] == {"word-count": "prorld_word_count.handler:WordCountHandler"}
    assert project["name"] == "prorld-word-count"
    assert all(json.loads(line) for line in files["prorld_word_count/examples.jsonl"].splitlines())
    assert "prorld_word_count/py.typed" in files
    assert "word-count" in files["README.md"]


@pytest.mark.slow
def test_a_new_project_passes_the_contract(cli, project):
    """Not installed, by its path; one line per check."""
    place, _ = project
    code, out, err = cli("plugin", "check", str(place))
    assert code == 0, out
    assert out.count("ok    ") == len(HANDLER_CONTRACT)
    assert "3 instances" in err


@pytest.mark.slow
def test_a_fault_fails_its_check_with_the_authors_frame(cli, project):
    """The line in the handler is shown, prorld's own frames are not; as JSON for a script, too."""
    edit(
        project, 'said = re.search(r"[0-9]{1,4}", (result.answer or "")[-100:])', 'said = re.search("3", result.answer)'
    )
    place, package = project
    code, out, _ = cli("plugin", "check", str(place))
    assert code == 1
    assert "FAIL  an end without an answer gets a grade" in out
    assert f"{package}/handler.py" in out
    assert 're.search("3", result.answer)' in out
    assert "supervisor.py" not in out
    results = json.loads(cli("plugin", "check", str(place), "--json")[1])
    failed = [result["name"] for result in results if not result["ok"]]
    assert "an_end_without_an_answer_gets_a_grade" in failed
    assert "its_types_make_a_schema" not in failed


def test_a_project_that_can_not_be_imported_is_one_line(cli, project):
    """With what went wrong."""
    edit(project, "import re\n", "import no_such_module\n")
    code, out, err = cli("plugin", "check", str(project[0]))
    assert (code, out) == (1, "")
    assert "no_such_module" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("target", "code"), [("no-such-handler", 1), ("./nowhere", 2)])
def test_what_is_not_there_is_told(cli, tmp_path, monkeypatch, target, code):
    """Neither installed nor a project."""
    monkeypatch.chdir(tmp_path)
    done = cli("plugin", "check", target)
    assert (done[0], done[1]) == (code, "")
    assert done[2].startswith("prorld: ")


def test_trying_shows_everything(cli, project):
    """Stages and sandbox calls while it runs; conversation, tokens, grade and times afterwards."""
    place, package = project
    examples = f"@{place / package / 'examples.jsonl'}"
    code, out, err = cli("try", str(place), examples, "--sandbox", "fake", "--turn", TOOL, "--turn", "3")
    assert code == 0, err
    for words in ("init begins", "run begins", "eval has ended", "→ python", "print('3')", "exit code 0", "turn 1"):
        assert words in err
    for words in ("strawberry", "reward     1", "sampled", "run  ", "python(code="):
        assert words in out


@pytest.mark.slow
def test_trying_on_an_image_of_the_store(cli, project, tmp_path):
    """The sandbox is the daemon's: of the runtime that is configured, with the images that it has."""
    trio.run(make_tiny_image, tmp_path / "tree", (os.getuid(), os.getgid()), Lane("test", 1))
    assert cli("image", "pull", str(tmp_path / "tree"), "--name", "tiny")[0] == 0
    instance = '{"word": "x", "letter": "x"}'
    call = TOOL.replace("python", "bash").replace("code", "command").replace("print('3')", "echo /*")
    edit(project, "SandboxSpec()", 'SandboxSpec(image="tiny")')
    edit(project, '("python",)', '("bash",)')
    code, out, err = cli("try", str(project[0]), instance, "--turn", call, "--turn", "1")
    assert code == 0, err
    assert "/probed" in out
    code, out, _ = cli("try", str(project[0]), instance, "--turn", "1", "--state-dir", str(tmp_path / "other"))
    assert code == 1
    assert "there is no image 'tiny' in the store" in out


def test_trying_where_no_sandbox_can_be_made(cli, project, monkeypatch):
    """One line that says why, before anything is tried."""
    monkeypatch.setenv("PRORLD__SANDBOX__RUNTIME", "apptainer")
    monkeypatch.setenv("PRORLD__SANDBOX__APPTAINER", "/nowhere/apptainer")
    done = cli("try", str(project[0]), '{"word": "x", "letter": "x"}', "--turn", "1")
    assert (done[0], done[1]) == (1, "")
    assert "/nowhere/apptainer, can't be run" in done[2]


def test_trying_shows_where_an_exception_came_from(cli, project):
    """The stage, the author's own frames with their lines, and not ours."""
    edit(project, "said = re.search(", "said = 1 // 0 if len(job.instance.word) == 1 else re.search(")
    code, out, _ = cli(
        "try", str(project[0]), '{"word": "x", "letter": "x"}', "--sandbox", "fake", "--turn", "1"
    )  # fmt: skip
    assert code == 1
    shown = out.partition("eval of attempt 1 raised:")[2]
    assert f"{project[1]}/handler.py" in shown
    assert "1 // 0" in shown
    assert "ZeroDivisionError" in shown
    assert "life.py" not in shown


def test_trying_gives_the_document(cli, project, tmp_path):
    """As JSON on stdout and in a file, for `prorld show`."""
    out_file = tmp_path / "doc.json"
    argv = ("try", str(project[0]), '{"word": "x", "letter": "x"}', "--sandbox", "fake", "--turn", "1")
    code, out, _ = cli(*argv, "--json", "--out", str(out_file))
    assert code == 0
    assert json.loads(out)["reward"] == 1.0
    shown = cli("show", str(out_file))
    assert shown[0] == 0
    assert "How many times" in shown[1]


@pytest.mark.parametrize(
    ("instance", "code", "words"),
    [
        ('{"word": "x"}', 1, "letter"),
        ("x", 2, "not JSON"),
        ("[]", 2, "the instance"),
        ("@/nowhere", 2, "/nowhere"),
    ],
)
def test_a_wrong_instance_is_told(cli, project, instance, code, words):
    """Refused as the daemon would, in one line."""
    done = cli("try", str(project[0]), instance, "--sandbox", "fake", "--turn", "1")
    assert (done[0], done[1]) == (code, "")
    assert words in done[2]


def test_one_policy_at_a_time(cli):
    """A script and an engine exclude each other."""
    code, _, err = cli("try", "calc", "{}", "--turn", "1", "--backend", "vllm=http://a:1")
    assert code == 2
    assert "--turn" in err


def test_local_handlers_need_no_daemon(cli):
    """Installed ones, with version, origin, and as many data sources and tools as fit on a line; JSON has them all."""
    pytest.importorskip("prorld_math")
    code, out, _ = cli("handlers", "--local")
    assert code == 0
    (row,) = [line for line in out.splitlines() if line.startswith("math ")]
    assert "prorld-math" in row
    assert re.search(r"deepscaler, math_dapo, \d+ more", row)
    assert max(len(line) for line in out.splitlines() if not line.startswith("not loaded")) <= 120
    items = json.loads(cli("handlers", "--local", "--json")[1])
    (math,) = [item for item in items if item["name"] == "math"]
    assert "dapo-math*" in math["data_sources"]
    assert "python" in math["tools"]


def test_a_schema_can_be_read(cli):
    """Of one handler, as JSON; of none, a line."""
    pytest.importorskip("prorld_calc")
    schema = json.loads(cli("handlers", "--local", "--schema", "calc")[1])
    assert "question" in json.dumps(schema)
    code, _, err = cli("handlers", "--local", "--schema", "nothing")
    assert code == 2
    assert "calc" in err
