"""What a plugin author sees: the handler, the job it is given, sandbox specs, graders in a killable child, errors."""

from prorld.errors import BadRequest, GraderError, HandlerError, Impossible, SandboxError
from prorld.handlers.base import AgentHandler, Grade, JobContext, Model, NoConfig, RunResult, Turn
from prorld.handlers.commands import PluginCommand, Workshop
from prorld.handlers.datasets import Dataset, PackageFiles
from prorld.handlers.grader import Grader, open_grader, run_grader
from prorld.handlers.packages import cached_package
from prorld.handlers.play import Play, common_plays, tool_call
from prorld.handlers.reward_server import RewardServer, open_reward_server
from prorld.handlers.signs import Watch
from prorld.sandbox.contract import USED_UP, CommandResult, Sandbox, SandboxLimits, SandboxSpec

__all__ = [
    "USED_UP",
    "AgentHandler",
    "BadRequest",
    "CommandResult",
    "Dataset",
    "Grade",
    "Grader",
    "GraderError",
    "HandlerError",
    "Impossible",
    "JobContext",
    "Model",
    "NoConfig",
    "PackageFiles",
    "Play",
    "PluginCommand",
    "RewardServer",
    "RunResult",
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "SandboxSpec",
    "Turn",
    "Watch",
    "Workshop",
    "cached_package",
    "common_plays",
    "open_grader",
    "open_reward_server",
    "run_grader",
    "tool_call",
]
