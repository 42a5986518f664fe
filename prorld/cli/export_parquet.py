"""Exports as Parquet: a row for each branch of a job, its tokens in columns of lists; ZSTD.

What belongs to the job stands in each of its rows. A job that has no branch has one row without tokens. What is nested
and seldom asked for (instance, segments, calls) is JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import msgspec

from prorld.cli.exits import UsageError
from prorld.cli.extras import cure
from prorld.store.archive import Found
from prorld.wire.jobs import JobRecord
from prorld.wire.trajectory import BranchDoc, Trajectory

__all__ = ["Columns", "columns"]

# A row group: what is in memory at once, and what a reader reads at once.
ROWS_PER_GROUP = 1024
TOKENS_PER_GROUP = 2_000_000


@contextmanager
def columns(out: BinaryIO, *, trajectories: bool) -> Iterator[Columns]:
    """A sink; what it holds is written at the end of the block, and the file is whole then."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as exc:
        raise UsageError(f"Parquet needs pyarrow, which is not installed: {cure('parquet')}") from exc
    schema = _schema(pa, trajectories=trajectories)
    with parquet.ParquetWriter(out, schema, compression="zstd") as writer:
        sink = Columns(pa, schema, writer)
        yield sink
        sink.flush()


class Columns:
    """Rows that become a row group when they are many."""

    def __init__(self, arrow: Any, schema: Any, writer: Any) -> None:
        self._arrow = arrow
        self._schema = schema
        self._writer = writer
        self._rows: list[dict[str, Any]] = []
        self._tokens = 0
        self.bytes_written = 0

    def write(self, found: Found) -> None:
        """A job's rows."""
        job = _of_job(found.record)
        if found.trajectory is None:
            self._rows.append(job)
        else:
            job |= _of_trajectory(found.trajectory)
            branches = found.trajectory.branches
            self._rows += [job | _of_branch(branch) for branch in branches] or [job]
            self._tokens += sum(len(branch.token_ids) for branch in branches)
            self.bytes_written += 9 * sum(len(branch.token_ids) for branch in branches)
        if len(self._rows) >= ROWS_PER_GROUP or self._tokens >= TOKENS_PER_GROUP:
            self.flush()

    def flush(self) -> None:
        """Write what is held."""
        if self._rows:
            self._writer.write_table(self._arrow.Table.from_pylist(self._rows, schema=self._schema))
        self._rows, self._tokens = [], 0


def _schema(pa: Any, *, trajectories: bool) -> Any:
    text, whole, number = pa.string(), pa.int64(), pa.float64()
    fields: dict[str, Any] = {
        "job_id": text, "tenant": text, "handler": text, "policy": text, "group_id": text, "sample_index": whole,
        "outcome": text, "outcome_code": text, "outcome_message": text, "verdict": text, "reward": number,
        "reward_parts": pa.map_(text, number), "metrics": pa.map_(text, number), "stop_reason": text,
        "attempts": whole, "turns": whole, "tokens_prompt": whole, "tokens_sampled": whole, "tokens_observed": whole,
        "backends": pa.list_(text), "policy_versions": pa.list_(whole), "drift": text, "requeued_from": text,
        "metadata": text, "timing": text, "created_at": text, "ended_at": text,
    }  # fmt: skip
    if trajectories:
        fields |= {
            "format": text, "instance": text, "tokenizer": text, "renderer": text, "tools": text, "calls": text,
            "step_rewards": text, "branch": pa.int32(), "parent": pa.int32(), "fork_at": pa.int32(), "reason": text,
            "token_ids": pa.list_(pa.int32()), "mask": pa.list_(pa.uint8()), "logprobs": pa.list_(pa.float32()),
            "version_spans": text, "segments": text,
        }  # fmt: skip
    return pa.schema(list(fields.items()))


def _of_job(record: JobRecord) -> dict[str, Any]:
    outcome = record.outcome
    plain = ("job_id", "tenant", "handler", "policy", "group_id", "sample_index", "reward", "turns", "backends",
             "policy_versions", "requeued_from", "created_at", "ended_at")  # fmt: skip
    return {name: getattr(record, name) for name in plain} | {
        "outcome": None if outcome is None else outcome.kind.value,
        "outcome_code": None if outcome is None else outcome.code,
        "outcome_message": None if outcome is None else outcome.message,
        "verdict": None if record.verdict is None else record.verdict.value,
        "reward_parts": list(record.reward_parts.items()),
        "metrics": list(record.metrics.items()),
        "stop_reason": None if record.stop_reason is None else record.stop_reason.value,
        "attempts": len(record.attempts),
        "tokens_prompt": record.tokens.prompt,
        "tokens_sampled": record.tokens.sampled,
        "tokens_observed": record.tokens.observed,
        "drift": record.drift.verdict,
        "metadata": _json(record.metadata),
        "timing": _json(record.timing),
    }


def _of_trajectory(doc: Trajectory) -> dict[str, Any]:
    return {
        "format": doc.format,
        "instance": _json(doc.job.instance),
        "tokenizer": doc.tokenizer,
        "renderer": doc.renderer,
        "tools": _json(doc.tools),
        "calls": _json(doc.calls),
        "step_rewards": _json(doc.step_rewards),
    }


def _of_branch(branch: BranchDoc) -> dict[str, Any]:
    return {
        "branch": branch.branch,
        "parent": branch.parent,
        "fork_at": branch.fork_at,
        "reason": branch.reason,
        "token_ids": branch.token_ids,
        "mask": branch.mask,
        "logprobs": branch.logprobs,
        "version_spans": _json(branch.policy_versions),
        "segments": _json(branch.segments),
    }


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
