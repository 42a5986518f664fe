"""Presets: the tools of one kind of agent, with the names, the arguments and the texts that policies have learnt.

A preset is chosen by its name. Its tools are made anew for every episode, since the editor's history, an open file and
a list of tasks belong to one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from prorld.agents.dialect import Dialect
from prorld.agents.openhands import codeact_tools, sdk_tools
from prorld.agents.plain import plain_tools
from prorld.agents.r2e import r2e_tools
from prorld.agents.swe_agent import mini_tools, swe_agent_tools
from prorld.agents.tools import ALIASES, Tool
from prorld.agents.xml_calls import XmlCalls
from prorld.errors import HandlerError, Impossible

__all__ = ["DEFAULT_PRESET", "PREFIX", "PRESETS", "ToolPreset", "known_tools", "preset", "standard_tools"]

DEFAULT_PRESET = "prorld"
# A job that names ``preset:NAME`` as a tool gets what that preset offers by itself.
PREFIX = "preset:"


class ToolPreset(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of one kind of agent. ``defaults`` are those it offers by itself, the others have to be named."""

    name: str
    make: Callable[[], tuple[Tool, ...]]
    defaults: tuple[str, ...] = ()
    # How a policy writes calls as text, where its chat template has no calls of tools.
    text_dialect: Callable[[], Dialect] = XmlCalls

    @property
    def names(self) -> frozenset[str]:
        """The names of all its tools, aliases included."""
        names = frozenset(tool.schema.name for tool in self.make())
        return names | {alias for alias, name in ALIASES.items() if name in names}

    def tools(self, names: Sequence[str] | None = None) -> tuple[Tool, ...]:
        """The tools of these names for one episode, each once, in the order they were asked for."""
        there = {tool.schema.name: tool for tool in self.make()}
        wanted = dict.fromkeys(ALIASES.get(name, name) for name in (self.defaults if names is None else names))
        if unknown := sorted(set(wanted) - set(there)):
            raise Impossible(
                f"no such tool: {', '.join(unknown)}; there are {', '.join(sorted(self.names))}",
                details={"path": "agent.tools"},
            )
        return tuple(there[name] for name in wanted)


_ALL = (
    ToolPreset(name=DEFAULT_PRESET, make=plain_tools),
    ToolPreset(
        name="openhands",
        make=codeact_tools,
        defaults=("execute_bash", "execute_ipython_cell", "str_replace_editor", "think", "finish", "task_tracker"),
    ),
    ToolPreset(
        name="openhands-sdk",
        make=sdk_tools,
        defaults=("terminal", "file_editor", "think", "finish", "task_tracker"),
    ),
    ToolPreset(name="swe-agent", make=swe_agent_tools, defaults=("bash", "str_replace_editor", "submit")),
    ToolPreset(name="mini", make=mini_tools, defaults=("bash",)),
    ToolPreset(name="r2e", make=r2e_tools, defaults=("execute_bash", "file_editor", "search", "finish")),
)
PRESETS: Mapping[str, ToolPreset] = MappingProxyType({each.name: each for each in _ALL})


def preset(name: str) -> ToolPreset:
    """The preset of that name."""
    if name not in PRESETS:
        raise HandlerError(f"no such preset of tools: {name}; there are {', '.join(sorted(PRESETS))}")
    return PRESETS[name]


def known_tools(of: str = DEFAULT_PRESET) -> frozenset[str]:
    """What a job may name where a handler uses this preset: its tools, aliases included, or another preset."""
    return preset(of).names | {f"{PREFIX}{each}" for each in PRESETS if PRESETS[each].defaults}


def standard_tools(names: Sequence[str] | None, of: str = DEFAULT_PRESET) -> tuple[Tool, ...]:
    """The tools of these names for one episode; ``None`` for what the preset offers by itself.

    Where two presets have tools of one name, the one that was asked for first is taken.
    """
    own = preset(of)
    if names is None:
        return own.tools()
    chosen: dict[str, Tool] = {}
    plain = own.tools([name for name in names if not name.startswith(PREFIX)])
    by_name = {tool.schema.name: tool for tool in plain}
    for name in names:
        if name.startswith(PREFIX):
            other = PRESETS.get(name.removeprefix(PREFIX))
            if other is None:
                there = ", ".join(sorted(PRESETS))
                raise Impossible(f"no such preset of tools: {name}; there are {there}", details={"path": "agent.tools"})
            found = other.tools()
        else:
            found = (by_name[ALIASES.get(name, name)],)
        for tool in found:
            chosen.setdefault(tool.schema.name, tool)
    return tuple(chosen.values())
