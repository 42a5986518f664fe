"""The blocks of ``docs/trainers``, run as they stand beside a real daemon; what is not here is stood in for."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from prorld.client.adapters import slime, verl
from prorld.client.adapters.settings import AdapterSettings, settings_from
from prorld.client.adapters.skyrl import ProrldGenerator, instances_of
from tests.client.adapters.test_trl_trains import tiny_model
from tests.client.adapters.worlds import needs_calc, sums, talkative, world
from tests.daemon.support import Started, environ

pytestmark = [needs_calc, pytest.mark.slow]

PAGES = Path(__file__).parents[3] / "docs" / "trainers"
VERL_SETTING = re.compile(r"\+actor_rollout_ref\.rollout\.custom\.prorld\.(\S+)=(\S+)")
# An instance that is solved in two turns, and one that is solved at once.
[TOOL, PLAIN] = sums(2, first=1)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """A daemon for all pages."""
    with world(tmp_path_factory.mktemp("world"), talkative()) as (started, _):
        yield started


@pytest.fixture(autouse=True)
def _found(here: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written on the pages finds it by itself."""
    monkeypatch.setenv("PRORLD_STATE", str(here.state))
    monkeypatch.delenv("PRORLD_ADDRESS", raising=False)


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page."""
    return re.findall(rf"```{language}\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)


def typed(page: str, number: int = 0) -> dict[str, Any]:
    """A block of Python, run; what it defines."""
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(blocks(page, "python")[number], page, "exec"), names)
    return names


def test_every_page_is_listed() -> None:
    """The table of trainers has all of them, and no other."""
    listed = re.findall(r"\]\(([a-z-]+\.md)\)", (PAGES / "README.md").read_text())
    assert sorted(set(listed)) == sorted(path.name for path in PAGES.glob("*.md") if path.name != "README.md")


def test_every_setting_is_described() -> None:
    """With its default, where it has a simple one."""
    rows = re.findall(r"^\| (`[a-z_`, ]+) \| (.*?) \|", (PAGES / "README.md").read_text(), re.MULTILINE)
    named = [name for names, _ in rows for name in re.findall(r"`([a-z_]+)`", names)]
    assert sorted(named) == sorted(AdapterSettings.__struct_fields__)
    told = dict(rows)
    own = AdapterSettings()
    assert told["`rollouts_s`"] == f"{own.rollouts_s:.0f}"
    assert told["`away_s`"] == f"{own.away_s:.0f}"
    assert told["`update_s`"] == f"{own.update_s:.0f}"
    assert told["`max_attempts`, `priority`"] == f"{own.max_attempts}, {own.priority}"


def test_openrlhf() -> None:
    """Tokens, and the ranges in which the policy acted."""
    execute = typed("openrlhf.md")["AgentExecutor"]().execute
    sampling = SimpleNamespace(temperature=1.0, max_tokens=32)
    out = asyncio.run(execute("What is it?", json.dumps(TOOL), sampling, 4096, None, None))
    assert (out["prompt"], out["reward"]) == ("What is it?", 1.0)
    assert len(out["action_ranges"]) == 2
    assert all(end <= len(out["observation_tokens"]) for _, end in out["action_ranges"])


def test_areal() -> None:
    """Columns with a row for the one branch."""
    out = asyncio.run(typed("areal.md")["ProrldWorkflow"]().arun_episode(None, {"instance": PLAIN}))
    columns = {name: getattr(column, "tolist", lambda column=column: column)() for name, column in out.items()}
    assert columns["rewards"] == [1.0]
    assert len(columns["input_ids"][0]) == len(columns["loss_mask"][0]) == len(columns["logprobs"][0])


def test_prime_rl() -> None:
    """One sample of equal columns."""
    [sample] = typed("prime-rl.md")["training_samples"](PLAIN)
    assert len({len(sample[name]) for name in ("token_ids", "mask", "logprobs", "temperatures")}) == 1


def test_atropos() -> None:
    """A group for each instance."""
    groups = [*typed("atropos.md")["scored_groups"]([TOOL, PLAIN], samples=2)]
    assert [group["scores"] for group in groups] == [[1.0, 1.0]] * 2
    assert all(-100 in masks for group in groups for masks in group["masks"])


def test_nemo_rl() -> None:
    """Items whose prompts begin with all tokens seen before."""
    out = typed("nemo-rl.md")["run"](
        {"responses_create_params": {"input": [], "max_output_tokens": 32}, "instance": TOOL}
    )
    items = [item for item in out["response"]["output"] if "generation_token_ids" in item]
    assert out["reward"] == 1.0
    first, second = items
    seen = first["prompt_token_ids"] + first["generation_token_ids"]
    assert second["prompt_token_ids"][: len(seen)] == seen


def test_fine_tuning() -> None:
    """A conversation for each that was good enough."""
    make = typed("sft.md")["conversations"]
    assert [line["messages"][-1]["content"] for line in make([PLAIN])] == ["ANSWER: 42"]
    assert [*make([PLAIN], at_least=2.0)] == []


def test_skyrl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point's method makes a generator, and a row of the data is one of its instances."""
    main = ModuleType("skyrl.train.entrypoints.main_base")
    setattr(main, "BasePPOExp", object)  # noqa: B010
    monkeypatch.setitem(sys.modules, main.__name__, main)
    config = SimpleNamespace(generator=SimpleNamespace(step_wise_trajectories=True))
    engines = SimpleNamespace(server_urls=["http://127.0.0.1:1"])
    made = typed("skyrl.md")["Exp"]().get_generator(config, SimpleNamespace(pad_token_id=0), engines)
    assert isinstance(made, ProrldGenerator)
    assert [(one.kind, one.url) for one in made._weights._engines] == [("vllm", "http://127.0.0.1:1")]
    made.close()
    row = typed("skyrl.md", 1)["row"]
    # What is neither prompt nor environment is carried.
    extras = {name: value for name, value in row.items() if name not in {"prompt", "env_class"}}
    assert instances_of({"env_extras": [extras]}, "instance")[0]["answer"] == "42"


