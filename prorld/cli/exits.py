"""Exit codes, and which error ends with which. Where sysexits.h has a code for it, that one is used."""

from __future__ import annotations

from enum import IntEnum

from prorld.errors import ConfigError, ProrldError

NOTE = (
    "exit codes: 0 ok, 1 failed, 2 usage, 69 no daemon, 75 try again later, 77 permission, 78 configuration, 130 Ctrl-C"
)

# Of the commands that train: one code more, on a line of its own, as a line of help fits a screen.
TRAINING_NOTE = f"{NOTE},\n            65 nothing to learn"


class Exit(IntEnum):
    """How a command ends."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOTHING_TO_LEARN = 65
    UNAVAILABLE = 69
    TEMPORARY = 75
    PERMISSION = 77
    CONFIG = 78
    INTERRUPTED = 130
    BROKEN_PIPE = 141


_BY_CODE: dict[str, Exit] = {
    "bad_address": Exit.USAGE,
    "bad_definition": Exit.USAGE,
    "bad_image_name": Exit.USAGE,
    "bad_input": Exit.USAGE,
    "bad_json": Exit.USAGE,
    "bad_reference": Exit.USAGE,
    "connection_lost": Exit.UNAVAILABLE,
    "invalid_field": Exit.USAGE,
    "no_daemon": Exit.UNAVAILABLE,
    "token_exposed": Exit.PERMISSION,
    "token_unreadable": Exit.PERMISSION,
}
# The daemon's codes are many and grow; what a refusal means for a script is in its status.
_BY_STATUS: dict[int, Exit] = {400: Exit.USAGE, 401: Exit.PERMISSION, 403: Exit.PERMISSION}


class UsageError(ProrldError):
    """What was typed, or a file that was named, can't be used."""

    code = "bad_input"


def exit_of(error: ProrldError) -> Exit:
    """The exit code of an error."""
    if isinstance(error, ConfigError):
        return Exit.CONFIG
    known = _BY_CODE.get(error.stable_code) or _BY_STATUS.get(getattr(error, "status", None) or 0)
    if known is not None:
        return known
    return Exit.TEMPORARY if error.may_retry else Exit.FAILED
