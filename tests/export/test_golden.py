"""Each format of each document is what its golden file says, and what of it may be trained on is what was sampled."""

from __future__ import annotations

import json

import msgspec
import pytest

from prorld.export.formats import export
from prorld.export.names import FORMATS
from prorld.export.reading import NotExportable
from prorld.wire.codec import encode
from prorld.wire.trajectory import Trajectory
from tests.export.documents import ALL, UNUSABLE, USABLE, packed_document
from tests.export.write_golden import GOLDEN, exported, text

# Which key of a row says what is trained on; ATIF and chat are for people, and for training elsewhere.
TRAINED = {
    "verl": ("response_ids", "response_mask", "response_logprobs"),
    "slime": ("tokens", "loss_mask", "rollout_log_probs"),
    "trl": ("completion_ids", "env_mask", "logprobs"),
    "skyrl": ("response_ids", "loss_masks", "rollout_logprobs"),
    "prime_rl": ("token_ids", "mask", "logprobs"),
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ALL)
def test_a_document_is_what_its_golden_file_says(form, name):
    """To the byte of JSON; `python -m tests.export.write_golden` writes them anew."""
    assert exported(name, form) == json.loads((GOLDEN / f"{form}.json").read_text())[name]


def test_golden_files_are_as_they_are_written_and_there_are_no_others():
    """Nobody edits one by hand, and none stays behind when a format goes."""
    assert sorted(path.name for path in GOLDEN.iterdir()) == sorted(f"{form}.json" for form in FORMATS)
    for form in FORMATS:
        assert (GOLDEN / f"{form}.json").read_text() == text(form)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ALL)
def test_a_packed_document_gives_the_same_rows_and_neither_is_changed(form, name):
    """What HTTP carries as MessagePack is exported alike; exporting twice says the same."""
    document = ALL[name]()
    before = encode(document)
    packed = packed_document(document)
    assert tried(packed, form) == tried(document, form) == tried(document, form)
    assert encode(document) == before


def tried(document, form):
    """The rows, or the code of the refusal."""
    try:
        return export(document, form)
    except NotExportable as exc:
        return exc.stable_code


def sampled(document: Trajectory) -> list[tuple[int, float]]:
    """Every sampled token with its log-probability, in any order."""
    return sorted(
        (token, logprob)
        for branch in document.branches
        for token, mask, logprob in zip(branch.token_ids, branch.mask, branch.logprobs, strict=True)
        if mask
    )


@pytest.mark.parametrize("make", USABLE)
@pytest.mark.parametrize("form", TRAINED)
def test_every_sampled_token_is_trained_on_once_and_nothing_else_is(form, make):
    """Over all rows of a rollout; where the format has one row, a fork is refused and not cut short."""
    document = make()
    rows = tried(document, form)
    if isinstance(rows, str):
        assert (form, rows) == ("trl", "several_branches")
        assert sum(any(branch.mask) for branch in document.branches) > 1
        return
    ids, mask, logprobs = TRAINED[form]
    found = []
    for row in rows:
        tokens = row[ids][-len(row[mask]) :]
        assert len(tokens) == len(row[mask]) == len(row[logprobs])
        found += [(t, p) for t, m, p in zip(tokens, row[mask], row[logprobs], strict=True) if m]
    assert sorted(found) == sampled(document)


@pytest.mark.parametrize("make", UNUSABLE)
@pytest.mark.parametrize("form", FORMATS)
def test_what_may_not_be_trained_on_gives_no_reward_and_no_mask(form, make):
    """Whatever its reward and its tokens: never a zero out of trouble, never a masked sample that trains."""
    rows = export(make(), form)
    if form == "atif":
        assert all(row["extra"]["verdict"] in {"mask", "drop"} for row in rows)
        return
    for row in rows:
        assert form in {"slime", "trl"}
        assert row["reward" if form == "slime" else "env_reward"] is None
        assert not any(row["loss_mask" if form == "slime" else "env_mask"])
    if form == "slime":
        assert [row["remove_sample"] for row in rows] == [True]


def test_fillers_are_those_of_each_trainer():
    """0.0 in the record; 0.0, 1.0, -100 or -1 where a trainer writes that."""
    document = ALL["tools"]()
    given = [n for n, mask in enumerate(document.branches[0].mask) if not mask]
    rows = {form: export(document, form)[0] for form in FORMATS}
    assert {document.branches[0].logprobs[n] for n in given} == {0.0}
    assert {rows["prime_rl"]["logprobs"][n] for n in given} == {0.0}
    assert {rows["openrlhf"]["rollout_log_probs"][n] for n in given} == {0.0}
    assert {rows["areal"]["logprobs"][0][n] for n in given} == {0.0}
    assert {rows["areal"]["versions"][0][n] for n in given} == {-1}
    assert {rows["atropos"]["inference_logprobs"][n] for n in given} == {1.0}
    assert {rows["atropos"]["masks"][n] for n in given} == {-100}


def test_rows_can_be_said_in_json():
    """Every row of every format is plain, so that HTTP and the command line can write it."""
    for form in FORMATS:
        for name in ALL:
            found = exported(name, form)
            assert msgspec.json.decode(encode(found)) == found
