"""What both handlers of this plugin share: their tools, the sandbox for them, and the search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from prorld.agents import SearchProvider, Tool, known_tools, standard_tools
from prorld.domain.job import AgentLimits
from prorld.handlers import Impossible, JobContext, SandboxSpec
from prorld_stem.search import SEARCH_TOOL, SearchPlan, search_tool

__all__ = ["TOOLS", "chosen_tools", "must_have_search", "open_sandbox_for"]

TOOLS = known_tools() | {SEARCH_TOOL}

InstanceT = TypeVar("InstanceT", bound=msgspec.Struct)


def must_have_search(limits: AgentLimits, plan: SearchPlan) -> None:
    """Refuse a job that asks for a search that is not configured."""
    if SEARCH_TOOL in (limits.tools or ()) and not plan.wanted:
        message = f"there is no {SEARCH_TOOL} here: the operator has configured neither a library nor a service"
        raise Impossible(message, details={"path": "agent.tools"})


def chosen_tools(
    limits: AgentLimits, defaults: Sequence[str], plan: SearchPlan, provider: SearchProvider | None
) -> list[Tool]:
    """The tools a job asks for by name, else the default ones and, where it is offered, the search."""
    names = [*defaults, *([SEARCH_TOOL] if plan.wanted and plan.offered else [])]
    if limits.tools is not None:
        names = list(dict.fromkeys(limits.tools))
    tools = list(standard_tools([name for name in names if name != SEARCH_TOOL]))
    if SEARCH_TOOL in names and provider is not None:
        tools.append(search_tool(provider))
    return tools


async def open_sandbox_for(job: JobContext[InstanceT], tools: Sequence[Tool], image: str | None) -> None:
    """A sandbox, where one of the tools needs it."""
    if any(tool.needs_sandbox for tool in tools):
        await job.open_sandbox(SandboxSpec(image=image))
