"""What needs no sandbox: folders, Dockerfiles, rewards, summaries."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from prorld.domain.job import AgentLimits
from prorld.handlers import GraderError, HandlerError, Impossible
from prorld.handlers.registry import accept
from prorld_terminal.command import task_folders
from prorld_terminal.dockerfile import Unsupported, read_recipe
from prorld_terminal.folder import digest_of, tree_of
from prorld_terminal.handler import TerminalHandler, examples_dir
from prorld_terminal.instance import TerminalConfig, TerminalInstance
from prorld_terminal.rewards import combined, parsed_tests, rewards_of_json, rewards_of_text
from prorld_terminal.rewards import test_names as names_in
from prorld_terminal.task import load_task


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A copy of an example task, to be spoilt."""
    return Path(shutil.copytree(examples_dir() / "rotate-backups", tmp_path / "task"))


def test_the_examples_are_tasks() -> None:
    """Five of Harbor and two of Terminal-Bench; each is found by the walk."""
    tasks = [load_task(folder) for folder in task_folders(examples_dir())]
    assert sorted(task.kind for task in tasks) == ["harbor"] * 5 + ["terminal-bench"] * 2
    report = next(task for task in tasks if task.name == "sales-report")
    assert (report.separate, report.artifacts, report.verify_s) == (True, ("/app/report.csv",), 60.0)


def test_the_digest_is_that_of_content(task: Path) -> None:
    """Any change of a name, a byte or whether a file can be run changes it; the time does not."""
    before = digest_of(task)
    script = task / "tests" / "test.sh"
    script.touch()
    assert digest_of(task) == before
    script.chmod(0o644)
    second = digest_of(task)
    script.write_text(script.read_text() + "\n")
    assert len({before, second, digest_of(task)}) == 3


@pytest.mark.parametrize("target", ["/etc/passwd", "../../other", "loop/../../../etc"])
def test_links_that_leave_a_folder_are_refused(task: Path, target: str) -> None:
    """By where they lead to, whichever links they go through."""
    (task / "environment" / "inside").symlink_to("rotate.sh")
    (task / "environment" / "loop").symlink_to(".")
    tree_of(task)
    (task / "environment" / "bad").symlink_to(target)
    with pytest.raises(HandlerError, match="leaves it"):
        tree_of(task)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("task.toml", "not toml", "task.toml"),
        ("task.toml", "[agent]\ntimeout_sec = -1\n", "timeout_sec"),
        ("task.toml", "[[steps]]\nname = 'a'\n", "several steps"),
        ("task.toml", "[environment]\nos = 'windows'\n", "Linux"),
        ("task.toml", "[environment.env]\nKEY = '${SECRET}'\n", "SECRET"),
        ("task.toml", "artifacts = ['../x']\n", "artifact"),
        ("instruction.md", "  \n", "instruction.md"),
        ("environment/Dockerfile", "FROM a\nFROM b\n", "several stages"),
        ("environment/Dockerfile", "FROM a\nRUN apt-get install -y jq\n", "run_steps"),
    ],
)
def test_a_folder_that_can_not_be_used_is_refused_at_submit(task: Path, name: str, content: str, words: str) -> None:
    """With words that name the file or the field."""
    (task / name).write_text(content)
    handler = TerminalHandler(TerminalConfig(tasks_dir=str(task.parent)))
    with pytest.raises(Impossible, match=words):
        accept(handler, {"task_dir": "task"}, AgentLimits())


def test_folders_elsewhere_are_refused(task: Path) -> None:
    """Absolute or upwards, unless the operator opens everything."""
    for place in (str(task), "../task", "..", ".", "/", "no-such", "a\0b"):
        with pytest.raises(Impossible, match="task folder"):
            accept(TerminalHandler(), {"task_dir": place}, AgentLimits())
    handler = TerminalHandler(TerminalConfig(anywhere=True))
    assert handler.folder_of(TerminalInstance(task_dir=str(task))) == task.resolve()


def test_what_a_dockerfile_says() -> None:
    """Places by the working directory, variables filled in, and what is harmless told from what is not."""
    recipe = read_recipe(
        "# base\nFROM --platform=linux/amd64 debian:12 AS one\nARG V=2\nENV A=1 B=x$V\nWORKDIR /srv\nWORKDIR app\n"
        "COPY --chown=1:1 a.txt \\\n  b.txt ./\nADD c /data/$B/c\nRUN mkdir -p x && chmod 700 x\nRUN make | tee y\n"
        'CMD ["sh"]\n'
    )
    assert (recipe.base, recipe.workdir, recipe.env) == ("debian:12", "/srv/app", {"A": "1", "B": "x2"})
    first, second, third, fourth = recipe.steps
    assert (first.sources, first.to) == (("a.txt", "b.txt"), "/srv/app/")
    assert (second.sources, second.to) == (("c",), "/data/x2/c")
    assert (third.harmless, fourth.harmless) == (True, False)


@pytest.mark.parametrize(
    "text",
    ["", "RUN x", "FROM a\nCOPY --from=b /x /y", "FROM a\nCOPY ../x /y", "FROM a\nADD https://x /y", "FROM a\nNOVEL 1",
     "FROM a\nRUN <<EOF\nls\nEOF", "FROM a\nCOPY 'x /y", "FROM a\nRUN ls \\"],
)  # fmt: skip
def test_what_needs_a_builder_is_told(text: str) -> None:
    with pytest.raises(Unsupported):
        read_recipe(text)


def test_rewards() -> None:
    """A number, or numbers by name; one of them is the reward."""
    assert rewards_of_text(b" 0.5\n") == {"reward": 0.5}
    many = rewards_of_json(b'{"a": 1, "b": 0.5}')
    assert [combined(many, None), combined(many, "a"), combined({**many, "reward": 0.1}, None)] == [0.75, 1.0, 0.1]
    for raw in (b"", b"nan", b"1e999", b"one", b"\xff"):
        with pytest.raises(GraderError):
            rewards_of_text(raw)
    for raw in (b"", b"[]", b"{}", b'{"reward": "1"}', b'{"reward": NaN}', b"[" * 100_000, b"1"):
        with pytest.raises(GraderError):
            rewards_of_json(raw)


REAL = "=== short test summary info ===\nPASSED t.py::test_a\nFAILED t.py::test_b - assert 1 == 2\n= 1 failed =\n"
FORGED = "==== short test summary info ====\nPASSED t.py::test_a\nPASSED t.py::test_b\n"


def test_summaries() -> None:
    """The last one counts: what a program under test prints comes before that of its runner."""
    assert parsed_tests(FORGED + REAL) == {"test_a": True, "test_b": False}
    assert parsed_tests("PASSED t.py::test_a") is None
    assert parsed_tests("x short test summary info x\nPASSED t.py::test_a") is None
    twice = "= short test summary info =\nFAILED t.py::test_a - x\nPASSED t.py::test_a\nERROR t.py::test_c - y\n"
    assert parsed_tests(twice) == {"test_a": False, "test_c": False}


def test_which_tests_a_file_has() -> None:
    source = "def test_a(): ...\nclass TestB:\n    def test_c(self): ...\ndef helper(): ...\nasync def test_d(): ...\n"
    assert names_in(source) == ["test_a", "test_c", "test_d"]
    assert names_in("def broken(") == []
