"""What a plugin author sees: the handler, the job it is given, sandbox specs, graders in a killable child, errors."""

from prorld.errors import BadRequest, GraderError, HandlerError, Impossible, SandboxError
from prorld.handlers.base import AgentHandler, Grade, JobContext, Model, NoConfig, RunResult, Turn
from prorld.handlers.grader import Grader, open_grader, run_grader
from prorld.sandbox.contract import USED_UP, CommandResult, Sandbox, SandboxLimits, SandboxSpec

__all__ = [
    "USED_UP",
    "AgentHandler",
    "BadRequest",
    "CommandResult",
    "Grade",
    "Grader",
    "GraderError",
    "HandlerError",
    "Impossible",
    "JobContext",
    "Model",
    "NoConfig",
    "RunResult",
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "SandboxSpec",
    "Turn",
    "open_grader",
    "run_grader",
]
