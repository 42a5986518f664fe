"""Rows of public sets become instances that the handler takes; what is no task becomes none."""

from __future__ import annotations

from typing import Any

import pytest

from prorld.handlers.registry import decode_instance, discover
from prorld_math import MathInstance, convert
from prorld_math.datasets import DATASETS
from prorld_math.handler import MathHandler

COMPETITION = {
    "id": "aime25-0",
    "question": "What is 7 times 10?",
    "expected_answer": "70",
    "subset_for_metrics": "aime25",
    "verifier_type": "math_with_judge",
}
VERL = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "What is 17 times 2?"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule"},
    "extra_info": {"index": 1},
}
INFORMAL = {"name": "a", "informal_prefix": "/-- What is half of 130? Show that it is 65.-/\n", "split": "test"}


@pytest.mark.parametrize(
    ("converter", "row", "answer"),
    [
        (convert.competition, COMPETITION, "70"),
        (convert.aime25, COMPETITION, "70"),
        (convert.aime24, COMPETITION, None),
        (convert.hmmt, COMPETITION, None),
        (convert.competition, {**COMPETITION, "expected_answer": ""}, None),
        (convert.competition, {"question": 5}, None),
        (convert.informal_minif2f, INFORMAL, "65"),
        (convert.informal_minif2f, {"informal_prefix": "/-- Show that it is \\textbf{(C)} \\frac{5}{3}.-/"}, None),
        (
            convert.informal_minif2f,
            {"informal_prefix": "/-- Half? Show that it is \\textbf{(C)} \\frac12.-/"},
            "\\frac12",
        ),
        (convert.informal_minif2f, {"informal_prefix": "/-- Which? Show that it is \\text{(D)}.-/"}, None),
        (convert.informal_minif2f, {"informal_prefix": "/-- How many? Show that it is \\text{none}.-/"}, None),
        (convert.informal_minif2f, {"informal_prefix": "/-- Show that $n$ is even.-/"}, None),
        (convert.deepscaler, {"problem": "What is 2+2?", "answer": "4", "solution": "It is 4."}, "4"),
        (convert.deepscaler, {"problem": "What is 2+2?", "answer": True}, None),
        (convert.verl, VERL, "34"),
        (convert.dapo, {**VERL, "reward_model": {"ground_truth": ["34"]}}, "34"),
        (convert.dapo, {**VERL, "prompt": [{"role": "assistant", "content": "x"}]}, None),
        (convert.dapo, {**VERL, "prompt": []}, None),
        (convert.eurus, {**VERL, "ability": "math", "data_source": "numina_amc_aime"}, "34"),
        (convert.eurus, {**VERL, "ability": "code"}, None),
        (convert.eurus, {}, None),
    ],
)
def test_a_row_becomes_an_instance_or_none(converter: Any, row: dict[str, Any], answer: str | None):
    """Each is decoded as at submit, and its answer is the row's."""
    made = list(converter(row, "file.jsonl"))
    golds = []
    for instance in made:
        decoded = decode_instance(MathHandler(), instance)
        assert isinstance(decoded, MathInstance)
        # As `prorld data` does, which writes nothing that a job without a handler's name can't have.
        assert discover(["math"]).select(None, instance).name == "math"
        golds.append(decoded.gold)
    assert golds == ([] if answer is None else [answer])


def test_every_set_names_a_converter_that_is_there():
    """Names are found as ``prorld data`` finds them."""
    for dataset in DATASETS:
        module, _, function = dataset.convert.partition(":")
        assert module == "prorld_math.convert"
        assert callable(getattr(convert, function))
        assert dataset.handler == MathHandler.name
    assert len({dataset.name for dataset in DATASETS}) == len(DATASETS)
