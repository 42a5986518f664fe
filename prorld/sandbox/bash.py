"""How a persistent bash is driven: nobody types commands at it.

The one line that is typed for each command is always the same. It reads a nonce and the command from descriptor 9, up
to a NUL each, and evaluates the command at top level with its output on descriptor 9. So there is no echo and no prompt
to parse, no quoting, no limit of a tty line, no completion that eats tabs; what the command does to prompts,
descriptors 0 to 2 or the tty does not matter.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sequence

from prorld.sandbox.session import BOOT_SECONDS, Rung

__all__ = ["BashDialect"]

COMMAND_BYTES_MAX = 1 << 20

# What a command may change, words are kept from: quotes from IFS, backslashes from aliases, no `local` from `set -k`.
_ONCE = (
    r"PS1=; PS2=; PS4='+ '; HISTFILE=; unset MAILCHECK; set +o history +H; shopt -u checkwinsize huponexit; __n=; "
    r"""__e() { \builtin printf '\0%s %d %s\0' "$__n" "$1" "$PWD" >&9; __n=; \builtin return "$1"; }; """
    # An interrupt abandons the typed line; the prompt that follows reports in its place.
    r"""PROMPT_COMMAND='__s=$?; [[ -z $__n ]] || \__e "$__s"'"""
    "\n"
)
# Where the names can't be set any more, the shell leaves before it would take an old command for the new one.
_EACH = (
    r"IFS= \builtin read -rd '' -u9 __n && IFS= \builtin read -rd '' -u9 __c || \builtin exit 125; "
    r"""\builtin printf '\0%s<\0' "$__n" >&9; """
    r"""\builtin eval "$__c" >&9 2>&9 </dev/null 9<&-; \__e "$?" """
    "\n"
)


class BashDialect:
    """A bash without start-up files, interactive for the sake of job control alone."""

    argv: Sequence[str] = ("/bin/bash", "--norc", "--noprofile", "--noediting", "-i")
    typed_once = _ONCE.encode()
    sent_once = b""
    typed_each = _EACH.encode()
    boot_seconds = BOOT_SECONDS
    ladder: Sequence[Rung] = (Rung(signal.SIGINT, 0.5), Rung(signal.SIGTERM, 0.5), Rung(signal.SIGKILL, 1.0))

    def frame(self, nonce: bytes, text: str) -> bytes:
        """The nonce and the command. Raises ``ValueError`` for what bash has no way to hold."""
        command = text.encode("utf-8", "replace")
        if b"\0" in command:
            raise ValueError("a command can't hold a NUL byte")
        if len(command) > COMMAND_BYTES_MAX:
            raise ValueError(f"a command can't be longer than {COMMAND_BYTES_MAX} bytes")
        return nonce + b"\0" + command + b"\0"

    def change_directory(self, path: str) -> str:
        """``cd``; a directory that has gone is no error."""
        return f"cd -- {shlex.quote(path)} 2>/dev/null"

    def check_start(self, exit_code: int, said: bytes) -> None:
        """A bash that answers works."""
