"""What the demo does with its daemon: hands in jobs, watches them, keeps their trajectories, sums up."""

from __future__ import annotations

import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from prorld.cli.conversation import View, conversation_lines, outcome_words
from prorld.cli.exits import UsageError
from prorld.cli.output import count, note, number, program, seconds, table, typed
from prorld.cli.records import one_line, worked_s
from prorld.client import Client, ClientError
from prorld.domain.job import AgentLimits, JobState, Sampling
from prorld.domain.outcome import OutcomeKind
from prorld.errors import ProrldError
from prorld.store.journal import JOURNAL_FILE
from prorld.wire.events import JobEvent
from prorld.wire.jobs import JobRecord, SubmitJob
from prorld.wire.trajectory import Trajectory

INFRASTRUCTURE = frozenset({
    OutcomeKind.ENV_ERROR,
    OutcomeKind.LLM_ERROR,
    OutcomeKind.HANDLER_ERROR,
    OutcomeKind.GRADER_ERROR,
    OutcomeKind.LOST,
})  # fmt: skip

# Documents of former demos that stay in the directory.
KEPT_MAX = 200
READY_S = 120.0
_POLL_S = 0.5
_HEADERS = ("JOB", "HANDLER", "TURNS", "PROMPT", "SAMPLED", "OBSERVED", "TOOLS", "OUTCOME", "VERDICT", "REWARD", "TIME")
_RIGHT = frozenset({"TURNS", "PROMPT", "SAMPLED", "OBSERVED", "TOOLS", "REWARD", "TIME"})


class NotReadyError(ProrldError):
    """The demo's daemon can't do its work."""

    code = "not_ready"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of the demo."""

    record: JobRecord
    tool_calls: int
    file: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the demo did. ``kept_in`` is the state directory whose journal has it all."""

    rows: list[Row]
    wall_s: float
    good: bool
    kept_in: str = ""


def drive(address: str, state_dir: Path, n: int, within_s: float) -> Report:
    """Submit, watch to the end, fetch and keep the trajectories. Blocking: runs in a thread beside the daemon."""
    started = time.monotonic()
    with Client(address, state_dir=state_dir) as client:
        until_ready(client, min(within_s, READY_S))
        names = {item.name for item in client.handlers().items if item.error is None}
        jobs = plan(n, names, f"demo-{time.strftime('%m%d-%H%M%S')}")
        for job in jobs:
            client.submit(job)
        note(f"submitted {count(len(jobs), 'job')} to {client.address}")
        records = watch(client, [job.job_id or "" for job in jobs], started + within_s)
        directory = state_dir / "trajectories"
        directory.mkdir(mode=0o700, exist_ok=True)
        rows = [_keep(client, record, directory) for record in records]
    _forget_old(directory)
    kept_in = str(state_dir) if (state_dir / JOURNAL_FILE).is_file() else ""
    return Report(rows=rows, wall_s=time.monotonic() - started, good=is_good(records), kept_in=kept_in)


def until_ready(client: Client, within_s: float, or_when: Callable[[], bool] = lambda: False) -> None:
    """Wait for the engine to load; what does not pass by itself, and what takes too long, is told with its cure.

    ``or_when`` says what is as good as ready.
    """
    until = time.monotonic() + within_s
    while not (ready := client.ready()).ready and not or_when():
        if any(item.code == "draining" for item in ready.missing):
            # The daemon runs in this process, and only a signal makes it drain.
            raise KeyboardInterrupt
        missing = [item for item in ready.missing if item.code != "no_backend" or time.monotonic() > until]
        if missing:
            raise NotReadyError("; ".join(f"{item.message}: {typed(item.cure)}" for item in missing))
        time.sleep(_POLL_S)  # noqa: TID251 - there is no event loop on this side


def is_good(records: Sequence[JobRecord]) -> bool:
    """At least one rollout was graded, and none ended for reasons of infrastructure."""
    kinds = {record.outcome.kind for record in records if record.outcome is not None}
    return any(record.reward is not None for record in records) and not kinds & INFRASTRUCTURE


def plan(n: int, handlers: set[str], prefix: str) -> list[SubmitJob]:
    """The jobs of a demo: arithmetic for the calculator, the last one for mathematics where both are there."""
    known = [name for name in ("calc", "math") if name in handlers]
    if not known:
        raise UsageError("no handler for the demo is installed; `pip install prorld-calc prorld-math`")
    dice = random.Random(n)  # noqa: S311 - tasks, not secrets
    jobs: list[SubmitJob] = []
    for i in range(n):
        name = known[-1] if i == n - 1 and n > 1 else known[0]
        jobs.append(
            SubmitJob(
                job_id=f"{prefix}-{i + 1}",
                handler=name,
                instance=task(name, dice),
                sampling=Sampling(temperature=0.7, max_tokens=96, seed=i),
                agent=AgentLimits(max_turns=4, max_context_tokens=2048, max_sampled_tokens=512),
            )
        )
    return jobs


