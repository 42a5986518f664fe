"""The learner of the loop's tests and the real one keep the same contract."""

from __future__ import annotations

from functools import partial

import pytest

from prorld.train.shapes import LearnSettings
from tests.train import learner_contract as contract
from tests.train.fake_learner import FakeLearner
from tests.train.support import tiny_model

KINDS = ["fake", pytest.param("torch", marks=pytest.mark.real), pytest.param("lora", marks=pytest.mark.real)]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def open_learner(kind, tmp_path_factory):
    """Makes one as a new life does."""
    if kind == "fake":
        return FakeLearner
    pytest.importorskip("torch")
    from prorld.train.learner import open_learner  # noqa: PLC0415 # torch may be missing

    rank = 4 if kind == "lora" else None
    return partial(open_learner, tiny_model(tmp_path_factory.mktemp("model")), LearnSettings(lora_rank=rank))


@pytest.fixture
def form(kind):
    return "lora" if kind == "lora" else "weights"


def test_steps_are_counted(open_learner):
    """As ``learner_contract`` says."""
    contract.steps_are_counted(open_learner)


def test_nothing_to_learn_is_no_step(open_learner):
    """As ``learner_contract`` says."""
    contract.nothing_to_learn_is_no_step(open_learner)


def test_a_checkpoint_brings_all_of_it_back(open_learner, tmp_path, form):
    """As ``learner_contract`` says."""
    contract.a_checkpoint_brings_all_of_it_back(open_learner, tmp_path, form)


def test_a_hand_over_takes_the_place_of_the_last(open_learner, tmp_path, form):
    """As ``learner_contract`` says."""
    contract.a_hand_over_takes_the_place_of_the_last(open_learner, tmp_path, form)
