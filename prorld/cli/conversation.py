"""A trajectory as people read it: the conversation turn by turn, tool calls, tokens, versions, reward, time."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from functools import partial

from prorld.cli.output import Style, clean, count, number, seconds
from prorld.domain.branch import Segment, VersionSpan
from prorld.domain.job import Timing
from prorld.domain.messages import Message, ToolCall
from prorld.domain.outcome import OutcomeKind
from prorld.wire.jobs import JobRecord
from prorld.wire.trajectory import BranchDoc, Trajectory

_BAR = 30
_KIND_COLOUR = {OutcomeKind.OK: "green", OutcomeKind.POLICY_LIMIT: "yellow", OutcomeKind.CANCELLED: "yellow"}
_ROLE_COLOUR = {"system": "magenta", "user": "blue", "assistant": "green", "tool": "cyan"}


class View:
    """How much of a trajectory is shown, and for which width."""

    def __init__(self, style: Style, columns: int, *, lines_per_message: int | None = None) -> None:
        self.style = style
        self.columns = columns
        self.lines_per_message = lines_per_message

    def body(self, text: str, *styles: str) -> Iterator[str]:
        """Untrusted text, indented, wrapped and shortened."""
        wrapped: list[str] = []
        for line in clean(text).expandtabs(4).split("\n"):
            wrapped += textwrap.wrap(line, self.columns - 2, replace_whitespace=False, drop_whitespace=False) or [""]
        while wrapped and not wrapped[-1].strip():
            wrapped.pop()
        most = self.lines_per_message
        shown = wrapped if most is None or len(wrapped) <= most else wrapped[:most]
        for line in shown:
            yield "  " + self.style(line.rstrip(), *styles)
        if len(shown) < len(wrapped):
            yield "  " + self.style(f"… {len(wrapped) - len(shown)} more lines", "dim")


def trajectory_lines(doc: Trajectory, view: View) -> Iterator[str]:
    """The whole document: summary, then every branch."""
    yield from summary_lines(doc.job, view)
    if doc.tokenizer:
        yield f"tokenizer  {clean(doc.tokenizer)}"
    if doc.tools:
        yield f"tools      {', '.join(clean(tool.name) for tool in doc.tools)}"
    for branch in doc.branches:
        yield ""
        if len(doc.branches) > 1:
            yield view.style(branch_title(branch), "bold")
        yield from conversation_lines(doc, branch, view)


def summary_lines(record: JobRecord, view: View) -> Iterator[str]:
    """What became of a job and where its time went."""
    style = view.style
    yield style(clean(record.job_id), "bold") + f"  {clean(record.handler)}  {outcome_words(record, style)}"
    if record.group_id is not None:
        yield f"group      {clean(record.group_id)}, sample {record.sample_index}"
    if record.outcome is not None and record.outcome.message:
        yield from view.body(record.outcome.message, "dim")
    parts = ", ".join(f"{clean(k)} {number(v)}" for k, v in record.reward_parts.items())
    if record.outcome is not None:
        verdict = record.verdict.value if record.verdict else "-"
        stopped = f", stopped: {record.stop_reason.value}" if record.stop_reason else ""
        yield f"reward     {number(record.reward)}{f' ({parts})' if parts else ''}, verdict {verdict}{stopped}"
    if record.metrics:
        yield f"metrics    {', '.join(f'{clean(k)} {number(v)}' for k, v in sorted(record.metrics.items()))}"
    tokens = record.tokens
    counts = f"{tokens.prompt} prompt, {tokens.sampled} sampled, {tokens.observed} observed"
    yield f"tokens     {counts}, in {count(record.turns, 'turn')}"
    versions = ", ".join(map(str, record.policy_versions)) or "-"
    yield f"policy     {clean(record.policy)}, version {versions}, engine {clean(', '.join(record.backends)) or '-'}"
    drift = record.drift
    if drift.verdict != "exact":
        yield style(
            f"drift      {drift.verdict} from token {drift.first_index}, {drift.tokens_affected} affected", "yellow"
        )
    for attempt in record.attempts[:-1]:
        yield f"attempt {attempt.n}  {attempt.outcome.kind.value}: {clean(attempt.outcome.message)}"
    yield from timing_lines(record.timing, style)


def outcome_words(record: JobRecord, style: Style) -> str:
    """The outcome in colour, with its stage and code where they say more."""
    outcome = record.outcome
    if outcome is None:
        return style(record.state.value, "bold")
    extra = "" if outcome.code in ("", outcome.kind.value) else f" ({clean(outcome.code)})"
    stage = f" in {outcome.stage}" if outcome.stage else ""
    return style(outcome.kind.value, "bold", _KIND_COLOUR.get(outcome.kind, "red")) + stage + extra


def timing_lines(timing: Timing, style: Style) -> Iterator[str]:
    """Bars of the seconds in queues and stages, to one scale and in one unit."""
    whole = timing.queue_init_s + timing.init_s + timing.queue_run_s + timing.run_s
    total = whole + timing.queue_eval_s + timing.eval_s
    shown = partial(in_unit_of, total)
    rows = (
        ("init", timing.queue_init_s, timing.init_s, ""),
        ("run", timing.queue_run_s, timing.run_s, f"model {shown(timing.llm_s)}, tools {shown(timing.tool_s)}"),
        ("eval", timing.queue_eval_s, timing.eval_s, ""),
    )
    if any(bar_cells(queue, total) for _, queue, _, _ in rows):
        yield style("time       ░ in a queue, █ at work", "dim")
    for name, queue, work, words in rows:
        waited, worked = bar_cells(queue, total), bar_cells(work, total)
        bar = style("░" * waited, "dim") + style("█" * worked, "blue") + " " * (_BAR + 2 - waited - worked)
        queued = f", queued {shown(queue)}" if waited else ""
        yield f"{name:<10} {bar} {shown(work)}{queued}{f' ({words})' if words else ''}"
    if timing.paused_s:
        yield f"paused     {shown(timing.paused_s)}"


def bar_cells(part: float, total: float) -> int:
    """Cells of a bar; less than half a cell is none."""
    if part <= 0 or total <= 0:
        return 0
    return round(_BAR * part / total)


def in_unit_of(total: float, value: float) -> str:
    """Seconds in the unit that suits their total, so that the lines of one table can be compared."""
    return f"{value * 1000:.0f} ms" if total < 1 else f"{value:.1f} s"


def branch_title(branch: BranchDoc) -> str:
    """A branch and where it came from."""
    if branch.parent is None:
        return f"branch {branch.branch}"
    reason = f" ({clean(branch.reason)})" if branch.reason else ""
    return f"branch {branch.branch}, forked from {branch.parent} at token {branch.fork_at}{reason}"


def conversation_lines(doc: Trajectory, branch: BranchDoc, view: View) -> Iterator[str]:
    """The messages of a branch in order. What a child shares with its parent is shown with the parent."""
    for segment in branch.segments:
        if branch.fork_at is not None and segment.end <= branch.fork_at:
            continue
        if segment.message is None and segment.source != "sampled":
            continue
        role = segment.message.role if segment.message else "assistant"
        head = f"{role} · {segment_words(doc, branch, segment)}"
        rule = "─" * max(3, view.columns - len(head) - 4)
        yield view.style(f"── {head} {rule}", _ROLE_COLOUR.get(role, "bold"))
        if segment.message is not None:
            yield from message_lines(segment.message, view)


def segment_words(doc: Trajectory, branch: BranchDoc, segment: Segment) -> str:
    """Tokens of a segment; of a sampled one also turn, mean log-probability, versions, how it ended and its seconds."""
    size = segment.end - segment.start
    if segment.source != "sampled":
        return count(size, "token")
    words = [f"{count(size, 'token')} sampled"]
    calls = [call for call in doc.calls if call.n in segment.calls]
    if calls:
        words.insert(0, f"turn {calls[0].turn + 1}")
    if size:
        words.append(f"mean logprob {sum(branch.logprobs[segment.start : segment.end]) / size:.2f}")
    versions = versions_in(branch.policy_versions, segment.start, segment.end)
    if versions:
        words.append(f"version {', '.join(versions)}")
    if segment.finish_reason:
        words.append(clean(segment.finish_reason))
    if calls:
        words.append(seconds(sum(call.latency_s for call in calls)))
    return " · ".join(words)


def versions_in(spans: list[VersionSpan], start: int, end: int) -> list[str]:
    """The policy versions of tokens ``[start, end)``, in order, each once."""
    names: list[str] = []
    for span in spans:
        if span.version is None or span.end <= start or span.start >= end:
            continue
        name = str(span.version) if span.epoch == 0 else f"{span.version} (epoch {span.epoch})"
        if name not in names:
            names.append(name)
    return names


def message_lines(message: Message, view: View) -> Iterator[str]:
    """Thinking, text, tool calls."""
    if message.reasoning:
        yield from view.body(message.reasoning, "dim")
    if message.content:
        yield from view.body(message.content)
    elif not message.tool_calls and not message.reasoning:
        yield "  " + view.style("(empty)", "dim")
    for call in message.tool_calls:
        yield from view.body(f"→ {call_words(call)}", "bold")


def call_words(call: ToolCall) -> str:
    """A tool call as it would be typed; one that could not be parsed as it was written."""
    if call.status != "ok":
        return f"{call.name or '?'} [{call.status.value}] {call.raw}".rstrip()
    return f"{call.name}({', '.join(f'{k}={_value(v)}' for k, v in call.arguments.items())})"


def _value(value: object) -> str:
    return value if isinstance(value, str) and "\n" in value else json.dumps(value, ensure_ascii=False)


def token_lines(doc: Trajectory) -> Iterator[str]:
    """One line per token: index, id, mask, log-probability, policy version, origin."""
    for branch in doc.branches:
        yield branch_title(branch)
        yield f"{'index':>7}  {'id':>8}  mask  {'logprob':>10}  version  source"
        for segment in branch.segments:
            for i in range(segment.start, segment.end):
                version = ", ".join(versions_in(branch.policy_versions, i, i + 1)) or "-"
                mask, logprob = branch.mask[i], branch.logprobs[i]
                shown = f"{logprob:.5f}" if mask else "-"
                yield f"{i:>7}  {branch.token_ids[i]:>8}  {mask:>4}  {shown:>10}  {version:>7}  {segment.source}"
