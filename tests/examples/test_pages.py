"""The blocks of the pages about batches, typed as they stand into a shell and a Python beside a real daemon.

Only the port is another one, and the engine is scripted. What they print is looked at, and what the daemon has then.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from prorld.client import Client
from prorld.testing.scripted_engine.script import Latency, Script
from tests.daemon.support import Started, daemon, environ, scripted_engine, until

ROOT = Path(__file__).parents[2]
HERE = [point.name for point in entry_points(group="prorld.handlers")]
WITHIN_S = 180.0
PORT = re.compile(r"127\.0\.0\.1:8650")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not {"math", "calc"} <= {*HERE}, reason="prorld-math or prorld-calc is not installed"),
]

# Each of these is right for one prompt of a page, and wrong for the others.
ANSWERS = Script(turns=[f"ANSWER: {n}" for n in (42, 12, 26, 39)], pick="lot")


def block(page: str, language: str, holding: str) -> str:
    """The one fenced block of a language that holds this."""
    text = (ROOT / page).read_text()
    [found] = [found for found in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL) if holding in found]
    return str(found)


@contextmanager
def home(place: Path, script: Script) -> Iterator[tuple[Started, dict[str, str]]]:
    """A daemon whose state is where a user's is, and the environment of that user."""
    (place / ".local" / "state").mkdir(parents=True)
    (place / ".local" / "state" / "prorld").symlink_to(place / "state")
    env = environ(place / "state")
    env |= {"HOME": str(place), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"}
    del env["PRORLD_STATE"]
    env.pop("XDG_STATE_HOME", None)
    with scripted_engine(place, script) as engine, daemon(place, engine, talkative=True) as here:
        yield here, env


def typed(place: Path, env: dict[str, str], command: list[str], text: str, client: Client) -> list[str]:
    """What a program prints when this is its last argument."""
    text = PORT.sub(client.address.removeprefix("http://"), text)
    done = subprocess.run(
        [*command, text], env=env, cwd=place, capture_output=True, text=True, timeout=WITHIN_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_calls_of_the_page(tmp_path: Path) -> None:
    """A batch is asked for, read, acknowledged, and looked at."""
    with home(tmp_path, ANSWERS) as (here, env), here.client() as client:
        shell = ["bash", "-euc"]
        lines = typed(tmp_path, env, shell, block("docs/batches.md", "sh", "/v1/batches -d"), client)
        submitted, acknowledged, record = [json.loads(line) for line in lines if line]
        assert (submitted["batch_id"], submitted["target_groups"]) == ("first", 1)
        page = json.loads((tmp_path / "page.json").read_text())
        read = [group["seq"] for group in page["items"]]
        assert acknowledged["through"] == max(read, default=0)
        assert record["acknowledged"] == acknowledged["through"]
        assert all(group["trajectories"] for group in page["items"])


def test_the_loop_of_the_page(tmp_path: Path) -> None:
    """Three steps; the same program again has nothing left to do, and acknowledges what it knows."""
    with home(tmp_path, ANSWERS) as (here, env), here.client() as client:
        text = block("docs/batches.md", "python", "CHECKPOINT")
        lines = typed(tmp_path, env, [sys.executable, "-c"], text, client)
        for n in (1, 2, 3):
            record = client.batch(f"step-{n}")
            told = [line.split()[2] for line in lines if line.startswith(f"step {n} ")]
            assert len(told) == record.groups.informative
            assert record.state in ("complete", "exhausted")
            assert record.groups.informative == 0 or record.acknowledged > 0
        assert typed(tmp_path, env, [sys.executable, "-c"], text, client) == []


def test_the_loop_of_the_page_may_be_killed(tmp_path: Path) -> None:
    """SIGKILL in its second step: the same program ends all three, and no group is told of in two of them."""
    slow = Script(turns=ANSWERS.turns, pick="lot", latency=Latency(fixed_s=0.5))
    with home(tmp_path, slow) as (here, env), here.client() as client:
        text = block("docs/batches.md", "python", "CHECKPOINT")
        address = client.address.removeprefix("http://")
        command = [sys.executable, "-c", PORT.sub(address, text)]
        with subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL) as first:
            until(lambda: "step-2" in [one.batch_id for one in client.batches().items], WITHIN_S, "the second step")
            first.send_signal(signal.SIGKILL)
        assert json.loads((tmp_path / "checkpoint.json").read_text())["step"] == 1
        lines = typed(tmp_path, env, [sys.executable, "-c"], text, client)
        assert {line.split()[1] for line in lines} <= {"2", "3"}
        assert json.loads((tmp_path / "checkpoint.json").read_text())["step"] == 3
        assert all(client.batch(f"step-{n}").state != "running" for n in (1, 2, 3))


def test_the_first_call_of_the_readme(tmp_path: Path) -> None:
    """A job over HTTP, and the same from Python to its end."""
    with home(tmp_path, Script(turns=["ANSWER: 42"])) as (here, env), here.client() as client:
        [line] = typed(tmp_path, env, ["bash", "-euc"], block("README.md", "sh", "curl -H"), client)
        assert client.wait(json.loads(line)["job_id"], within_s=WITHIN_S).reward == 1.0
        lines = typed(tmp_path, env, [sys.executable, "-c"], block("README.md", "python", "SubmitJob"), client)
        assert lines[0].split() == ["ok", "use", "1.0"]
        assert len(lines) == 2
