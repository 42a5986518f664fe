"""What a batch is asked for, and what its book can decide. Pure types, and the check that they can be had at all."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, TypeAlias

import msgspec

from prorld.domain.group import GroupEnd, Informative, OnError, OnTimeout, SampleEnd
from prorld.domain.versions import PolicyVersion
from prorld.errors import Impossible

__all__ = [
    "BatchRules",
    "BatchState",
    "CancelSamples",
    "Decision",
    "End",
    "Leftovers",
    "PolicyNow",
    "Selection",
    "Settle",
    "Start",
    "Wants",
    "check_rules",
]

Selection = Literal["arrival", "submission"]
Leftovers = Literal["carry", "drain", "cancel"]


class BatchState(StrEnum):
    """Where a batch is. Only ``running`` is no end."""

    RUNNING = "running"
    COMPLETE = "complete"
    EXHAUSTED = "exhausted"
    CANCELLED = "cancelled"
    FAILED = "failed"


class BatchRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch was asked for, with every default filled in.

    ``max_ready_groups`` bounds a stream. A batch with a target is bounded by that, and an evaluation by its prompts:
    a trainer that collects either of them only at the end must not stop it half way.
    """

    samples_per_group: int
    target_groups: int | None
    max_running_groups: int
    max_ready_groups: int
    max_groups: int | None = None
    informative: Informative = Informative()
    selection: Selection = "arrival"
    min_usable: int
    grace_s: float = 0.0
    on_error: OnError = "retry"
    on_timeout: OnTimeout = "mask"
    leftovers: Leftovers = "carry"
    max_staleness: int | None = 2
    is_eval: bool = False

    @property
    def target(self) -> int | None:
        """How many accepted groups end it. An evaluation delivers all that it is given."""
        return None if self.is_eval else self.target_groups

    @property
    def is_stream(self) -> bool:
        """Whether it goes on until its prompts end."""
        return self.target_groups is None and not self.is_eval


def check_rules(rules: BatchRules) -> None:
    """``Impossible`` for rules that no group, or no number of groups, could ever satisfy."""
    n, needed, informative = rules.samples_per_group, rules.min_usable, rules.informative
    if informative.rule == "mean_between" and (
        informative.low is None or informative.high is None or informative.low > informative.high
    ):
        raise Impossible("mean_between needs low and high, and low may not be above high", code="impossible_rule")
    if needed > n:
        raise Impossible(f"quorum.min_usable is {needed} and a group has {n} samples", code="impossible_quorum")
    if needed < 1:
        raise Impossible(f"quorum.min_usable is {needed}; a group needs at least one", code="impossible_quorum")
    if rules.is_eval:
        return
    if rules.informative.rule == "spread" and needed < 2:
        raise Impossible(
            f"a spread needs two usable samples, and quorum.min_usable is {needed} of {n}; "
            'ask for more, or for the rule "all"',
            code="impossible_quorum",
        )
    if rules.target is not None and rules.max_groups is not None and rules.max_groups < rules.target:
        raise Impossible(
            f"max_groups is {rules.max_groups}, fewer than target_groups, {rules.target}", code="impossible_target"
        )


class PolicyNow(msgspec.Struct, frozen=True, kw_only=True):
    """What is in force of the policy; see ``domain.policy.is_stale``."""

    version: PolicyVersion = PolicyVersion()
    rollbacks: tuple[int, ...] = ()


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Let the samples of this group run."""

    group_id: str


class CancelSamples(msgspec.Struct, frozen=True, kw_only=True):
    """End these samples of a group: it stands without them."""

    group_id: str
    samples: tuple[int, ...]
    reason: str


class Settle(msgspec.Struct, frozen=True, kw_only=True):
    """The one terminal event of a group in this batch. What of it still runs ends, unless it is ``carried``.

    ``rewards`` and ``advantages`` are by sample index; ``staleness`` is set for ``done``. ``ends`` are the samples that
    had ended, by sample index. ``informative`` is null for a group that did not run to its end; a surplus group that
    did has it, whatever became of it.
    """

    group_id: str
    index: int
    end: GroupEnd
    reason: str = ""
    rewards: tuple[float | None, ...] = ()
    advantages: tuple[float | None, ...] = ()
    staleness: int | None = None
    informative: bool | None = None
    ends: tuple[SampleEnd, ...] = ()


class Wants(msgspec.Struct, frozen=True, kw_only=True):
    """How many groups it could have used so far, all together: the sampler may send up to here."""

    total: int


class End(msgspec.Struct, frozen=True, kw_only=True):
    """The batch is over; its last decision."""

    state: BatchState
    reason: str


Decision: TypeAlias = Start | CancelSamples | Settle | Wants | End
