"""What a run has to do: one sample after the other, each with an id that a later run of the same tasks finds again.

An id is ``RUN.TASK.SAMPLE``: the run's own name, a digest of the instance and of everything the job says beside it, and
the number of the sample. The same instance twice in a file is told apart by a count. A further ``.N`` is the N-th job
for a sample whose earlier one can't be had any more.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from prorld.cli.exits import UsageError
from prorld.wire.jobs import SubmitJob

__all__ = ["Sample", "key_of", "new_run", "plan", "run_of"]

_ID = re.compile(r"(?P<run>r[0-9a-f]{8})\.(?P<key>[0-9a-f]{16}(-[0-9]+)?\.[0-9]+)(\.[0-9]+)?")
_DIGEST_CHARS = 16
JOBS_MAX = 10_000_000


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout that is wanted: of the task in this line, as this job. ``key`` stays, whatever the job's id."""

    key: str
    line: int
    job: SubmitJob
    again: int = 0

    @property
    def job_id(self) -> str:
        """The id of its job."""
        assert self.job.job_id is not None
        return self.job.job_id

    def another(self) -> Sample:
        """The same sample as a new job, for one that was forgotten or cancelled."""
        base = self.job_id if not self.again else self.job_id.rpartition(".")[0]
        job = msgspec.structs.replace(self.job, job_id=f"{base}.{self.again + 1}")
        return msgspec.structs.replace(self, job=job, again=self.again + 1)


def new_run() -> str:
    """A name for a run."""
    return f"r{secrets.token_hex(4)}"


def run_of(job_id: str) -> str | None:
    """The run that an id was made by."""
    match = _ID.fullmatch(job_id)
    return None if match is None else match["run"]


def key_of(job_id: str) -> str | None:
    """Which sample of which task an id stands for."""
    match = _ID.fullmatch(job_id)
    return None if match is None else match["key"]


def plan(tasks: Sequence[tuple[int, dict[str, Any]]], template: SubmitJob, *, n: int, run: str) -> list[Sample]:
    """All samples, the n of one task next to each other as one group."""
    if len(tasks) * n > JOBS_MAX:
        raise UsageError(f"{len(tasks)} tasks of {n} samples are more than {JOBS_MAX} jobs")
    seen: Counter[str] = Counter()
    samples: list[Sample] = []
    for line, instance in tasks:
        job = msgspec.structs.replace(template, instance=instance)
        digest = hashlib.sha256(msgspec.json.encode(job, order="deterministic")).hexdigest()[:_DIGEST_CHARS]
        seen[digest] += 1
        task = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        samples += [_sample(job, run, task, line, i, grouped=n > 1) for i in range(n)]
    return samples


def _sample(job: SubmitJob, run: str, task: str, line: int, i: int, *, grouped: bool) -> Sample:
    key = f"{task}.{i}"
    named = msgspec.structs.replace(
        job, job_id=f"{run}.{key}", group_id=f"{run}.{task}" if grouped else None, sample_index=i
    )
    return Sample(key=key, line=line, job=named)
