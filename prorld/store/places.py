"""On what kind of file system a directory is: a write-ahead log needs one whose locks and maps are this machine's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

__all__ = ["remote_kind"]

_MOUNTS: Final = Path("/proc/self/mountinfo")
_REMOTE: Final = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "gpfs", "lustre", "nfs", "nfs4", "ocfs2", "orangefs", "panfs",
    "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs",
})  # fmt: skip
_REMOTE_FUSE: Final = ("glusterfs", "sshfs", "s3fs", "ceph", "juicefs", "goofys", "rclone", "gcsfuse", "cvmfs2")


def remote_kind(directory: Path, mounts: str | None = None) -> str | None:
    """The kind of the directory's file system where it is one that other machines share; ``None`` where it is local.

    ``mounts`` is the text of ``/proc/self/mountinfo``; without it that is read.
    """
    if mounts is None:
        try:
            mounts = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return None
    path = directory.resolve()
    deepest, kind = -1, ""
    for line in mounts.splitlines():
        head, _, tail = line.partition(" - ")
        fields = head.split(" ")
        if len(fields) < 5 or not tail:
            continue
        point = Path(_plain(fields[4]))
        # Of two mounts on one place, the later one hides the other.
        if path.is_relative_to(point) and len(point.parts) >= deepest:
            deepest, kind = len(point.parts), tail.split(" ")[0]
    is_remote = kind in _REMOTE or kind.removeprefix("fuse.") in _REMOTE_FUSE
    return kind if is_remote else None


def _plain(text: str) -> str:
    """Blanks and backslashes of a mount point are written in octal."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
