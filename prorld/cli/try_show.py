"""How ``prorld try`` shows a rollout: what happens on stderr while it happens, what became of it on stdout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from prorld.cli.author_trace import author_lines
from prorld.cli.conversation import View, trajectory_lines
from prorld.cli.output import Style, clean, count, seconds, style_for
from prorld.cli.try_record import SandboxCall
from prorld.cli.try_world import Failure, Rollout
from prorld.wire.events import JobEvent

_STAGES = {"entered": "begins", "left": "has ended"}


class Live:
    """Lines for a person who watches."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._style = style_for(stream)

    def event(self, event: JobEvent) -> None:
        """One event of the job."""
        words = event_words(event)
        if words is not None:
            self._write(self._style(f"· {clean(words)}", "dim"))

    def sandbox_call(self, call: SandboxCall) -> None:
        """One call of the sandbox, with all of its output."""
        style = self._style
        self._write(style(f"→ {call.kind}", "cyan"))
        self._write(*(f"    {line}" for line in clean(call.text).splitlines()))
        if call.error is not None:
            self._write(style(f"← raised {clean(call.error)}", "red"))
        if call.size is not None:
            self._write(style(f"← {call.size} bytes", "cyan"))
        if call.result is not None:
            self._write(style(f"← {_result_words(call)}", "cyan"))
            self._write(*(f"    {line}" for line in clean(call.result.text).splitlines()))

    def _write(self, *lines: str) -> None:
        for line in lines:
            self._stream.write(line + "\n")
        self._stream.flush()


def _result_words(call: SandboxCall) -> str:
    result = call.result
    assert result is not None
    words = [f"exit code {result.exit_code}", seconds(result.duration_s)]
    if result.timed_out:
        words.append("timed out")
    if result.restarted:
        words.append("the session died and was started again")
    if result.omitted_bytes:
        words.append(f"{result.omitted_bytes} bytes left out")
    return ", ".join(words)


def event_words(event: JobEvent) -> str | None:
    """An event of a job for people; ``None`` for what the summary tells."""
    data = event.data
    match event.event:
        case "job.stage":
            return (
                None if data.get("what") == "waiting" else f"{data.get('stage')} {_STAGES.get(str(data.get('what')))}"
            )
        case "job.turn":
            calls = ", ".join(data.get("tool_calls") or ()) or "no tool"
            sampled = count(int(data.get("sampled") or 0), "token")
            return f"turn {int(data.get('turn', 0)) + 1}: {sampled} sampled, {calls} called"
        case "job.tool":
            return f"tool {data.get('tool')}: {seconds(float(data.get('seconds', 0.0)))}"
        case "job.attempt" if data.get("what") == "ended":
            return f"attempt {data.get('n')} ended: {data.get('outcome')} ({data.get('code')})"
        case "job.progress":
            facts = ", ".join(f"{key}={value}" for key, value in data.items() if key != "what")
            return f"progress: {data.get('what')}{f' ({facts})' if facts else ''}"
        case _:
            return None


def rollout_lines(rollout: Rollout, style: Style, columns: int) -> Iterator[str]:
    """The summary, the whole conversation, and every exception with the author's frames."""
    yield from trajectory_lines(rollout.document, View(style, columns))
    for failure in rollout.failures:
        yield ""
        yield from failure_lines(failure, style)


def failure_lines(failure: Failure, style: Style) -> Iterator[str]:
    """Where in the author's code an exception came from."""
    yield style(f"{failure.stage} of attempt {failure.attempt} raised:", "bold", "red")
    yield from author_lines(failure.error)
