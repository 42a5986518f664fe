"""Looking into an image: programs, C library and environment are found, and the host is never taken for the image."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from prorld.sandbox.images.collecting import unneeded
from prorld.sandbox.images.look import environment_of, environment_said, inside, look
from prorld.sandbox.images.records import Found, ImageRecord
from prorld.sandbox.images.rootfs import sources_of
from tests.sandbox.images.support import small_tree

DOCKER = """\
#!/bin/sh
export PATH="/opt/conda/bin:/usr/bin"
export LANG="${LANG:-"C.UTF-8"}"
export SAID="a \\$5 \\"word\\""
export PRICE="${PRICE:-"\\\\$5 \\\\\\"a\\\\\\" \\\\\\\\d two\\nlines"}"
export HOME_OF="$HOME"
export HOME_TOO="${HOME_TOO:-"$HOME"}"
export RUN="$(id)"
LOCAL=1
"""


def program(root, path):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text("")
    (root / path).chmod(0o755)


def noted(root, name, text):
    place = root / ".singularity.d" / "env"
    place.mkdir(parents=True, exist_ok=True)
    (place / name).write_text(text)


def test_links_are_followed_as_a_process_in_the_image_would(place):
    """Absolute ones begin at the image's root, and nothing leads above it."""
    root = small_tree(place / "image")
    (root / "absolute").symlink_to("/bin/bash")
    (root / "above").symlink_to("../../../../bin/bash")
    (root / "host").symlink_to(place)
    (root / "loop").symlink_to("loop")
    assert inside(root, "/absolute") == inside(root, "/above") == root / "bin" / "bash"
    assert inside(root, "/host") is None
    assert inside(root, "/loop") is None
    assert inside(root, "/../../../data") == root / "data"


def test_programs_are_looked_for_where_the_image_says(place):
    """Its own PATH first; a link to a program of the host that it has not is none."""
    root = small_tree(place / "image")
    noted(root, "10-docker2singularity.sh", DOCKER)
    program(root, "opt/conda/bin/python3")
    program(root, "usr/bin/ipython3")
    (root / "usr" / "bin" / "git").symlink_to("/usr/bin/env")
    (root / "usr" / "bin" / "node").write_text("not executable")
    found = look(root)
    assert found.programs == {
        "bash": "/bin/bash", "python3": "/opt/conda/bin/python3", "ipython3": "/usr/bin/ipython3"
    }  # fmt: skip
    assert found.misses == ()
    assert look(small_tree(place / "other")).misses == ("python3",)


def test_the_environment_is_read_and_never_run(place):
    """What only a shell could tell is left out; what stands later wins."""
    root = small_tree(place / "image")
    noted(root, "10-docker2singularity.sh", DOCKER)
    noted(root, "90-environment.sh", "export LANG=C\nexport BROKEN='\n")
    wanted = {"PATH": "/opt/conda/bin:/usr/bin", "LANG": "C", "SAID": 'a $5 "word"', "PRICE": '$5 "a" \\d two\nlines'}
    assert environment_of(root) == wanted
    said = {f"/.singularity.d/env/{file.name}": file.read_text() for file in (root / ".singularity.d/env").iterdir()}
    assert environment_said({"attributes": {"environment": said}}) == wanted


@pytest.mark.parametrize("said", [{}, {"attributes": []}, {"attributes": {"environment": [1]}}])
def test_an_apptainer_that_says_something_else_sets_nothing(said):
    """Its answer is no promise."""
    assert environment_said(said) == {}


def test_an_environment_that_leads_out_of_the_image_is_not_read(place):
    """A link to a file of the host, a directory, and bytes that are no text."""
    (place / "secret").write_text("export SECRET=1\n")
    root = small_tree(place / "image")
    noted(root, "90-environment.sh", "")
    (root / ".singularity.d/env/90-environment.sh").unlink()
    (root / ".singularity.d/env/90-environment.sh").symlink_to(place / "secret")
    (root / ".singularity.d/env/10-docker2singularity.sh").write_bytes(b"\xff\xfe\nexport A=1\n")
    assert environment_of(root) == {"A": "1"}


@pytest.mark.parametrize(
    ("file", "libc"),
    [("lib/ld-musl-x86_64.so.1", "musl"), ("lib/x86_64-linux-gnu/libc.so.6", "glibc"), ("lib64/libc.so.6", "glibc"),
     ("lib/other", "none")],
)  # fmt: skip
def test_the_c_library_is_told(place, file, libc):
    """By the names of its files."""
    root = small_tree(place / "image")
    program(root, file)
    assert look(root).libc == libc


def found(digest, used_at, size=100, *, names=("name",), in_use=False, origin="pull", broken=False):
    record = ImageRecord(
        digest=digest, kind="sif", source="", origin=origin, mode="lock", size_bytes=size, created_at=used_at
    )
    return Found(
        record=record, names=names, used_at=used_at, in_use=in_use, unpacked=False, disk_bytes=size, broken=broken
    )


IMAGES = [
    found("new", "2026-01-10T00:00:00Z"), found("path", "2026-01-09T00:00:00Z", names=(), origin="path"),
    found("nameless", "2026-01-09T00:00:00Z", names=()), found("busy", "2026-01-02T00:00:00Z", in_use=True),
    found("old", "2026-01-01T00:00:00Z"),
]  # fmt: skip
NOW = datetime(2026, 1, 11, tzinfo=UTC)


@pytest.mark.parametrize(
    ("unused_days", "keep_bytes", "going", "busy"),
    [
        (None, None, ["nameless"], []),
        (5, None, ["nameless", "old"], ["busy"]),
        (None, 300, ["nameless", "old"], []),
        (None, 150, ["nameless", "old", "path", "new"], ["busy"]),
        (0, None, ["new", "path", "nameless", "old"], ["busy"]),
    ],
)
def test_what_goes_is_old_nameless_or_too_much_and_never_in_use(unused_days, keep_bytes, going, busy):
    """The one used longest ago first; what is in use is told and counts for the room."""
    gone, kept = unneeded(IMAGES, NOW, unused_days=unused_days, keep_bytes=keep_bytes)
    assert [item.record.digest for item in gone] == going
    assert [item.record.digest for item in kept] == busy


def test_only_the_hosts_own_release_is_asked():
    """Updates and fixes of it, neither another suite nor what could be an option of apt's."""
    targets = (
        "http://m/debian/|bookworm|bookworm|main\nhttp://m/debian/|bookworm|bookworm|contrib\n"
        "http://m/security/|bookworm-security|bookworm-security|main\nhttp://m/debian/|trixie|stable|main\n"
        "http://m/x/ [trusted=yes]|bookworm|bookworm|main\nhttp://m/debian/|bookworm|bookworm|main\nbroken\n"
    )
    assert sources_of(targets, "bookworm", " [signed-by=/key]") == (
        "deb [signed-by=/key] http://m/debian/ bookworm main contrib",
        "deb [signed-by=/key] http://m/security/ bookworm-security main",
    )
    assert sources_of(targets, "", "") == ()
