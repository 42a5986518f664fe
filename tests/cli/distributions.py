"""Distributions that are installed as an installer leaves them: modules, and metadata with entry points."""

from __future__ import annotations

import textwrap
from pathlib import Path

__all__ = ["Site"]


class Site:
    """A directory on the path of modules."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def module(self, name: str, source: str) -> None:
        """A module that can be imported."""
        (self.path / f"{name}.py").write_text(textwrap.dedent(source))

    def install(self, distribution: str, group: str, points: dict[str, str]) -> None:
        """A distribution, version 1.5, with these entry points."""
        info = self.path / f"{distribution.replace('-', '_')}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n")
        lines = [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