def task(handler: str, dice: random.Random) -> dict[str, Any]:
    """One instance."""
    if handler == "calc":
        a, b = dice.randrange(10, 1000), dice.randrange(10, 1000)
        word, answer = dice.choice((("plus", a + b), ("minus", a - b), ("times", a * b)))
        return {"question": f"What is {a} {word} {b}?", "answer": answer}
    a, b = dice.randrange(10, 100), dice.randrange(10, 100)
    return {"problem": f"What is {a} + {b}?", "answer": str(a + b)}


def watch(client: Client, job_ids: Sequence[str], until: float) -> list[JobRecord]:
    """The records once all jobs are done. At the end of the time what is left is cancelled."""
    done: dict[str, JobRecord] = {}
    cancelled = False
    live = sys.stderr.isatty()
    while len(done) < len(job_ids):
        waiting = [job_id for job_id in job_ids if job_id not in done]
        client.wait(waiting[0], within_s=_POLL_S)
        records = [client.get(job_id) for job_id in waiting]
        for record in records:
            if record.state is JobState.DONE:
                done[record.job_id] = record
                note(("\r\x1b[K" if live else "") + one_line(record))
        if live and len(done) < len(job_ids):
            sys.stderr.write("\r\x1b[K" + progress(records, len(job_ids)))
            sys.stderr.flush()
        if client.status().draining:
            raise KeyboardInterrupt
        if not cancelled and time.monotonic() > until:
            client.cancel_many(job_ids=waiting, reason="the demo's time is over")
            cancelled = True
    return [done[job_id] for job_id in job_ids]


def progress(records: Sequence[JobRecord], total: int) -> str:
    """Where the jobs are, on one line."""
    states = Counter(record.state for record in records)
    ended = total - len(records) + states.pop(JobState.DONE, 0)
    words = [f"{ended} of {total} done"]
    words += [f"{n} {state.value}" for state in JobState if (n := states[state])]
    return ", ".join([*words, count(sum(record.turns for record in records), "turn")])


def _keep(client: Client, record: JobRecord, directory: Path) -> Row:
    file = directory / f"{record.job_id}.json"
    try:
        doc = client.trajectory(record.job_id)
    except ClientError as exc:
        note(f"{record.job_id} has no trajectory: {exc.message}")
        return Row(record=record, tool_calls=0, file="")
    file.write_bytes(msgspec.json.encode(doc))
    return Row(record=record, tool_calls=count_tool_calls(client.events(record.job_id)), file=str(file))


def _forget_old(directory: Path) -> None:
    files = sorted(directory.glob("demo-*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files[KEPT_MAX:]:
        path.unlink(missing_ok=True)


def count_tool_calls(events: Iterable[JobEvent]) -> int:
    """Calls of tools, those that went wrong too."""
    return sum(event.event == "job.tool" for event in events)


def report_lines(report: Report, view: View) -> Iterator[str]:
    """The table, the totals, one conversation shortened, and what to type next."""
    yield from table(_HEADERS, [_cells(row) for row in report.rows], right=_RIGHT)
    yield ""
    yield totals(report)
    shown = pick(report.rows)
    if shown is not None:
        doc = msgspec.json.decode(Path(shown.file).read_bytes(), type=Trajectory)
        yield ""
        words = outcome_words(shown.record, view.style)
        yield f"one of them: {shown.record.job_id}, {words}, reward {number(shown.record.reward)}"
        yield from conversation_lines(doc, doc.branches[0], view)
        yield ""
        yield "look closer:"
        yield f"  {program()} show {shown.file}"
        yield f"  {program()} show {shown.file} --tokens"
    if report.kept_in:
        yield "all that was kept:"
        yield f"  {program()} export --state-dir {shlex.quote(report.kept_in)} -o demo.jsonl"
    yield "go on:"
    yield f"  {program()} serve          # a daemon that stays; then `{program()} submit --help`"


def _cells(row: Row) -> list[str]:
    record = row.record
    return [
        record.job_id,
        record.handler,
        str(record.turns),
        str(record.tokens.prompt),
        str(record.tokens.sampled),
        str(record.tokens.observed),
        str(row.tool_calls),
        record.outcome.kind.value if record.outcome else "-",
        record.verdict.value if record.verdict else "-",
        number(record.reward),
        seconds(worked_s(record)),
    ]


def totals(report: Report) -> str:
    """The sums of the table on one line."""
    records = [row.record for row in report.rows]
    kinds = Counter(record.outcome.kind.value for record in records if record.outcome)
    rewards = [record.reward for record in records if record.reward is not None]
    sampled = sum(record.tokens.sampled for record in records)
    ended = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    words = [
        f"{count(len(records), 'rollout')} in {seconds(report.wall_s)}: {ended}",
        f"{len(rewards)} graded" + (f", mean reward {sum(rewards) / len(rewards):.2f}" if rewards else ""),
        f"{count(sampled, 'token')} sampled ({sampled / max(report.wall_s, 0.001):.0f}/s)",
        count(sum(row.tool_calls for row in report.rows), "tool call"),
    ]
    return "; ".join(words)


def pick(rows: Sequence[Row]) -> Row | None:
    """The rollout to show: the best reward, then the most tool calls and turns."""
    seen = [row for row in rows if row.file and row.record.turns]
    return max(seen, key=lambda row: (row.record.reward or 0.0, row.tool_calls, row.record.turns), default=None)
