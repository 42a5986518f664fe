"""What of a new configuration can be had without a restart, and what can't.

Only what changed in the configuration is applied: a stage that was resized over HTTP keeps its size when somebody
reloads for another reason. Values are never told, for some are secrets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import structlog
from structlog.typing import FilteringBoundLogger

from prorld.config import Config, Loaded
from prorld.domain.outcome import STAGES
from prorld.errors import ConfigError, chain
from prorld.log import Level
from prorld.wire.ops import StagePatch, StagesPatch

__all__ = ["LIVE", "Changes", "Reloader", "changes"]

log: FilteringBoundLogger = structlog.get_logger("prorld.ops")

# Each is read at the moment it is needed, or can be handed to the part that owns it. Verdicts are not among them: the
# jobs of one step of training are to be judged by one table.
LIVE = ("stages.init", "stages.run", "stages.eval", "fairness.weights", "timeouts.drain_s", "log.level")


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """The dotted paths of what changed: what is in force from now on, and what a restart would bring."""

    live: list[str]
    restart: list[str]


def changes(old: Config, new: Config) -> Changes:
    """Compare two configurations."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    differing = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    return Changes(
        live=[path for path in differing if path in LIVE], restart=[path for path in differing if path not in LIVE]
    )


def _leaves(config: Config) -> Iterator[tuple[str, Any]]:
    tree: Mapping[str, Any] = msgspec.to_builtins(config)
    for section, value in tree.items():
        if section in {"policies", "backends"} or not isinstance(value, Mapping):
            yield section, value
        else:
            for name, leaf in value.items():
                yield f"{section}.{name}", leaf


class Reloader:
    """Reads the configuration again when asked, and applies what is ``LIVE``. ``config`` is what is in force."""

    def __init__(
        self,
        config: Config,
        reread: Callable[[], Loaded],
        *,
        resize: Callable[[StagesPatch], object],
        set_weights: Callable[[Mapping[str, float]], None],
        set_level: Callable[[Level], None],
    ) -> None:
        self.config = config
        self._asked_for = config
        self._reread = reread
        self._resize = resize
        self._set_weights = set_weights
        self._set_level = set_level

    def reload(self) -> str:
        """Read and apply; a line that says what came of it. A configuration that can't be used changes nothing."""
        try:
            new = self._reread().config
        except ConfigError as exc:
            log.error("reload.refused", reason=chain(exc))  # noqa: TRY400 - the line says it all
            return f"the new configuration was refused: {chain(exc)}"
        found = changes(self._asked_for, new)
        self._asked_for = new
        self._apply(new, found.live)
        log.info("daemon.reloaded", changed=found.live, needs_restart=found.restart)
        words = f"reloaded; changed: {', '.join(found.live) or 'nothing'}"
        return words + (f"; a restart is needed for {', '.join(found.restart)}" if found.restart else "")

    def _apply(self, new: Config, live: Sequence[str]) -> None:
        sizes = {name: StagePatch(workers=getattr(new.stages, name)) for name in STAGES if f"stages.{name}" in live}
        if sizes:
            self._resize(StagesPatch(**sizes))
        if "fairness.weights" in live:
            self._set_weights(new.fairness.weights)
        if "log.level" in live:
            self._set_level(new.log.level)
        self.config = msgspec.structs.replace(
            self.config, stages=new.stages, fairness=new.fairness, timeouts=new.timeouts, log=new.log
        )
