"""From decisions to the events that clients read, and from those back to decisions. Pure."""

from __future__ import annotations

from msgspec import UNSET

from prorld.domain.batch import Settle
from prorld.domain.group import ADVANTAGE_FORMULA, GroupEnd
from prorld.rollout.batches.members import Group
from prorld.wire.batches import BatchEvent, BatchGroup

__all__ = ["READY", "as_group", "as_settle", "terminal"]

READY = "group.done"


def terminal(settle: Settle, group: Group, *, seq: int, at: str) -> BatchEvent:
    """The terminal event of a group in a batch. What its samples were is told as it is when none of them runs."""
    n = group.size
    nothing: list[float | None] = [None] * n
    ends = [group.samples.get(sample) for sample in range(n)]
    return BatchEvent(
        seq=seq,
        event=f"group.{settle.end.value}",
        at=at,
        index=settle.index,
        group_id=group.group_id,
        instance_id=group.row.instance_id,
        reason=settle.reason or UNSET,
        rewards=list(settle.rewards) or nothing,
        verdicts=[None if end is None else end.verdict for end in ends],
        durations_s=[None if end is None else end.duration_s for end in ends],
        policy_versions=[[] if end is None else list(end.policy_versions) for end in ends],
        job_ids=[job_id if group.row.is_started else None for job_id in group.job_ids()],
        advantages=list(settle.advantages) or nothing,
        advantage_formula=ADVANTAGE_FORMULA,
        staleness=settle.staleness,
    )


def as_settle(event: BatchEvent) -> Settle:
    """The decision that an event of an earlier life told, as far as the book needs it."""
    assert isinstance(event.index, int)
    end = GroupEnd(event.event.removeprefix("group."))
    return Settle(group_id=str(event.group_id), index=event.index, end=end)


def as_group(event: BatchEvent) -> BatchGroup:
    """An accepted group in its short form, without what it was asked and what was answered."""
    names = set(BatchGroup.__struct_fields__) - {"instance", "trajectories"}
    return BatchGroup(**{name: getattr(event, name) for name in names})
