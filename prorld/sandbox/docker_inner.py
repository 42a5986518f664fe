"""The first process of a container: connects to the daemon, readies the image for its user, and becomes the warden.

The warden of a docker sandbox runs within it: docker alone may enter the namespaces of its containers, and lends nobody
a descriptor. It runs on an interpreter of its own (``docker_kit``), so an image needs none. Standard library alone.

It begins as the container's root, with the few capabilities that giving the working directory away takes, and has
dropped them before it serves its first request. What its user runs later can neither signal nor trace it: it is the
first process of its namespace, and it is not dumpable.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from prorld.sandbox.syscalls import Libc, drop_to
from prorld.sandbox.warden import main as be_the_warden

__all__ = ["LINK", "main"]

LINK = "/.prorld-link/warden"  # in the container


def main(arguments: list[str]) -> NoReturn:
    """Be it: ``UID GID HOME WORKDIR``, the user of what runs here and the directories that become theirs."""
    uid, gid = int(arguments[0]), int(arguments[1])
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(LINK)
    try:
        os.umask(0o022)
        for place in arguments[2:]:
            _give_away(place, uid, gid)
        drop_to(uid, gid)
        Libc().stay_private()
    except OSError as exc:
        link.send(json.dumps({"op": "refused", "why": f"{type(exc).__name__}: {exc}"}).encode())
        os._exit(1)
    os.chdir("/")
    be_the_warden([str(link.detach()), "-1", "-1"])


def _give_away(place: str, uid: int, gid: int) -> None:
    """Make a directory where there is none; it and all below it belong to the user from here on."""
    Path(place).mkdir(mode=0o755, parents=True, exist_ok=True)
    for _, below, files, directory in os.fwalk(place):
        os.chown(directory, uid, gid)
        for name in (*files, *below):
            os.chown(name, uid, gid, dir_fd=directory, follow_symlinks=False)


if __name__ == "__main__":
    main(sys.argv[1:])
