"""Small scripts that look at a sandbox's files for a tool, beside what the agent has made of its shell.

A ``Sandbox`` starts programs through its shell alone, so a script goes through it as one command: a fresh bash, by its
path, that takes over no functions, aliases, options or start-up files (``-p``). The agent's shell keeps its directory,
its variables and its jobs. The answer stands between marks that only this call knows, so a traced or noisy shell adds
nothing to it. It is no proof of anything: the shell is the agent's.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Sequence

import msgspec

from prorld.agents.observation import ToolFacts
from prorld.sandbox.contract import Sandbox

__all__ = ["HELPER_BYTES", "HELPER_SECONDS", "RESTARTED", "Answer", "run_helper"]

HELPER_SECONDS = 20.0
HELPER_BYTES = 128 << 10
# Whoever looks first after a shell has died is told; nobody is told again.
RESTARTED = "[the shell had ended and was started again; what was set in it is gone]"
# Linux takes no longer single argument than this; the rest of the room is the script's.
_COMMAND_BYTES_MAX = 96 << 10

_FRAME = """exec 2>/dev/null; unset GREP_OPTIONS GREP_COLOR GREP_COLORS; LC_ALL=C; export LC_ALL; IFS=
q=$PATH PATH=/usr/local/bin:/usr/bin:/bin:$PATH; n=$1 m=$2; shift 2; printf '\\0%s\\0' "$n"
{{ {script}
}} | head -c "$m"; s=${{PIPESTATUS[0]}}
# Killed half-way is not ended; a pipe that was closed because there was enough is.
(( s < 128 || s == 141 )) && printf '\\0%s\\0' "$n"; exit 0"""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a script printed. ``cut``: there was more; ``ended``: it came to its end."""

    output: bytes
    cut: bool
    ended: bool
    facts: ToolFacts

    @property
    def fields(self) -> list[bytes]:
        """What it printed with a NUL after each, a last one that was cut left out."""
        return self.output.split(b"\0")[:-1]


async def run_helper(
    sandbox: Sandbox, script: str, arguments: Sequence[str], *, limit_s: float, max_bytes: int = HELPER_BYTES
) -> Answer:
    """Run a script with its arguments as ``$1`` and so on, and the agent's own PATH as ``$q``.

    Raises ``ValueError`` for what no shell can be given.
    """
    for argument in arguments:
        if "\0" in argument:
            raise ValueError("it contains a NUL character")
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ValueError("it contains a lone surrogate, which is not text") from None
    nonce = secrets.token_hex(8)
    body = _FRAME.format(script=script)
    words = [body, "prorld", nonce, str(max_bytes + 1), *arguments]
    # Quoted, the path is no alias; what a shell calls a reserved word or a builtin is not used at all.
    command = f"'/bin/bash' --norc --noprofile -p -c {shlex.join(words)} </dev/null"
    if len(command.encode()) > _COMMAND_BYTES_MAX:
        raise ValueError("it is too long")
    result = await sandbox.bash(command, limit_s=min(limit_s, HELPER_SECONDS))
    mark = b"\0" + nonce.encode() + b"\0"
    _, begun, rest = result.output.partition(mark)
    output, ended, _ = rest.partition(mark)
    if result.omitted_bytes:
        # The sandbox keeps less than was asked for, and took it out of the middle: only the head is whole.
        output = output[: max(0, len(result.output) // 2 - 2 * len(mark))]
    facts = ToolFacts(
        exit_code=result.exit_code,
        duration_s=result.duration_s,
        output_bytes=len(output),
        timed_out=result.timed_out,
        restarted=result.restarted,
    )
    cut = len(output) > max_bytes or result.omitted_bytes > 0
    return Answer(output=output[:max_bytes], cut=cut, ended=bool(begun and ended) and not result.timed_out, facts=facts)
