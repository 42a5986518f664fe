"""The tool-using agent: what a tool is, how a turn is read, and the loop that goes on until the episode ends.

The room talks to a ``Model`` and a ``Sandbox``; it knows nothing of jobs, tokens or engines.
"""

from prorld.agents.dialect import Act, Action, Answer, Dialect, Malformed, NativeCalls, Reply
from prorld.agents.loop import AgentEnd, OnTool, OnUse, ToolUse, run_agent
from prorld.agents.observation import Observation, ToolFacts, clip, clip_chars, command_facts, refusal
from prorld.agents.presets import PRESETS, ToolPreset, known_tools, preset, standard_tools
from prorld.agents.tools import Tool, async_tool, make_tool, sandbox_tool
from prorld.agents.web_search import SearchHit, SearchProvider, web_search_tool
from prorld.agents.xml_calls import XmlCalls, explain

__all__ = [
    "PRESETS",
    "Act",
    "Action",
    "AgentEnd",
    "Answer",
    "Dialect",
    "Malformed",
    "NativeCalls",
    "Observation",
    "OnTool",
    "OnUse",
    "Reply",
    "SearchHit",
    "SearchProvider",
    "Tool",
    "ToolFacts",
    "ToolPreset",
    "ToolUse",
    "XmlCalls",
    "async_tool",
    "clip",
    "clip_chars",
    "command_facts",
    "explain",
    "known_tools",
    "make_tool",
    "preset",
    "refusal",
    "run_agent",
    "sandbox_tool",
    "standard_tools",
    "web_search_tool",
]
