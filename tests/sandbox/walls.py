"""The walls that the hostile suites run against: one entry for each runtime, and for each kind of image of one.

An entry says how the runtime is made, what its sandboxes are made from, and which tests can be asked of it. Whatever
takes a ``wall`` runs once for each; a wall that this machine can't have is skipped with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prorld.sandbox.apptainer import Apptainer
from prorld.sandbox.bubblewrap import Bubblewrap
from prorld.sandbox.contract import SandboxRuntime, SandboxSpec
from prorld.sandbox.local import Local
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.wall import Wall as SandboxWall
from prorld.sandbox.warden_client import Warden
from tests.sandbox.support import BOOT_ID, real_apptainer, real_image

__all__ = ["WALLS", "Wall", "wall_parameters"]


@dataclass(frozen=True, kw_only=True)
class Wall:
    """One runtime with one kind of image.

    ``isolates`` says that it promises to keep the host from the policy; a runtime without walls promises the rest.
    """

    name: str
    make: Callable[[Warden, Path], SandboxRuntime]
    image: Callable[[], Path | None] = lambda: None
    marks: tuple[pytest.MarkDecorator, ...] = ()
    isolates: bool = True

    def spec(self, **wanted: Any) -> SandboxSpec:
        """A sandbox's spec for this wall. Skips the test where the machine lacks the image."""
        image = self.image()
        return SandboxSpec(image=None if image is None else str(image), trusted=not self.isolates, **wanted)


def _behind(wall: Callable[[], SandboxWall]) -> Callable[[Warden, Path], SandboxRuntime]:
    def make(warden: Warden, runtime_dir: Path) -> SandboxRuntime:
        return Runtime(wall(), warden, runtime_dir=runtime_dir, boot_id=BOOT_ID)

    return make


def _apptainer() -> SandboxWall:
    return Apptainer(real_apptainer())


_REAL = (pytest.mark.real, pytest.mark.slow)
_DIRECTORY, _SIF = (partial(real_image, kind) for kind in ("directory", "sif"))

WALLS: tuple[Wall, ...] = (
    Wall(name="bubblewrap", make=_behind(Bubblewrap)),
    Wall(name="local", make=_behind(Local), isolates=False),
    Wall(name="bubblewrap-image", make=_behind(Bubblewrap), image=_DIRECTORY, marks=_REAL),
    Wall(name="apptainer", make=_behind(_apptainer), image=_DIRECTORY, marks=_REAL),
    Wall(name="apptainer-sif", make=_behind(_apptainer), image=_SIF, marks=_REAL),
)


def wall_parameters(*, isolating: bool = False) -> list[Any]:
    """The walls as a fixture or a test takes them; with ``isolating``, only those that keep the host away."""
    chosen = [wall for wall in WALLS if wall.isolates or not isolating]
    return [pytest.param(wall, id=wall.name, marks=wall.marks) for wall in chosen]
