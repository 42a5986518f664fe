"""The configuration: typed sections, read once at start, frozen, and handed to the parts that need them.

Owns the names, bounds and defaults of everything an operator may set. Never a global, and never changed afterwards.
"""

from prorld.config.describe import Row, Setting, describe, rows
from prorld.config.load import Loaded, find_state_dir, load
from prorld.config.sections import (
    BackendEntry,
    Config,
    Engine,
    Gc,
    Handlers,
    Limits,
    Log,
    Metrics,
    PolicyEntry,
    Sandbox,
    Server,
    Stages,
    State,
    Timeouts,
    Verdicts,
)

__all__ = [
    "BackendEntry",
    "Config",
    "Engine",
    "Gc",
    "Handlers",
    "Limits",
    "Loaded",
    "Log",
    "Metrics",
    "PolicyEntry",
    "Row",
    "Sandbox",
    "Server",
    "Setting",
    "Stages",
    "State",
    "Timeouts",
    "Verdicts",
    "describe",
    "find_state_dir",
    "load",
    "rows",
]
