"""What the formats are called. It imports nothing, so that who only lists them stays quick."""

from __future__ import annotations

from typing import Final, Literal, get_args

__all__ = ["FORMATS", "Format"]

Format = Literal["verl", "slime", "trl", "nemo_rl", "skyrl", "openrlhf", "prime_rl", "areal", "atropos", "atif", "chat"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)
