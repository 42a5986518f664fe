"""What became of a call of a tool is in the job's events, for those who watch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import trio

from prorld.agents import ToolFacts
from prorld.rollout.context import AttemptContext
from prorld.rollout.events import EventLog


async def test_an_event_of_a_tool_has_its_facts():
    """Those that are not the usual, beside the name and the seconds; a call without facts has those two alone."""
    events = EventLog()
    entry: Any = SimpleNamespace(timing=SimpleNamespace(tool_s=0.0), events=events, clock=SimpleNamespace(wall=str))
    parts: Any = SimpleNamespace()
    async with trio.open_nursery() as nursery:
        job: AttemptContext = AttemptContext(
            entry, 1, attempt_nursery=nursery, runtime=parts, boot_id="boot", metrics=parts, judges=parts
        )
        job.tool_used("bash", 0.5, ToolFacts(exit_code=124, duration_s=0.4, timed_out=True))
        job.tool_used("think", 0.25)
        job.tool_used("odd", 0.0, ToolFacts(refused="x" * 1000))
    assert entry.timing.tool_s == 0.75
    assert [event.data for event in events.after(0, 10)] == [
        {"tool": "bash", "seconds": 0.5, "exit_code": 124, "timed_out": True},
        {"tool": "think", "seconds": 0.25},
        {"tool": "odd", "seconds": 0.0, "refused": "x" * 64},
    ]