def test_verl() -> None:
    """The settings on the command line are settings, and the row of the data has an instance."""
    [block] = blocks("verl.md", "sh")
    words = shlex.split(block.replace("\\\n", " "))
    said: dict[str, Any] = {}
    for name, value in [match.groups() for match in map(VERL_SETTING.fullmatch, words) if match]:
        first, _, second = name.partition(".")
        said[first] = {second: int(value)} if second else value
    settings = settings_from(said)
    assert (settings.handler, settings.run, settings.agent.max_turns) == ("math", "math-1", 10)
    [named] = [word.partition("=")[2] for word in words if "agent_loop_manager_class" in word]
    assert named == f"{verl.__name__}.{verl.ProrldAgentLoopManager.__name__}"
    row = typed("verl.md")["row"]
    assert verl.instances_of({"extra_info": [row["extra_info"]]}, 1, "instance")[0]["answer"] == "42"


def test_slime() -> None:
    """The function is there under its name, and the settings are settings."""
    yaml = pytest.importorskip("yaml")
    [block] = blocks("slime.md", "yaml")
    assert settings_from(yaml.safe_load(block)["prorld"]).informative == "spread"
    [line] = blocks("slime.md", "sh")
    assert f"{slime.__name__}.{slime.generate_rollout.__name__}" in line
    [row] = blocks("slime.md", "json")
    assert json.loads(row)["metadata"]["instance"]["answer"] == "42"


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
def test_trl(here: Started, tmp_path: Path) -> None:
    """The whole page trains, each step with its own version of the weights."""
    pytest.importorskip("trl")
    tiny_model(tmp_path / "model")
    env = environ(here.state) | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    [block] = blocks("trl.md", "python")
    done = subprocess.run(
        [sys.executable, "-c", block], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with here.client() as client:
        assert client.policy("default").version == 2
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["step-1"]
