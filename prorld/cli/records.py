"""Job records as lines and tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

from prorld.cli.output import clean, count, number, seconds, table
from prorld.domain.job import JobState
from prorld.wire.jobs import JobRecord

_HEADERS = ("JOB", "HANDLER", "STATE", "OUTCOME", "VERDICT", "REWARD", "TURNS", "TOKENS", "TOOK", "AGE")
_RIGHT = frozenset({"REWARD", "TURNS", "TOKENS", "TOOK", "AGE"})


def job_table(records: Sequence[JobRecord], now: datetime) -> list[str]:
    """A table of jobs, one line each; with their groups where there are some."""
    rows = [_row(record, now) for record in records]
    if not any(record.group_id for record in records):
        return table(_HEADERS, rows, right=_RIGHT)
    grouped = [[row[0], record.group_id or "-", *row[1:]] for row, record in zip(rows, records, strict=True)]
    return table((_HEADERS[0], "GROUP", *_HEADERS[1:]), grouped, right=_RIGHT)


def _row(record: JobRecord, now: datetime) -> list[str]:
    tokens = record.tokens
    return [
        record.job_id,
        record.handler,
        state_words(record),
        record.outcome.kind.value if record.outcome else "-",
        record.verdict.value if record.verdict else "-",
        number(record.reward),
        str(record.turns),
        str(tokens.prompt + tokens.sampled + tokens.observed),
        seconds(worked_s(record)),
        age(record.created_at, now),
    ]


def state_words(record: JobRecord) -> str:
    """The state, and what it waits for."""
    if record.waiting_for is not None and record.state is not JobState.DONE:
        return f"{record.state.value}, waits for {record.waiting_for}"
    return record.state.value


def worked_s(record: JobRecord) -> float:
    """Seconds that the job's stages took, queues left out."""
    return record.timing.init_s + record.timing.run_s + record.timing.eval_s


def one_line(record: JobRecord) -> str:
    """The end of a job, or where it is, on one line."""
    if record.outcome is None:
        return f"{clean(record.job_id)}  {state_words(record)}"
    words = [clean(record.job_id), record.outcome.kind.value, f"reward {number(record.reward)}"]
    if record.verdict is not None:
        words.append(record.verdict.value)
    words += [
        count(record.turns, "turn"),
        f"{count(record.tokens.sampled, 'token')} sampled",
        seconds(worked_s(record)),
    ]
    if record.outcome.message:
        words.append(clean(record.outcome.message).replace("\n", " "))
    return "  ".join(words)


def age(at: str, now: datetime) -> str:
    """How long ago an RFC 3339 instant was; ``?`` for what can't be read."""
    try:
        # datetime takes at most six digits of a second's fraction.
        then = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", at))
    except ValueError:
        return "?"
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    return seconds(max(0.0, (now - then).total_seconds()))
