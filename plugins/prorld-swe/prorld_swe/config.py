"""What an operator can set for the handler ``swe``, under ``[handlers.config.swe]``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from prorld_swe.findings import FINDINGS, Finding

__all__ = ["Preset", "SweConfig"]

Preset = Literal["openhands", "openhands-sdk", "swe-agent", "mini", "r2e", "prorld"]
Bytes = Annotated[int, Meta(ge=16 << 20)]


class SweConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tools, images, limits and how strict the grade is.

    ``images_dir`` holds SIF files or directories under the names that the field gives them. ``reward`` is
    ``resolved`` (all or nothing) or ``fraction`` (the part of the expected tests that pass). ``on_timeout`` is what
    tests that do not end are worth. ``grader`` says how instances of images are judged: by our own witness, by the log
    of their script, or by the first where the image can. ``history`` is what an image's repository keeps: the ancestors
    of the base commit, or one commit. ``forbidden`` are findings in a patch that make it worthless where the right
    patch has none of them.
    """

    preset: Preset = "openhands"
    calls: Literal["native", "text"] = "native"
    images_dir: str | None = None
    image: str | None = None
    reward: Literal["resolved", "fraction"] = "resolved"
    on_timeout: Literal["zero", "error"] = "zero"
    grader: Literal["auto", "witness", "log"] = "auto"
    parser: Literal["own", "swebench"] = "own"
    history: Literal["keep", "squash"] = "keep"
    check_environment: bool = True
    forbidden: tuple[Finding, ...] = FINDINGS
    prepare_s: Annotated[float, Meta(gt=0, le=3_600)] = 180.0
    # The longest that tests may take, whatever an instance says, and the least that they get.
    test_limit_s: Annotated[float, Meta(gt=0, le=86_400)] = 1_800.0
    test_least_s: Annotated[float, Meta(gt=0, le=86_400)] = 60.0
    patch_bytes: Annotated[int, Meta(ge=1 << 10, le=16 << 20)] = 1 << 20
    memory_bytes: Bytes = 4 << 30
    scratch_bytes: Bytes = 1 << 30
    processes: Annotated[int, Meta(ge=16)] = 512
