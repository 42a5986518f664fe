"""What a plugin author sees: the handler, the job it is given, sandbox specs, graders in a killable child."""

from prorld.handlers.base import AgentHandler, Grade, JobContext, Model, NoConfig, RunResult, Turn
from prorld.handlers.grader import Grader, open_grader, run_grader
from prorld.sandbox.contract import CommandResult, Sandbox, SandboxLimits, SandboxSpec

__all__ = [
    "AgentHandler",
    "CommandResult",
    "Grade",
    "Grader",
    "JobContext",
    "Model",
    "NoConfig",
    "RunResult",
    "Sandbox",
    "SandboxLimits",
    "SandboxSpec",
    "Turn",
    "open_grader",
    "run_grader",
]
