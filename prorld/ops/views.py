"""What operators see of a running daemon, put together from its parts.

It only reads, and no part learns of another through it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import msgspec
import trio

from prorld import __version__
from prorld.domain.outcome import STAGES
from prorld.handlers.registry import Registry
from prorld.inference.policy_book import PolicyBook
from prorld.inference.pool import BackendPool
from prorld.kit.loop_lag import LoopLag
from prorld.metrics import Metrics
from prorld.ops.health import Health
from prorld.rollout.batches.service import Batches
from prorld.rollout.supervisor import Supervisor
from prorld.sandbox.contract import SandboxRuntime
from prorld.wire.ops import HandlerList, LoopLagStatus, Ready, SandboxList, SandboxRow, Status

__all__ = ["Views"]


@dataclass(frozen=True, kw_only=True)
class Views:
    """The parts that are looked at."""

    boot_id: str
    supervisor: Supervisor
    batches: Batches
    pool: BackendPool
    registry: Registry
    runtime: SandboxRuntime
    book: PolicyBook
    metrics: Metrics
    lag: LoopLag
    health: Health
    cgroups: bool = False
    started: float = field(default_factory=trio.current_time)

    def handlers(self) -> HandlerList:
        """``GET /v1/handlers``."""
        return HandlerList(items=[entry.info() for entry in self.registry.entries()])

    def sandboxes(self) -> SandboxList:
        """``GET /v1/sandboxes``."""
        rows = [msgspec.convert(msgspec.to_builtins(info), SandboxRow) for info in self.runtime.list()]
        return SandboxList(items=rows)

    def ready(self) -> Ready:
        """``GET /readyz``."""
        missing = [condition for condition in self.health.conditions() if condition.severity == "error"]
        return Ready(ready=not missing, missing=missing)

    def status(self) -> Status:
        """``GET /v1/status``."""
        seen, sandboxes = self.lag.quantiles(), self.runtime.list()
        return Status(
            version=__version__,
            boot_id=self.boot_id,
            pid=os.getpid(),
            uptime_s=round(trio.current_time() - self.started, 3),
            draining=self.supervisor.draining,
            jobs=self.supervisor.counts(),
            outcomes=self.supervisor.outcomes(),
            batches=self.batches.running_counts(),
            stages=self.supervisor.stages(),
            backends=self.pool.list().items,
            sandboxes=len(sandboxes),
            sandboxes_warm=sum(not one.job_id for one in sandboxes),
            cgroups=self.cgroups,
            loop_lag_s=LoopLagStatus(p50=seen.p50_s, p99=seen.p99_s),
            conditions=self.health.conditions(),
        )

    def metrics_page(self) -> bytes:
        """``GET /metrics``; gauges are read when they are asked for."""
        stages = self.supervisor.stages()
        for stage in STAGES:
            gate = getattr(stages, stage)
            self.metrics.stage_seen(stage, workers=gate.workers, active=gate.active, waiting=gate.waiting)
        running = self.batches.running_counts()
        open_breakers = sum(1 for _ in self.batches.floor.room.breakers.open_ones())
        self.metrics.batches_seen(train=running["train"], evals=running["eval"], open_breakers=open_breakers)
        cut = self.book.cut_total()
        for policy, closed_s in self.book.closed_s().items():
            self.metrics.policy_seen(policy, closed_s=closed_s, cut=cut[policy])
        self.metrics.engines_seen(self.pool.samples())
        return self.metrics.page()
