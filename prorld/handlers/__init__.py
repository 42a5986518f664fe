"""What a plugin author sees: the handler, the job it is given, sandbox specs, graders in a killable child."""

from prorld.handlers.base import AgentHandler, Grade, JobContext, Model, RunResult, Turn
from prorld.handlers.grader import run_grader
from prorld.sandbox.contract import CommandResult, Sandbox, SandboxLimits, SandboxSpec

__all__ = [
    "AgentHandler",
    "CommandResult",
    "Grade",
    "JobContext",
    "Model",
    "RunResult",
    "Sandbox",
    "SandboxLimits",
    "SandboxSpec",
    "Turn",
    "run_grader",
]
