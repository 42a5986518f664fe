"""File systems that a write-ahead log can't be trusted to."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorld.store.places import remote_kind

MOUNTS = """\
22 1 0:21 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:22 / /home rw shared:2 - nfs4 server:/home rw
24 23 0:23 / /home/local rw - xfs /dev/sdb1 rw
25 22 0:24 / /with\\040blank rw - lustre mds@tcp:/x rw
26 22 0:25 / /over rw - nfs server:/x rw
27 22 0:26 / /over rw - ext4 /dev/sdc rw
28 22 0:27 / /ssh rw - fuse.sshfs me@there: rw
29 22 0:28 / /sif rw - fuse.squashfuse image rw
nonsense
"""


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("/var/lib/prorld", None),
        ("/home/me/.local/state/prorld", "nfs4"),
        ("/home/local/prorld", None),
        ("/homes/me", None),
        ("/with blank/x", "lustre"),
        ("/over/x", None),
        ("/ssh/x", "sshfs"),
        ("/sif", None),
    ],
)
def test_the_innermost_and_latest_mount_counts(place: str, kind: str | None) -> None:
    found = remote_kind(Path(place), MOUNTS)
    assert (found or "").removeprefix("fuse.") == (kind or "")


def test_this_machine_can_be_asked(tmp_path: Path) -> None:
    kind = remote_kind(tmp_path)
    assert kind is None or kind in Path("/proc/self/mountinfo").read_text()
