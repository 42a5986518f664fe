"""Whether a stored rollout is what it says, from its tokens and its call log alone. It changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import msgspec

from prorld.rollout.entry import JobEntry
from prorld.tokens.verify import verify
from prorld.wire.looks import Result, Unverifiable, VerifyAnswer, Violation

__all__ = ["verify_rollout"]


def verify_rollout(entry: JobEntry, served: Collection[int | None]) -> VerifyAnswer:
    """Check a job that is done; ``served`` are the versions that the policy's engines have now.

    Slow for long rollouts (32k tokens: 20 ms), and reads only what no longer changes: fit for a thread.
    """
    branches = () if entry.session is None else entry.session.branches
    calls = () if entry.session is None else entry.session.calls
    violations = [msgspec.convert(found, Violation, from_attributes=True) for found in verify(branches, calls)]
    gone: Counter[tuple[int, int | None]] = Counter()
    for call in calls:
        for span in call.policy_versions:
            if span.version not in served:
                gone[span.epoch, span.version] += span.end - span.start
    result: Result = "broken" if violations else "unverifiable" if gone else "ok"
    return VerifyAnswer(
        job_id=entry.spec.job_id,
        ok=result == "ok",
        result=result,
        violations=violations,
        unverifiable=[
            Unverifiable(epoch=epoch, version=version, tokens=tokens) for (epoch, version), tokens in gone.items()
        ],
        branches=len(branches),
        calls=len(calls),
        tokens=sum(len(branch) for branch in branches),
        sampled=sum(call.sampled_len for call in calls),
    )
