"""Small root file systems, stand-ins for Apptainer and SIF files, for the tests of the store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

SIF_HEAD = b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0"
OWNER = (65534, 65534) if os.geteuid() == 0 else None

# Unpacks as `apptainer build --sandbox OUT SIF` would; notes each time, and does what its file of orders says.
_PROGRAM = """\
#!/bin/sh
echo "$*" >>{place}/calls
. {place}/orders
mkdir -p "$3/bin" "$3/.singularity.d/env"
echo unpacked >"$3/bin/program"
echo 'export COLOUR="red"' >"$3/.singularity.d/env/90-environment.sh"
"""


class StandIn:
    """A program in Apptainer's place, and what it was called with. ``orders`` are lines of shell that it runs first."""

    def __init__(self, place: Path) -> None:
        place.mkdir(parents=True)
        self.place = place
        self.path = str(place / "bin" / "apptainer")
        (place / "bin").mkdir()
        Path(self.path).write_text(_PROGRAM.format(place=place))
        Path(self.path).chmod(0o755)
        (place / "calls").touch()
        (place / "calls").chmod(0o666)
        self.order("")

    def order(self, lines: str) -> None:
        """What it does before it unpacks."""
        (self.place / "orders").write_text(lines + "\n")

    def calls(self) -> list[str]:
        """Each call's arguments."""
        return (self.place / "calls").read_text().splitlines()

    def stop_there(self) -> None:
        """Let it say who it is, and then stand still for longer than any test."""
        self.order(f'mkdir -p "$3/half"; echo $$ >{self.place}/calls; exec sleep 600')

    def pid(self) -> int | None:
        """Who stands still there, once it does."""
        said = self.calls()
        return int(said[0]) if said and said[0].isdigit() else None


def fake_sif(path: Path, content: bytes = b"content") -> Path:
    """A file that begins as SIF files do."""
    path.write_bytes(SIF_HEAD + content)
    path.chmod(0o644)
    return path


def small_tree(root: Path, word: str = "hello") -> Path:
    """A root file system of a few files."""
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "bash").write_text(f"#!/bin/sh\necho {word}\n")
    (root / "bin" / "bash").chmod(0o755)
    (root / "sh").symlink_to("bin/bash")
    (root / "data").mkdir()
    (root / "data" / "one").write_text(word)
    os.link(root / "data" / "one", root / "data" / "two")
    return root


def paths(root: Path) -> list[str]:
    """All that is in a directory, by relative names."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


class Heard:
    """A progress that remembers its steps."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.lines: list[str] = []

    def step(self, what: str, **_: Any) -> None:
        self.steps.append(what)

    def advance(self, done_bytes: int) -> None:
        assert done_bytes >= 0

    def said(self, line: str) -> None:
        self.lines.append(line)
