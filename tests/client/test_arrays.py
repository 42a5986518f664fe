"""Arrays of branches: the bytes that came, in the place where they came; padded and packed say the same."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.client import ClientError, usable
from prorld.client.arrays import Row, advantages, arrays, rows_of_group, versions
from prorld.client.layout import buckets, packed, padded
from prorld.domain.branch import VersionSpan
from prorld.domain.group import Usable
from prorld.domain.group import advantages as of_the_daemon
from prorld.wire.batches import PackedBatchGroup
from tests.client.rollouts import branch, groups, trajectory
from tests.client.test_batches import group

NAN = 0x7FC00001


def test_arrays_lie_where_the_decoder_put_the_bytes():
    """From MessagePack to numpy without a copy, not even of a NaN; and nobody can write to them."""
    data = msgspec.msgpack.encode(branch(0, [1, 2, 70000], [0, 1, 1], [0, NAN, 0x80000000]))
    decoded = msgspec.msgpack.decode(data, type=type(branch(0, [], [], [])))
    found = arrays(decoded)
    array: Any
    for array, column in zip(found, (decoded.token_ids, decoded.mask, decoded.logprobs), strict=True):
        assert np.shares_memory(array, np.frombuffer(column, np.uint8))
        assert array.__array_interface__["data"][0] == np.frombuffer(column, np.uint8).__array_interface__["data"][0]
        assert not array.flags.writeable
    assert found.token_ids.tolist() == [1, 2, 70000]
    assert found.logprobs.tobytes() == decoded.logprobs
    assert [array.dtype.str for array in found] == ["<i4", "|u1", "<f4"]


@pytest.mark.parametrize("fields", [{"token_ids": b"\x00" * 7}, {"mask": b"\x01"}, {"logprobs": b"\x00" * 16}])
def test_columns_that_do_not_fit_are_refused(fields):
    """A damaged branch is never trained on."""
    damaged = msgspec.structs.replace(branch(0, [1, 2], [0, 1], [0, 0]), **fields)
    with pytest.raises(ClientError) as caught:
        arrays(damaged)
    assert caught.value.stable_code == "bad_reply"


def test_versions_are_by_token():
    """Where the policy made nothing there is none, though a span may say one."""
    spans = [
        VersionSpan(start=0, end=2, version=3),
        VersionSpan(start=2, end=4, version=4),
        VersionSpan(start=4, end=5),
    ]
    assert versions(branch(0, [1] * 5, [0, 1, 1, 1, 1], [0] * 5, spans=spans)).tolist() == [-1, 3, 4, 4, -1]


@given(groups())
def test_rows_are_the_sampled_branches_of_the_samples_that_count(found: PackedBatchGroup):
    """In order, each with the advantage of its rollout; and a branch that nobody sampled in is none."""
    expected = [
        (number, sample.job_id, one.branch, sample.advantage)
        for number, sample in enumerate(usable(found), 10)
        for one in (sample.trajectory.branches if sample.trajectory else [])
        if 1 in one.mask
    ]
    rows = rows_of_group(found, first=10)
    assert [(row.rollout, row.job_id, row.branch, row.advantage) for row in rows] == expected


@given(groups(), st.integers(1, 8), st.booleans())
def test_padded_and_packed_say_the_same(found: PackedBatchGroup, multiple_of: int, left: bool):
    """Token by token, to the bit; what is filled in is marked so and never trained on."""
    rows = rows_of_group(found)
    wide, flat = padded(rows, pad_id=-7, multiple_of=multiple_of, left=left), packed(rows)
    assert wide.token_ids.shape[1] % multiple_of == 0
    assert not wide.mask[~wide.attention].any()
    assert (wide.token_ids[~wide.attention] == -7).all()
    assert wide.attention.sum(axis=1).tolist() == wide.lengths.tolist()
    for one, other in ((wide.token_ids, flat.token_ids), (wide.mask, flat.mask), (wide.logprobs, flat.logprobs)):
        assert one[wide.attention].tobytes() == other.tobytes()
    assert np.diff(flat.starts).tolist() == wide.lengths.tolist()
    for at, row in enumerate(rows):
        mine = slice(int(flat.starts[at]), int(flat.starts[at + 1]))
        assert flat.logprobs[mine].tobytes() == row.arrays.logprobs.tobytes()
        assert flat.token_ids[mine].tolist() == row.arrays.token_ids.tolist()
        assert flat.positions[mine].tolist() == list(range(len(row)))
        assert {*flat.rollouts[mine].tolist()} == {row.rollout} == {int(wide.rollouts[at])}
        assert {*flat.advantages[mine].tolist()} == {float(np.float32(row.advantage))} == {float(wide.advantages[at])}


@given(groups(), st.integers(1, 60), st.integers(1, 4))
def test_buckets_hold_each_row_once_and_no_more_than_they_may(found: PackedBatchGroup, tokens_max: int, multiple: int):
    """Padded; but for a row that is too long by itself, which is alone."""
    rows = rows_of_group(found)
    cut = buckets(rows, tokens_max, multiple_of=multiple)
    names = sorted((row.job_id, row.branch) for some in cut for row in some)
    assert names == sorted((row.job_id, row.branch) for row in rows)
    for some in cut:
        assert padded(some, multiple_of=multiple).token_ids.size <= tokens_max or len(some) == 1
    lengths = [len(row) for some in cut for row in some]
    assert lengths == sorted(lengths, reverse=True)
    again = buckets(rows, tokens_max, multiple_of=multiple)
    assert [[id(row) for row in some] for some in again] == [[id(row) for row in some] for some in cut]


@given(st.lists(st.none() | st.floats(-10, 10), max_size=12))
def test_masked_samples_have_no_part_in_the_baseline(rewards: list[float | None]):
    """Advantages are those of the others alone, by whatever baseline; ``grpo`` is the daemon's."""
    counted = [reward for reward in rewards if reward is not None]
    for baseline in ("grpo", "mean", "others"):
        found = advantages(rewards, baseline)
        assert [math.isnan(one) for one in found] == [reward is None for reward in rewards]
        assert np.array_equal(found[~np.isnan(found)], advantages(counted, baseline))
    if len(counted) > 1:
        whole = [
            Usable(sample_index=at, reward=reward, metric=reward, oldest=None) for at, reward in enumerate(counted)
        ]
        assert np.allclose(advantages(counted), np.array(of_the_daemon(whole, len(whole)), float), atol=1e-6)
        others = [(sum(counted) - reward) / (len(counted) - 1) for reward in counted]
        assert np.allclose(advantages(counted, "others"), np.array(counted) - np.array(others), atol=1e-9)


