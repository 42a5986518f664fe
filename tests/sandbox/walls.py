"""The walls that the hostile suites run against: one entry for each runtime, and for each kind of image of one.

An entry says how the runtime is made, what its sandboxes are made from, and which tests can be asked of it. Whatever
takes a ``wall`` runs once for each; a wall that this machine can't have is skipped with its reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prorld.sandbox.bubblewrap import BubblewrapRuntime
from prorld.sandbox.contract import SandboxRuntime, SandboxSpec
from prorld.sandbox.warden_client import Warden
from tests.sandbox.support import BOOT_ID

__all__ = ["WALLS", "Wall", "wall_parameters"]

ROOTFS_VARIABLE = "PRORLD_TEST_ROOTFS"


@dataclass(frozen=True, kw_only=True)
class Wall:
    """One runtime with one kind of image.

    ``isolates`` says that it promises to keep the host from the policy; a runtime without walls promises the rest.
    """

    name: str
    make: Callable[[Warden, Path], SandboxRuntime]
    image: Callable[[], str | None] = lambda: None
    marks: tuple[pytest.MarkDecorator, ...] = ()
    isolates: bool = True

    def spec(self, **wanted: Any) -> SandboxSpec:
        """A sandbox's spec for this wall. Skips the test where the machine lacks the image."""
        return SandboxSpec(image=self.image(), trusted=not self.isolates, **wanted)


def _bubblewrap(warden: Warden, runtime_dir: Path) -> SandboxRuntime:
    return BubblewrapRuntime(warden, runtime_dir=runtime_dir, boot_id=BOOT_ID)


def _named_by(variable: str) -> Callable[[], str]:
    """An image that an environment variable names."""

    def image() -> str:
        named = os.environ.get(variable)
        if not named:
            pytest.skip(f"{variable} names no image")
        return named

    return image


WALLS: tuple[Wall, ...] = (
    Wall(name="bubblewrap", make=_bubblewrap),
    Wall(name="bubblewrap-image", make=_bubblewrap, image=_named_by(ROOTFS_VARIABLE), marks=(pytest.mark.real,)),
)


def wall_parameters(*, isolating: bool = False) -> list[Any]:
    """The walls as a fixture or a test takes them; with ``isolating``, only those that keep the host away."""
    chosen = [wall for wall in WALLS if wall.isolates or not isolating]
    return [pytest.param(wall, id=wall.name, marks=wall.marks) for wall in chosen]
