"""Parts that installed distributions bring, found by entry point and loaded so that a broken one is only a line.

Nothing is looked for when this module is imported; the composition root asks. What a part must be is its room's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

import msgspec
import structlog
from structlog.typing import FilteringBoundLogger

from prorld.errors import ProrldError, chain

__all__ = ["Part", "load_parts"]

T = TypeVar("T")

log: FilteringBoundLogger = structlog.get_logger()


class Part(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """One entry point: what it loaded to, or why it can't be used."""

    name: str
    distribution: str
    version: str
    value: T | None = None
    error: str | None = None


def load_parts(
    group: str, sound: Callable[[str, object], T], *, found: Iterable[EntryPoint] | None = None
) -> dict[str, Part[T]]:
    """All parts of a group by name. ``sound`` gives the loaded object its type, or raises ``ProrldError``."""
    points: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=group) if found is None else found:
        points.setdefault(point.name, []).append(point)
    parts = {name: _load(name, points[name], sound) for name in sorted(points)}
    for part in parts.values():
        if part.error is not None:
            log.warning(
                "plugin.broken", group=group, plugin=part.name, distribution=part.distribution, error=part.error
            )
    return parts


def _load(name: str, points: list[EntryPoint], sound: Callable[[str, object], T]) -> Part[T]:
    dist = points[0].dist
    part: Part[T] = Part(
        name=name,
        distribution=dist.name if dist is not None else "unknown",
        version=dist.version if dist is not None else "",
    )
    if len(points) > 1:
        return msgspec.structs.replace(part, error="more than one distribution has a part of this name")
    try:
        return msgspec.structs.replace(part, value=sound(name, points[0].load()))
    except ProrldError as exc:
        return msgspec.structs.replace(part, error=exc.message)
    except (Exception, SystemExit) as exc:  # noqa: BLE001  (a plugin's import may raise anything)
        return msgspec.structs.replace(part, error=chain(exc))
