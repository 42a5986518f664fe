"""The tool-using agent: what a tool is, how a turn is read, and the loop that goes on until the episode ends.

The room talks to a ``Model`` and a ``Sandbox``; it knows nothing of jobs, tokens or engines.
"""

from prorld.agents.dialect import Act, Action, Answer, Dialect, Malformed, NativeCalls, Reply
from prorld.agents.loop import AgentEnd, OnTool, run_agent
from prorld.agents.observation import Observation, clip
from prorld.agents.tools import Tool, known_tools, make_tool, sandbox_tool, standard_tools

__all__ = [
    "Act",
    "Action",
    "AgentEnd",
    "Answer",
    "Dialect",
    "Malformed",
    "NativeCalls",
    "Observation",
    "OnTool",
    "Reply",
    "Tool",
    "clip",
    "known_tools",
    "make_tool",
    "run_agent",
    "sandbox_tool",
    "standard_tools",
]
