"""The calls of one rollout whose tokens were taken, and the policy versions that made them.

It owns the records and the versions that decide whether a rollout is too old; it makes no call and takes no token.
"""

from __future__ import annotations

from collections.abc import Sequence

from prorld.domain.branch import Branch
from prorld.domain.calls import CallParams, CallRecord
from prorld.domain.job import JobSpec, effective_seed
from prorld.domain.versions import PolicyVersion, deciding
from prorld.inference.contract import Generation

__all__ = ["CallLog"]


class CallLog:
    """The log of one attempt. ``n`` of a call is its place here."""

    def __init__(self, spec: JobSpec, attempt: int) -> None:
        self._spec = spec
        self._attempt = attempt
        self._calls: list[CallRecord] = []
        self._ends: list[PolicyVersion] = []

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def calls(self) -> tuple[CallRecord, ...]:
        """The records, in order."""
        return tuple(self._calls)

    @property
    def ends(self) -> Sequence[PolicyVersion]:
        """The versions that decide whether the rollout is too old."""
        return self._ends

    @property
    def next_seed(self) -> int | None:
        """What the next call is to be seeded with."""
        return effective_seed(self._spec, self._attempt, len(self._calls))

    def backends(self) -> list[str]:
        """The engines that made tokens, in order of their first."""
        return list(dict.fromkeys(call.backend for call in self._calls))

    def versions(self) -> list[int]:
        """The policy versions that made tokens, rising."""
        spans = (span for call in self._calls for span in call.policy_versions)
        return sorted({span.version for span in spans if span.version is not None})

    def record(self, generation: Generation, *, turn: int, branch: Branch, backend: str) -> CallRecord:
        """The record of the next call, which is not in the log yet; ``branch`` is its prompt."""
        n = len(self._calls)
        return CallRecord(
            n=n,
            turn=turn,
            branch=branch.index,
            backend=backend,
            policy_versions=list(generation.versions),
            prompt_len=len(branch),
            sampled_len=len(generation.token_ids),
            finish_reason=generation.finish,
            latency_s=generation.latency_s,
            cached_prefix_len=generation.cached_tokens,
            exact=generation.exact and generation.versions_exact,
            params=self._params(generation),
            engine_request_id=generation.engine_request_id,
        )

    def add(self, record: CallRecord) -> None:
        """Its tokens were taken."""
        self._calls.append(record)
        found = {span.made_by for span in record.policy_versions if span.made_by is not None}
        self._ends = deciding(found.union(self._ends))

    def _params(self, generation: Generation) -> CallParams:
        sampling = self._spec.sampling
        return CallParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            logprobs_mode=generation.logprobs_mode,
            seed=None if "seed" in generation.ignored else self.next_seed,
            ignored=list(generation.ignored),
        )