@pytest.mark.parametrize("baseline", ["grpo", "mean", "others"])
def test_equal_rewards_teach_nothing(baseline):
    """Exactly nothing, whatever their sum is rounded to; and so does one alone."""
    assert advantages([0.1, None, 0.1, 0.1], baseline).tolist()[2:] == [0.0, 0.0]
    assert advantages([None, 0.7], baseline).tolist()[1:] == [0.0]


def test_a_baseline_of_ones_own_leaves_masked_samples_out():
    """Also one that has a reward; the daemon's advantages count where none is named."""
    document = trajectory("b:0", [branch(0, [1], [1], [0])])
    found = group(
        1, rewards=[1.0, 5.0, 0.0], advantages=[0.25, None, -0.25], trajectories=[document, document, document],
        job_ids=["a", "b", "c"],
    )  # fmt: skip
    assert [row.advantage for row in rows_of_group(found)] == [0.25, -0.25]
    assert [row.advantage for row in rows_of_group(found, baseline="mean")] == [0.5, -0.5]


def test_a_group_without_trajectories_is_told():
    """They have to be asked for."""
    with pytest.raises(ClientError, match="ask for them"):
        rows_of_group(group(1))


def test_nothing_is_laid_out_as_nothing():
    """No rows are no error."""
    nothing: list[Row] = []
    assert padded(nothing).token_ids.shape == (0, 0)
    assert packed(nothing).starts.tolist() == [0]
    assert buckets(nothing, 8) == []
