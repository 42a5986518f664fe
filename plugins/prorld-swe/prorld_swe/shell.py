"""Git and shell in a sandbox by our own hand: nothing of the agent's configuration, environment or paths counts."""

from __future__ import annotations

import shlex
from typing import Final

from prorld.handlers import CommandResult, Sandbox

__all__ = ["GIT", "clean_script", "quoted", "run_script"]

# What git would otherwise read, run or ask: hooks, watchers, filters, helpers, attributes, signatures, other objects.
_SETTINGS: Final = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.untrackedCache=false",
    "core.attributesFile=/dev/null",
    "core.excludesFile=/dev/null",
    "core.pager=cat",
    "core.editor=true",
    "core.autocrlf=false",
    "core.safecrlf=false",
    "core.quotePath=false",
    "core.fileMode=true",
    "core.symlinks=true",
    "core.alternateRefsCommand=",
    "advice.detachedHead=false",
    "advice.addEmbeddedRepo=false",
    "commit.gpgSign=false",
    "diff.external=",
    "diff.submodule=short",
    "diff.ignoreSubmodules=none",
    "gc.auto=0",
    "maintenance.auto=false",
    "init.defaultBranch=main",
    "init.templateDir=",
    "protocol.allow=never",
    "safe.directory=*",
    "submodule.recurse=false",
    "user.name=prorld",
    "user.email=prorld@localhost",
)
GIT: Final = "git " + " ".join(f"-c {shlex.quote(setting)}" for setting in _SETTINGS)

_ENVIRONMENT: Final = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/nonexistent",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
}


def quoted(word: str) -> str:
    """One word of a shell."""
    return shlex.quote(word)


def clean_script(script: str, **variables: str) -> str:
    """A command that runs a script in a shell of its own, with nothing of the session's environment."""
    words = shlex.join(f"{name}={value}" for name, value in (_ENVIRONMENT | variables).items())
    return f"\\command /usr/bin/env -i {words} /bin/bash --norc --noprofile -c {shlex.quote(script)} </dev/null"


async def run_script(sandbox: Sandbox, script: str, *, limit_s: float, **variables: str) -> CommandResult:
    """Run a script that way."""
    return await sandbox.bash(clean_script(script, **variables), limit_s=limit_s)
