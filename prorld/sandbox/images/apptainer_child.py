"""The process that lets Apptainer work on one image: ``python -m prorld.sandbox.images.apptainer_child REQUEST``.

It becomes the user that sandboxes run as, and then calls spython, which starts Apptainer, waits without a limit,
prints, and may end its process: nothing of that hurts here. When whoever started it has gone it ends what it started.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path
from subprocess import CalledProcessError, call
from typing import Any, NoReturn

from prorld.kit.process_group import LIFELINE_ENV
from prorld.sandbox.syscalls import Libc, drop_to, expose

__all__: list[str] = []

# Apptainer speaks of its progress on stderr, and spython reads one of the two: building on stdout, pulling on stderr.
_WRAPPER = """\
#!/bin/sh
case $1 in
build) exec {program} "$@" 2>&1 ;;
pull) exec {program} "$@" 1>&2 ;;
esac
exec {program} "$@"
"""


def main(arguments: list[str]) -> NoReturn:
    """Do what the request says; exit code 0 when it was done."""
    request: dict[str, Any] = json.loads(arguments[0])
    _end_with(int(os.environ.pop(LIFELINE_ENV)))
    # What it needs is imported while it may still read it.
    client = None if request["action"] == "unpack" else _client()
    os.umask(0o022)
    if request["uid"] >= 0:
        if request["cwd"] and not _may_enter(request["cwd"], request["uid"], request["gid"]):
            sys.exit(f"ERROR: the user {request['uid']}, as whom images are made, can't enter {request['cwd']}")
        expose(Libc(), request["reach"], request["uid"], request["gid"])
        drop_to(request["uid"], request["gid"])
    program = request["program"]
    try:
        os.chdir(request["cwd"] or request["work"])
    except OSError as exc:
        sys.exit(f"ERROR: the user {os.getuid()}, as whom images are made, can't enter {exc.filename}")
    if not os.access(program, os.X_OK):
        sys.exit(f"ERROR: the user {os.getuid()}, as whom images are made, can't run {program}")
    if client is None:
        sys.exit(call([program, "build", "--sandbox", request["output"], request["source"]]))  # noqa: S603 - no shell
    _wrap(program, Path(request["work"]))
    sys.exit(_do(client, request))


def _may_enter(place: str, uid: int, gid: int) -> bool:
    """Whether a directory itself, whatever is above it, is open to a user."""
    status = Path(place).stat()
    bits = 0o100 if status.st_uid == uid else 0o010 if status.st_gid == gid else 0o001
    return bool(status.st_mode & bits)


def _client() -> Any:
    """The client of spython; it asks for ``singularity`` on PATH only when it is used."""
    return importlib.import_module("spython.main").Client


def _end_with(lifeline: int) -> None:
    """Let the end of file on a pipe end this process and all it started, however the other side has gone."""

    def end(*_: object) -> None:
        with suppress(BlockingIOError):
            if not os.read(lifeline, 1):
                os.killpg(0, signal.SIGKILL)

    os.set_blocking(lifeline, False)
    signal.signal(signal.SIGIO, end)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    os.set_inheritable(lifeline, False)


def _wrap(program: str, work: Path) -> None:
    """Put the program where spython looks for it."""
    place = work / "bin"
    place.mkdir(exist_ok=True)
    wrapper = place / "singularity"
    wrapper.write_text(_WRAPPER.format(program=shlex.quote(program)))
    wrapper.chmod(0o755)
    os.environ["PATH"] = f"{place}:{os.environ['PATH']}"


def _do(client: Any, request: dict[str, Any]) -> int:
    source, output, options = request["source"], request["output"], request["options"]
    if request["action"] == "inspect":
        Path(output).write_text(json.dumps(client.inspect(source, quiet=True)))
        return 0
    if request["action"] == "pull":
        _, lines = client.pull(source, name=output, stream=True, quiet=True)
    else:
        _, lines = client.build(source, output, sudo=False, stream=True, quiet=True, options=options)
    try:
        for line in lines:
            sys.stdout.write(line)
            sys.stdout.flush()
    except CalledProcessError as exc:
        return int(exc.returncode) or 1
    return 0


if __name__ == "__main__":
    main(sys.argv[1:])
