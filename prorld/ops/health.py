"""Health as a registry of conditions: each has a code, a severity and a cure, and is looked for by its own check.

A condition is shown when its check has found trouble for long enough and nothing it depends on is in trouble, too. The
clock is given. It never cures anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
import structlog
from structlog.typing import FilteringBoundLogger

from prorld.wire.ops import Condition

__all__ = ["Check", "Health", "Kind", "Severity", "Trouble"]

log: FilteringBoundLogger = structlog.get_logger("prorld.ops")

# What is over before is no news: an engine that joins a second after the start, a drain.
LOG_AFTER_S = 10.0

# ``error`` keeps the daemon from being ready, ``warning`` does not.
Severity = Literal["error", "warning"]


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """A condition that there can be. ``visible_after_s`` hides what comes and goes."""

    code: str
    severity: Severity
    depends_on: tuple[str, ...] = ()
    visible_after_s: float = 0.0


class Trouble(NamedTuple):
    """What a check found: for people, and what to do about it."""

    message: str
    cure: str
    policy: str | None = None


class Check(NamedTuple):
    """A condition and the look that finds it; one condition can be found several times, e.g. once per stage."""

    kind: Kind
    look: Callable[[], Sequence[Trouble]]


class Health:
    """The conditions of one daemon. ``depends_on`` names conditions that are registered before."""

    def __init__(self, checks: Sequence[Check], clock: Callable[[], float]) -> None:
        known: set[str] = set()
        for check in checks:
            assert check.kind.code not in known, check.kind.code
            assert set(check.kind.depends_on) <= known, check.kind
            known.add(check.kind.code)
        self._checks = tuple(checks)
        self._clock = clock
        self._broken_since: dict[str, float] = {}
        self._logged: set[str] = set()

    def conditions(self) -> list[Condition]:
        """Look now; what is shown of what was found, in the order of the registry. Changes are logged."""
        now = self._clock()
        shown: list[Condition] = []
        for kind, look in self._checks:
            troubles = look()
            if troubles:
                since = self._broken_since.setdefault(kind.code, now)
            else:
                self._broken_since.pop(kind.code, None)
                continue
            if now - since < kind.visible_after_s or any(code in self._broken_since for code in kind.depends_on):
                continue
            shown += [
                Condition(
                    code=kind.code,
                    message=trouble.message,
                    cure=trouble.cure,
                    severity=kind.severity,
                    broken_for_s=round(now - since, 3),
                    policy=trouble.policy,
                )
                for trouble in troubles
            ]
        self._log({item.code: item for item in shown if (item.broken_for_s or 0.0) >= LOG_AFTER_S})
        return shown

    def _log(self, lasting: Mapping[str, Condition]) -> None:
        for code in sorted(lasting.keys() - self._logged):
            found = lasting[code]
            log.warning("health.broken", code=code, severity=found.severity, message=found.message, cure=found.cure)
        for code in sorted(self._logged - lasting.keys()):
            log.info("health.mended", code=code)
        self._logged = set(lasting)
