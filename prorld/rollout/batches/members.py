"""Groups in memory, and who hears of the end of a job that belongs to one.

A group has one owner at a time: the batch that runs it, or nobody while it waits under an ended one. What ends
meanwhile is noted on the group itself, so that nothing is missed between two owners.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Protocol

import msgspec

from prorld.domain.group import SampleEnd
from prorld.domain.job import JobSpec
from prorld.domain.outcome import OutcomeKind, Verdict
from prorld.domain.versions import deciding
from prorld.store.batches import BatchSpec, GroupRow
from prorld.store.jobs import StoredJob
from prorld.store.rows import DAMAGED

__all__ = ["Group", "Members", "Owner", "lost", "never_ran", "sample_end"]


class Owner(Protocol):
    """Whoever runs a group."""

    def hear(self, group: Group, end: SampleEnd) -> None:
        """A sample of a group of this owner has ended. May neither block nor raise."""
        ...


class Group:
    """One group. ``maker`` is what the batch that it was submitted to asked for; ``samples`` are those that ended."""

    def __init__(self, row: GroupRow, maker: BatchSpec) -> None:
        self.row = row
        self.maker = maker
        self.owner: Owner | None = None
        self.samples: dict[int, SampleEnd] = {}
        self.salts = 0

    def __repr__(self) -> str:
        return f"<Group {self.group_id} {len(self.samples)}/{self.size}>"

    @property
    def group_id(self) -> str:
        """Its id, which it keeps."""
        return self.row.group_id

    @property
    def size(self) -> int:
        """How many samples it has."""
        return self.maker.rules.samples_per_group

    @property
    def key(self) -> tuple[str, str]:
        """Ids are unique per tenant only."""
        return self.maker.tenant, self.group_id

    @property
    def runs(self) -> bool:
        """Whether any job of it may still be there."""
        return self.row.is_started and len(self.samples) < self.size

    def job_id(self, sample: int) -> str:
        """The id of one of its jobs."""
        return f"{self.group_id}:{sample}{self.row.salt}"

    def job_ids(self) -> list[str]:
        """Those of all."""
        return [self.job_id(sample) for sample in range(self.size)]

    def running_ids(self, samples: Sequence[int] | None = None) -> list[str]:
        """Those that have not ended, of some samples or of all."""
        wanted = range(self.size) if samples is None else samples
        return [self.job_id(n) for n in wanted if n not in self.samples] if self.row.is_started else []

    def jobs(self) -> list[JobSpec]:
        """The jobs of its samples."""
        maker = self.maker
        return [
            JobSpec(
                job_id=self.job_id(sample), tenant=maker.tenant, handler=maker.handler,
                instance=msgspec.msgpack.decode(self.row.instance), policy=maker.policy, sampling=maker.sampling,
                agent=maker.agent, timeouts=maker.timeouts, priority=maker.priority, purpose=maker.purpose,
                batch_id=maker.batch_id, group_id=self.group_id, sample_index=sample, max_attempts=maker.max_attempts,
                # How old a group may be its batch decides, and a carried one gets another batch.
                max_staleness=None, capture=maker.capture, metadata=maker.metadata,
            )
            for sample in range(self.size)
        ]  # fmt: skip

    def change(self, **fields: object) -> None:
        """Another row."""
        self.row = msgspec.structs.replace(self.row, **fields)

    def new_salt(self) -> None:
        """Other ids for its jobs: those that it had are taken."""
        self.salts += 1
        self.change(salt=f"-{secrets.token_hex(3)}")

    def note(self, end: SampleEnd) -> bool:
        """A sample has ended; whether that is news."""
        if end.sample_index in self.samples:
            return False
        self.samples[end.sample_index] = end
        return True


class Members:
    """All groups of batches that run, or that are left over, by tenant and id."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str], Group] = {}
        self.waiting_bytes = 0

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: Group) -> None:
        """A group is there."""
        self._groups[group.key] = group
        self.waiting_bytes += len(group.row.instance)

    def forget(self, group: Group) -> None:
        """It is settled, and none of its jobs is left."""
        if self._groups.pop(group.key, None) is not None:
            self.waiting_bytes -= len(group.row.instance)

    def has(self, tenant: str, group_id: str) -> bool:
        """Whether a group of this id is not settled."""
        return (tenant, group_id) in self._groups

    def ended(self, job: StoredJob) -> None:
        """A job has ended, whatever it belongs to; the listener of ``prorld.rollout.members.Jobs``."""
        spec = job.spec
        if spec.group_id is None:
            return
        group = self._groups.get((spec.tenant, spec.group_id))
        # A client may name a job of its own after a group of ours, but not as one of a batch.
        if group is None or spec.batch_id != group.maker.batch_id or spec.sample_index >= group.size:
            return
        if group.job_id(spec.sample_index) != spec.job_id:
            return
        end = sample_end(job)
        if group.note(end) and group.owner is not None:
            group.owner.hear(group, end)


def sample_end(job: StoredJob) -> SampleEnd:
    """What a group needs to know of an ended job."""
    document = job.trajectory
    record, outcome = document.job, document.outcome
    sampled = {
        span.made_by for branch in document.branches for span in branch.policy_versions if span.made_by is not None
    }
    timing = record.timing
    return SampleEnd(
        sample_index=job.spec.sample_index,
        kind=outcome.kind,
        verdict=document.verdict,
        stage=outcome.stage,
        code=outcome.code,
        reward=document.reward,
        metrics=record.reward_parts,
        duration_s=round(timing.init_s + timing.run_s + timing.eval_s, 6),
        sampled_tokens=record.tokens.sampled,
        oldest=min(sampled, default=None),
        sampled=tuple(deciding(sampled)),
        policy_versions=record.policy_versions,
    )


def never_ran(sample: int, code: str) -> SampleEnd:
    """The end of a sample whose job could not be made."""
    return SampleEnd(sample_index=sample, kind=OutcomeKind.HANDLER_ERROR, verdict=Verdict.DROP, code=code)


def lost(sample: int) -> SampleEnd:
    """The end of a sample of which the journal can't say any more what became of it."""
    return SampleEnd(sample_index=sample, kind=OutcomeKind.LOST, verdict=Verdict.DROP, code=DAMAGED)
