"""The instance: which task folder, and what it has to hold."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

__all__ = ["TerminalConfig", "TerminalInstance"]

Place = Annotated[str, Meta(min_length=1, max_length=4096)]


class TerminalInstance(msgspec.Struct, frozen=True, kw_only=True):
    """One task folder: by its name below ``tasks_dir``, or by its path. ``digest`` is what the folder has to hold."""

    task_dir: Place
    data_source: str = "harbor"
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")] | None = None


class TerminalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where task folders and their images are, and how the work is verified.

    ``tasks_dir`` without a value is the example tasks of this package; folders elsewhere are taken where ``anywhere``
    is set. ``images`` names a task's image, ``base_image`` the one for tasks whose Dockerfile was not built; none
    is the daemon's own choice. ``verify`` is where tests run: as the task says, or always in the agent's own sandbox
    (``shared``), or always in one that the agent never touched, to which its working directory is carried (``fresh``).
    """

    tasks_dir: Place | None = None
    anywhere: bool = False
    images: dict[str, Place] = {}
    base_image: Place | None = None
    run_steps: bool = False
    verify: Literal["as-task", "shared", "fresh"] = "as-task"
    # Directories that ``fresh`` carries beside the working directory and the artifacts that the task declares.
    carry: tuple[Place, ...] = ()
    carry_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 30)] = 64 << 20
    # Tests that do not end in the task's own time: worth nothing, or no grade at all.
    timeout: Literal["zero", "error"] = "zero"
    # The key of ``reward.json`` that is the reward; without, ``reward``, the only one there is, or the mean of all.
    reward_key: str | None = None
    # Whether a task that asks for a network gets that of the host, where the daemon allows it.
    network: Literal["none", "as-task"] = "none"
    # The most that a task may ask for.
    memory_bytes_max: Annotated[int, Meta(ge=64 << 20)] = 8 << 30
    agent_s_max: Annotated[float, Meta(gt=0)] = 3600.0
    verify_s_max: Annotated[float, Meta(gt=0)] = 1800.0
