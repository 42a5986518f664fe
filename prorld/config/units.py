"""Numbers of settings, with the bounds that make them sensible."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

__all__ = ["Bytes", "Count", "Seconds", "Share", "Workers"]

Workers = Annotated[int, Meta(ge=0, le=100_000)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Bytes = Annotated[int, Meta(ge=1 << 10, le=1 << 50)]
Count = Annotated[int, Meta(ge=1, le=10_000_000)]
Share = Annotated[float, Meta(gt=0, le=1)]
