"""The daemon as whoever runs it sees it: says that it is ready, obeys signals, drains when told, says that it stops.

It owns the order of these; what is drained and taken down is the composition root's.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.config import Config, Loaded
from prorld.domain.job import JobState
from prorld.log import Level
from prorld.ops import signals
from prorld.ops.health import Health
from prorld.ops.heartbeat import Heartbeat
from prorld.ops.notify import Notifier
from prorld.ops.reload import Reloader
from prorld.ops.task_tree import TaskAges
from prorld.rollout.supervisor import Supervisor

__all__ = ["EndSignals", "Outside", "Service"]

log: FilteringBoundLogger = structlog.get_logger("prorld.daemon")

END = (signal.SIGTERM, signal.SIGINT)
# From the end of the drain until nothing is left: the clean-ups of jobs, sandboxes and engines with their deadlines.
TEARDOWN_S = 60.0
# For clients to read what ended while the daemon drained.
LINGER_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Outside:
    """What the process around the daemon lends it: how to read the configuration again, and set the log level."""

    reread: Callable[[], Loaded]
    set_level: Callable[[Level], None]


@dataclass(kw_only=True)
class EndSignals:
    """SIGTERM and SIGINT, counted: the first drains, the second kills, later ones change nothing.

    Where the process is the daemon's own, that holds until the process has ended.
    """

    owns_process: bool = False
    first: trio.Event = field(default_factory=trio.Event)
    second: trio.Event = field(default_factory=trio.Event)
    name: str = ""

    async def hear(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hear them until cancelled, also while the daemon is being taken down: an impatient one must not cut that."""
        try:
            with trio.open_signal_receiver(*END) as told:
                task_status.started()
                async for number in told:
                    if self.first.is_set():
                        self.second.set()
                    else:
                        self.name = signal.Signals(number).name
                        self.first.set()
        finally:
            if self.owns_process:
                for ignored in END:
                    signal.signal(ignored, signal.SIG_IGN)


@dataclass(frozen=True, kw_only=True)
class Service:
    """The parts that running as a service needs. Without an ``outside``, SIGHUP and SIGQUIT are left alone."""

    config: Config
    supervisor: Supervisor
    set_weights: Callable[[Mapping[str, float]], None]
    health: Health
    notifier: Notifier
    ages: TaskAges
    outside: Outside | None

    async def start(self, core: trio.Nursery, ears: trio.Nursery) -> Running:
        """Listen to signals, say that the daemon is ready, go on telling. ``ears`` outlives ``core`` and all of it."""
        told = EndSignals(owns_process=self.outside is not None)
        await ears.start(told.hear, name="end signals")
        drain_s: Callable[[], float] = self._drain_s
        if self.outside is not None:
            reloader = Reloader(
                self.config, self.outside.reread, resize=self.supervisor.set_stages, set_weights=self.set_weights,
                set_level=self.outside.set_level,
            )  # fmt: skip
            await ears.start(signals.obey, self._reloads(reloader), self._snapshot, name="signals")
            drain_s = lambda: reloader.config.timeouts.drain_s  # noqa: E731
        await self.notifier.ready(self.status_line())
        heart = Heartbeat(self.notifier, self.supervisor.ping, self.status_line)
        core.start_soon(heart.run, name="heartbeat")
        return Running(self.supervisor, self.notifier, heart, told, drain_s)

    def status_line(self) -> str:
        """What systemctl shows."""
        counts = self.supervisor.counts()
        left = ", ".join(f"{n} {name}" for name, n in counts.items() if n and name != JobState.DONE.value)
        broken = sorted({item.code for item in self.health.conditions() if item.severity == "error"})
        return f"jobs: {left or 'none'}" + (f"; not ready: {', '.join(broken)}" if broken else "; ready")

    def _drain_s(self) -> float:
        return self.config.timeouts.drain_s

    def _snapshot(self) -> str:
        return signals.snapshot(self.ages, self.supervisor)

    def _reloads(self, reloader: Reloader) -> Callable[[], Awaitable[None]]:
        async def reload() -> None:
            await self.notifier.reloading()
            await self.notifier.ready(reloader.reload())

        return reload


@dataclass(frozen=True)
class Running:
    """A service that is up."""

    supervisor: Supervisor
    notifier: Notifier
    heart: Heartbeat
    told: EndSignals
    drain_s: Callable[[], float]

    async def until_told(self) -> None:
        """Wait for a signal; then drain until the jobs have ended, the time is up, or a second signal comes."""
        await self.told.first.wait()
        self.supervisor.drain()
        within_s = self.drain_s()
        log.info("daemon.draining", signal=self.told.name, drain_s=within_s)
        self.heart.stop_within(within_s + TEARDOWN_S)
        await self.notifier.stopping(f"draining for at most {within_s:g} s")
        with trio.move_on_after(within_s) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._until_second, nursery.cancel_scope, name="second signal")
                had_jobs = not self.supervisor.is_idle
                await self.supervisor.wait_idle()
                # Results end with the process. Whoever waited for one has a moment to fetch it.
                await trio.sleep(LINGER_S if had_jobs else 0)
                nursery.cancel_scope.cancel("every job has ended")
        if scope.cancelled_caught:
            log.warning("daemon.killed", reason=f"the {within_s:g} s of the drain are over")

    async def _until_second(self, scope: trio.CancelScope) -> None:
        await self.told.second.wait()
        log.warning("daemon.killed", reason="a second signal")
        scope.cancel("a second signal")
