"""Becomes the program in its arguments, which then ends, with its process group, when whoever started it has gone.

It runs alone with the standard library, so that any Python can run it. The kernel keeps watch: the pipe of the lifeline
raises SIGIO for the whole group when its other end closes, and the default of that signal is to end a process.

With ``--remove DIRECTORY`` first, a second process stays for as long as the lifeline holds, and then takes away that
directory: whoever was to do it may have been killed. It is in a session of its own, out of reach of what ends the
group, and nobody's child, so that no program mistakes it for one of its own.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import sys
import time

REMOVE = "--remove"
# How long what is left of the group may go on using the directory. Mostly it has gone at once; only where nobody reaps
# orphans do the dead keep the group's number for ever.
GROUP_SECONDS_MAX = 5.0
LOOK_SECONDS = 0.02


def main() -> None:
    """Tie the group to the lifeline, and go."""
    lifeline = int(os.environ["LIFELINE_FD"])
    program = sys.argv[1:]
    if program[0] == REMOVE:
        _leave_remover(program[1], lifeline)
        program = program[2:]
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    # Gone already, before the signal was asked for.
    if select.select([lifeline], [], [], 0)[0]:
        sys.exit(1)
    os.execvp(program[0], program)  # noqa: S606 - that is what it is for


def _leave_remover(directory: str, lifeline: int) -> None:
    group = os.getpgrp()
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return
    try:
        os.setsid()
        if os.fork() == 0:
            _remove_afterwards(directory, lifeline, group)
    finally:
        # Whatever happens here, there is one program only.
        os._exit(0)


def _remove_afterwards(directory: str, lifeline: int, group: int) -> None:
    # The caller's output would stay open as long as this does.
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.chdir("/")
    os.read(lifeline, 1)
    until = time.monotonic() + GROUP_SECONDS_MAX
    while _is_there(group) and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)  # noqa: TID251 - nothing else runs here
    # Whoever made it may be at it, too.
    shutil.rmtree(directory, ignore_errors=True)


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # All that is left of it changed its user.
        return True
    return True


if __name__ == "__main__":
    main()
