"""Random groups as they come over the wire: forks, samples that are masked or dropped, any bits of a float."""

from __future__ import annotations

import struct

import msgspec
from hypothesis import strategies as st

from prorld.domain.outcome import Verdict
from prorld.wire.batches import PackedBatchGroup
from prorld.wire.trajectory import PackedBranch, PackedTrajectory
from tests.client.test_batches import group

_BITS = st.integers(0, 2**32 - 1)


def branch(index, ids, mask, bits, *, parent=None, fork_at=None, spans=()):
    """A branch with these bits for its log-probabilities."""
    return PackedBranch(
        branch=index, parent=parent, fork_at=fork_at, reason=None if parent is None else "compaction",
        token_ids=struct.pack(f"<{len(ids)}i", *ids), mask=bytes(mask), logprobs=struct.pack(f"<{len(bits)}I", *bits),
        policy_versions=list(spans), segments=[],
    )  # fmt: skip


def trajectory(job_id, branches):
    """A document in which only the branches matter."""
    job = {
        "job_id": job_id, "handler": "calc", "policy": "default", "tenant": "t", "state": "done",
        "timing": {}, "created_at": "2026-01-01T00:00:00Z", "instance": {},
    }  # fmt: skip
    whole = {
        "job": job, "tokenizer": "t", "tools": [], "calls": [], "drift": {}, "reward": 1.0, "step_rewards": [],
        "verdict": "use", "outcome": {"kind": "ok", "code": "ok"}, "branches": [],
    }  # fmt: skip
    document = msgspec.convert(whole, PackedTrajectory, strict=False)
    return msgspec.structs.replace(document, branches=branches)


@st.composite
def branches(draw):
    """A root, and forks of it that share its beginning with mask 0."""
    found: list[PackedBranch] = []
    for index in range(draw(st.integers(1, 3))):
        length = draw(st.integers(0, 12))
        ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length))
        mask = draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
        bits = draw(st.lists(_BITS, min_size=length, max_size=length))
        parent = draw(st.sampled_from(found)) if found else None
        if parent is None:
            found.append(branch(index, ids, mask, bits))
            continue
        shared = draw(st.integers(0, len(parent.mask)))
        before = list(struct.unpack(f"<{len(parent.mask)}i", parent.token_ids))[:shared]
        found.append(
            branch(
                index, before + ids, [0] * shared + mask, [0] * shared + bits, parent=parent.branch, fork_at=shared
            )
        )  # fmt: skip
    return found


@st.composite
def groups(draw) -> PackedBatchGroup:
    """A group of up to five samples; some do not count, though they may have a reward, or a trajectory."""
    n = draw(st.integers(1, 5))
    rewards, advantages, documents = [], [], []
    for at in range(n):
        counts = draw(st.booleans())
        reward = draw(st.floats(-2, 2)) if counts or draw(st.booleans()) else None
        rewards.append(reward)
        advantages.append(draw(st.floats(-2, 2)) if counts else None)
        documents.append(trajectory(f"b:{at}", draw(branches())) if counts or draw(st.booleans()) else None)
    return group(
        1, rewards=rewards, advantages=advantages, trajectories=documents, job_ids=[f"b:{at}" for at in range(n)],
        verdicts=[Verdict.USE if one is not None else Verdict.MASK for one in advantages],
    )  # fmt: skip
