"""Whether a stored rollout is what it says, from its tokens, its call log and what engines say of it now.

It changes nothing. ``Rescorer`` is the only part that asks anybody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import msgspec
import trio

from prorld.domain.branch import Branch
from prorld.domain.calls import CallRecord
from prorld.domain.scoring import Gap, Section, Skipped, Tolerance, UnscoredReason, compare, drifts, plan
from prorld.domain.versions import PolicyVersion, in_words
from prorld.errors import BackendError
from prorld.inference.rescoring import CannotScore, Scored, Scorer
from prorld.kit.lanes import Lane
from prorld.store.jobs import StoredJob
from prorld.tokens.verify import verify
from prorld.wire.looks import Rescore, Result, Unverifiable, VerifyAnswer, VersionScore, Violation
from prorld.wire.trajectory import branch_of

__all__ = ["DRIFT", "Rescorer", "branches_of", "verify_rollout"]

# The code of the violation that only a second look of an engine finds.
DRIFT = "logprob_drift"

# For all versions and branches of one rollout. What is not scored by then is named and not waited for.
RESCORE_S_MAX = 240.0

# Up to here (2 ms) a thread costs more than it saves the loop.
INLINE_TOKENS_MAX = 2048


def branches_of(stored: StoredJob) -> list[Branch]:
    """The branches of an ended job, as they were."""
    return [branch_of(packed) for packed in stored.trajectory.branches]


def verify_rollout(stored: StoredJob, served: Collection[PolicyVersion | None]) -> VerifyAnswer:
    """Check a job that is done; ``served`` are the versions that the policy's engines have now.

    Slow for long rollouts (32k tokens: 20 ms), and reads only what no longer changes: fit for a thread.
    """
    branches, calls = branches_of(stored), stored.trajectory.calls
    violations = [msgspec.convert(found, Violation, from_attributes=True) for found in verify(branches, calls)]
    gone: Counter[PolicyVersion | None] = Counter()
    for call in calls:
        for span in call.policy_versions:
            if span.made_by not in served:
                gone[span.made_by] += span.end - span.start
    return _judged(
        VerifyAnswer(
            job_id=stored.spec.job_id,
            ok=True,
            result="ok",
            violations=violations,
            unverifiable=[_unverifiable("not_served", version, tokens) for version, tokens in gone.items()],
            branches=len(branches),
            calls=len(calls),
            tokens=sum(len(branch) for branch in branches),
            sampled=sum(call.sampled_len for call in calls),
        )
    )


def _judged(answer: VerifyAnswer) -> VerifyAnswer:
    result: Result = "broken" if answer.violations else "unverifiable" if answer.unverifiable else "ok"
    return msgspec.structs.replace(answer, ok=result == "ok", result=result)


def _unverifiable(reason: UnscoredReason, version: PolicyVersion | None, tokens: int) -> Unverifiable:
    if version is None:
        return Unverifiable(epoch=0, version=None, tokens=tokens, reason=reason)
    return Unverifiable(epoch=version.epoch, version=version.version, tokens=tokens, reason=reason)


class Rescorer:
    """Lets engines score stored tokens again. ``lane`` has the thread for long comparisons."""

    def __init__(self, scorer: Scorer, lane: Lane) -> None:
        self._scorer = scorer
        self._lane = lane

    async def rescored(self, stored: StoredJob, answer: VerifyAnswer, tolerance: Tolerance) -> VerifyAnswer:
        """The answer with a second look at every sampled token, or the reason why there is none.

        A trajectory that breaks a law of its own is not scored: its tokens can't be told from one another.
        """
        if answer.violations:
            return answer
        look = _Look(tolerance)
        began = trio.current_time()
        branches = branches_of(stored)
        sections, look.skipped = plan(branches, stored.trajectory.calls)
        left = list(sections)
        with trio.move_on_after(RESCORE_S_MAX):
            await trio.lowlevel.checkpoint()
            while left:
                await self._look_at(look, stored.spec.policy, branches[left[0].branch], left[0])
                left.pop(0)
        for section in left:
            look.skip("unscored", section.version, section.tokens)
        return _judged(
            msgspec.structs.replace(
                answer,
                violations=look.violations(stored.trajectory.calls),
                unverifiable=look.unverifiable(),
                rescore=look.rescore(trio.current_time() - began),
            )
        )

    async def _look_at(self, look: _Look, policy: str, branch: Branch, section: Section) -> None:
        try:
            scored = await self._scorer.score(policy, section.version, branch.ids[: section.end], section.start)
        except CannotScore as exc:
            look.skip(exc.reason, section.version, section.tokens)
            return
        except BackendError:
            look.skip("unscored", section.version, section.tokens)
            return
        if section.tokens <= INLINE_TOKENS_MAX:
            gap = compare(branch, section, scored.logprobs)
        else:
            gap = await self._lane.run(compare, branch, section, scored.logprobs, abandon_on_cancel=True)
        look.note(section, gap, scored)


class _Look:
    """What one second look has found so far."""

    def __init__(self, tolerance: Tolerance) -> None:
        self.skipped: list[Skipped] = []
        self._tolerance = tolerance
        self._gaps: dict[PolicyVersion | None, Gap] = {}
        self._backends: dict[PolicyVersion | None, dict[str, None]] = {}
        self._varying: set[PolicyVersion | None] = set()

    def skip(self, reason: UnscoredReason, version: PolicyVersion | None, tokens: int) -> None:
        self.skipped.append(Skipped(reason=reason, version=version, tokens=tokens))

    def note(self, section: Section, gap: Gap, scored: Scored) -> None:
        if gap.tokens:
            self._gaps.setdefault(section.version, Gap()).add(gap)
            self._backends.setdefault(section.version, {})[scored.backend_id] = None
            if scored.varies:
                self._varying.add(section.version)
        if gap.tokens < section.tokens:
            self.skip("too_long", section.version, section.tokens - gap.tokens)

    def violations(self, calls: Sequence[CallRecord]) -> list[Violation]:
        judged = [(version, gap, self._allowed(version)) for version, gap in self._gaps.items()]
        return [_drift(calls, version, gap, allowed) for version, gap, allowed in judged if drifts(gap, allowed)]

    def _allowed(self, version: PolicyVersion | None) -> Tolerance:
        return self._tolerance.on_engines(varies=version in self._varying)

    def unverifiable(self) -> list[Unverifiable]:
        counted: Counter[tuple[UnscoredReason, PolicyVersion | None]] = Counter()
        for skipped in self.skipped:
            counted[skipped.reason, skipped.version] += skipped.tokens
        return [_unverifiable(reason, version, tokens) for (reason, version), tokens in counted.items()]

    def rescore(self, seconds: float) -> Rescore:
        whole = Gap()
        for gap in self._gaps.values():
            whole.add(gap)
        by_version = [self._by_version(version, gap) for version, gap in self._gaps.items()]
        return Rescore(
            tokens=whole.tokens,
            mean=whole.mean,
            max=whole.max,
            worst=whole.worst,
            by_version=by_version,
            backends=list(dict.fromkeys(name for one in by_version for name in one.backends)),
            tolerance_mean=self._tolerance.mean,
            tolerance_max=self._tolerance.max,
            seconds=round(seconds, 3),
        )

    def _by_version(self, version: PolicyVersion | None, gap: Gap) -> VersionScore:
        assert gap.worst is not None
        return VersionScore(
            epoch=0 if version is None else version.epoch,
            version=None if version is None else version.version,
            tokens=gap.tokens,
            mean=gap.mean or 0.0,
            max=gap.max or 0.0,
            worst=gap.worst,
            backends=[*self._backends[version]],
            tolerance_mean=self._allowed(version).mean,
        )


def _drift(calls: Sequence[CallRecord], version: PolicyVersion | None, gap: Gap, allowed: Tolerance) -> Violation:
    assert gap.worst is not None
    call = calls[gap.worst.call]
    return Violation(
        code=DRIFT,
        message=(
            f"{gap.tokens} tokens of {in_words(version)} differ by {gap.mean:.3g} on average and {gap.max:.3g} at "
            f"token {gap.worst.index}, sampled by {call.backend}; {allowed.mean:g} and {allowed.max:g} are allowed"
        ),
        branch=gap.worst.branch,
        call=gap.worst.call,
    )
