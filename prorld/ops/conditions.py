"""The conditions that a daemon knows, and how each is found in its parts. It only reads them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.domain.outcome import STAGES
from prorld.handlers.registry import Registry
from prorld.inference.policies import Policies
from prorld.inference.policy_book import PolicyBook
from prorld.inference.pool import BackendPool
from prorld.kit.loop_lag import LoopLag
from prorld.ops.health import Check, Health, Kind, Trouble
from prorld.rollout.audit import Auditor
from prorld.rollout.batches.breakers import Breakers
from prorld.rollout.compat.service import CompatService
from prorld.rollout.supervisor import Supervisor
from prorld.sandbox.warden_client import Warden
from prorld.store.journal import Journal
from prorld.store.retention import Retention

__all__ = ["KINDS", "Disk", "Parts", "checks", "watch"]

log: FilteringBoundLogger = structlog.get_logger("prorld.ops")

# Above it every job feels the loop; see what orchestration costs in the documents on operations.
LOOP_LAG_P99_S = 0.1
RESULTS_SHARE = 0.9
DISK_LOW_BYTES = 2 << 30
DISK_FULL_BYTES = 128 << 20
LOOK_EVERY_S = 5.0
DISK_ANSWERS_WITHIN_S = 5.0
ENGINES_NAMED_MAX = 4

KINDS = (
    Kind(code="draining", severity="error"),
    Kind(code="policy_paused", severity="error"),
    Kind(code="no_backend", severity="error"),
    Kind(code="policy_unused", severity="warning"),
    Kind(code="engine_quarantined", severity="warning"),
    Kind(code="no_handlers", severity="error"),
    Kind(code="handlers_broken", severity="warning"),
    # A warden that died is replaced within a second; jobs that met the gap try again.
    Kind(code="warden_down", severity="error", visible_after_s=3.0),
    Kind(code="no_sandbox", severity="error", depends_on=("warden_down",)),
    Kind(code="stage_paused", severity="error"),
    Kind(code="journal_failing", severity="error"),
    Kind(code="disk_full", severity="error"),
    Kind(code="disk_low", severity="warning", depends_on=("disk_full",)),
    Kind(code="results_full", severity="warning"),
    Kind(code="loop_lag", severity="warning", visible_after_s=30.0),
    Kind(code="logprob_drift", severity="warning"),
    Kind(code="breaker_open", severity="warning"),
    Kind(code="runs_as_root", severity="warning"),
    Kind(code="compat_open", severity="warning"),
)


class Disk:
    """Free bytes where the state directory is, as last asked; ``None`` before the first answer, and where none came."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.free_bytes: int | None = None

    async def look(self) -> None:
        """Ask the file system, in a thread: one that hangs must not stop the loop."""
        seen: os.statvfs_result | None = None
        with suppress(OSError), trio.move_on_after(DISK_ANSWERS_WITHIN_S):
            seen = await trio.to_thread.run_sync(os.statvfs, self.directory, abandon_on_cancel=True)
        self.free_bytes = None if seen is None else seen.f_bavail * seen.f_frsize


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What is looked at.

    ``no_sandbox`` is why none could be made at start; ``engines`` are those of the configuration, as (policy, URL);
    ``open_at`` is the address at which other machines reach the listener that asks for no token.
    """

    supervisor: Supervisor
    auditor: Auditor
    pool: BackendPool
    policies: Policies
    book: PolicyBook
    registry: Registry
    warden: Warden
    lag: LoopLag
    disk: Disk
    breakers: Breakers
    journal: Journal | None = None
    retention: Retention | None = None
    no_sandbox: str | None = None
    engines: Sequence[tuple[str, str]] = ()
    is_root: bool = False
    compat: CompatService | None = None
    open_at: str | None = None


def checks(parts: Parts) -> list[Check]:
    """One check for each kind."""
    looks: dict[str, Callable[[Parts], Sequence[Trouble]]] = {
        "draining": _draining,
        "policy_paused": _policy_paused,
        "no_backend": _no_backend,
        "policy_unused": _policy_unused,
        "engine_quarantined": _engine_quarantined,
        "no_handlers": _no_handlers,
        "handlers_broken": _handlers_broken,
        "warden_down": _warden_down,
        "no_sandbox": _no_sandbox,
        "stage_paused": _stage_paused,
        "journal_failing": _journal_failing,
        "disk_full": _disk_full,
        "disk_low": _disk_low,
        "results_full": _results_full,
        "loop_lag": _loop_lag,
        "logprob_drift": _logprob_drift,
        "breaker_open": _breaker_open,
        "runs_as_root": _runs_as_root,
        "compat_open": _compat_open,
    }
    return [Check(kind, _bound(looks[kind.code], parts)) for kind in KINDS]


def _bound(look: Callable[[Parts], Sequence[Trouble]], parts: Parts) -> Callable[[], Sequence[Trouble]]:
    return lambda: look(parts)


async def watch(health: Health, disk: Disk) -> None:
    """Look now and then, so that what is broken is noticed, timed and logged also while nobody asks."""
    while True:
        await disk.look()
        health.conditions()
        await trio.sleep(LOOK_EVERY_S)


def _draining(parts: Parts) -> list[Trouble]:
    if not parts.supervisor.draining:
        return []
    return [Trouble("no new jobs are taken", "wait for the daemon to end and start it again")]


def _policy_paused(parts: Parts) -> list[Trouble]:
    return [
        Trouble(
            f"policy {name} is paused by {pause.holder} since {pause.since}",
            f"its holder resumes it, or an admin: `prorld policies resume {name}`",
            name,
        )
        for name, pause in parts.book.paused()
    ]


def _engine_quarantined(parts: Parts) -> list[Trouble]:
    found = parts.book.quarantined()
    more = len(found) - ENGINES_NAMED_MAX
    shown = [_kept_out(parts, *engine) for engine in found[:ENGINES_NAMED_MAX]]
    return shown + ([Trouble(f"and {more} more engines are kept out", "see GET /v1/backends")] if more > 0 else [])


def _kept_out(parts: Parts, policy: str, backend_id: str, words: str) -> Trouble:
    version = parts.book.gate(policy).version.version
    bring = f"prorld policies update {policy} --version {version} --how none --backend {backend_id}"
    cure = f"if its weights are those of version {version}: `{bring}`; else with --path, or remove it"
    return Trouble(f"engine {backend_id} of policy {policy} is kept out: {words}", cure, policy)


def _no_backend(parts: Parts) -> list[Trouble]:
    return [
        _no_engine(parts, name)
        for name in parts.policies.names()
        if not parts.pool.has_engine(name) and not _is_unused(parts, name) and not _awaits_address(parts, name)
    ]


def _policy_unused(parts: Parts) -> list[Trouble]:
    return [
        Trouble(f"policy {name} has never had an engine", "register one with `prorld backends add`", name)
        for name in parts.policies.names()
        if _is_unused(parts, name) and not _awaits_address(parts, name)
    ]


def _awaits_address(parts: Parts, policy: str) -> bool:
    """Its engines are named by a trainer that has named none now, as between two steps; jobs know to wait."""
    return parts.compat is not None and policy == parts.compat.policy and not parts.compat.has_engines


def _is_unused(parts: Parts, policy: str) -> bool:
    """Made while the daemon ran, by somebody who has given it no engine yet: no reason to turn others away."""
    configured = policy == "default" or any(name == policy for name, _ in parts.engines)
    return not configured and parts.pool.list(policy).generation == 0


def _no_engine(parts: Parts, policy: str) -> Trouble:
    words = f"policy {policy} has no engine that is up"
    configured = [url for name, url in parts.engines if name == policy]
    if configured:
        why = "start it, or see why it is not taken: backend.absent in the daemon's log, or `prorld doctor`"
        return Trouble(f"{words}; the configuration names {_named(configured)}", why, policy)
    gone = [f"{item.backend_id} at {item.url}" for item in parts.pool.list(policy).items if item.state == "down"]
    if gone:
        cure = "start it there again, or `prorld backends remove` it and `prorld backends add` one that runs"
        return Trouble(f"{words}; it does not answer: {_named(gone)}", cure, policy)
    return Trouble(words, "start one with `prorld engine start`, or `prorld backends add` one that runs", policy)


def _named(engines: Sequence[str]) -> str:
    more = f" and {len(engines) - ENGINES_NAMED_MAX} more" if len(engines) > ENGINES_NAMED_MAX else ""
    return ", ".join(engines[:ENGINES_NAMED_MAX]) + more


def _no_handlers(parts: Parts) -> list[Trouble]:
    if any(entry.error is None for entry in parts.registry.entries()):
        return []
    return [Trouble("no handler is installed", "install a plugin, e.g. prorld-math")]


def _handlers_broken(parts: Parts) -> list[Trouble]:
    cure = "`prorld handlers` says why; repair or remove the package, then restart"
    return [
        Trouble(f"the handler {entry.name} could not be loaded", cure)
        for entry in parts.registry.entries()
        if entry.error is not None
    ]


def _warden_down(parts: Parts) -> list[Trouble]:
    if parts.warden.is_up:
        return []
    words = f"the process that makes sandboxes is being started again ({parts.warden.restarts_total} times so far)"
    return [Trouble(words, "wait; if it stays so, the log says why it dies")]


def _no_sandbox(parts: Parts) -> list[Trouble]:
    return [] if parts.no_sandbox is None else [Trouble("sandboxes can't be made", parts.no_sandbox)]


def _stage_paused(parts: Parts) -> list[Trouble]:
    stages = parts.supervisor.stages()
    return [
        Trouble(f"the {stage} stage is paused", f'PATCH /v1/stages {{"{stage}": {{"workers": N}}}}')
        for stage in STAGES
        if getattr(stages, stage).workers == 0
    ]


def _journal_failing(parts: Parts) -> list[Trouble]:
    journal = parts.journal
    if journal is None:
        return []
    if journal.trouble is not None:
        kept = "nothing is accepted; results of accepted jobs are kept in memory until the disk takes them"
        cure = f"free space or repair the disk of {journal.path.parent}; it is tried again by itself. Do not restart"
        return [Trouble(f"{journal.trouble}; {kept}", cure)]
    if journal.scarce is not None:
        return [Trouble(journal.scarce, "free some, or let retention keep less ([retention])")]
    return []


def _disk_full(parts: Parts) -> list[Trouble]:
    return _disk(parts.disk, DISK_FULL_BYTES)


def _disk_low(parts: Parts) -> list[Trouble]:
    return _disk(parts.disk, DISK_LOW_BYTES)


def _disk(disk: Disk, wanted: int) -> list[Trouble]:
    if disk.free_bytes is None or disk.free_bytes >= wanted:
        return []
    words = (
        f"{disk.free_bytes / (1 << 20):.0f} MiB are free in {disk.directory}, and {wanted / (1 << 20):.0f} are wanted"
    )
    return [Trouble(words, "free some, or move the state directory")]


def _results_full(parts: Parts) -> list[Trouble]:
    share = 0.0 if parts.retention is None else parts.retention.share
    if share < RESULTS_SHARE:
        return []
    words = f"{share:.0%} of what may be kept of ended jobs is used, and the oldest are forgotten"
    return [Trouble(words, "fetch results sooner, or raise retention.bytes_max and retention.count_max")]


def _loop_lag(parts: Parts) -> list[Trouble]:
    seen = parts.lag.quantiles()
    if seen.p99_s < LOOP_LAG_P99_S:
        return []
    words = f"the event loop runs one task in a hundred {seen.p99_s * 1000:.0f} ms late"
    return [Trouble(words, "fewer jobs at once, a daemon more, or a handler that blocks: `kill -QUIT` shows where")]


def _logprob_drift(parts: Parts) -> list[Trouble]:
    seen = parts.auditor.drifts()
    if not seen:
        return []
    last, times = seen[-1], "" if len(seen) == 1 else f" (and {len(seen) - 1} more)"
    cure = f"look at `prorld verify {last.job_id}`, leave the job out of training, and clear or drain the engine"
    return [Trouble(f"an audit of job {last.job_id} did not pass{times}: {last.words}", cure)]


def _breaker_open(parts: Parts) -> list[Trouble]:
    cure = "look at the attempts of its last jobs; it tries a few by itself now and then"
    return [
        Trouble(f"training of {key.handler} on policy {key.policy!r} by {key.tenant!r} keeps failing: {words}", cure)
        for key, words in parts.breakers.open_ones()
    ][:ENGINES_NAMED_MAX]


def _runs_as_root(parts: Parts) -> list[Trouble]:
    if not parts.is_root:
        return []
    return [Trouble("the daemon runs as root", "start it as a user of its own; nothing in it needs root")]


def _compat_open(parts: Parts) -> list[Trouble]:
    if parts.open_at is None:
        return []
    words = f"whoever reaches {parts.open_at} runs jobs and names engines there, without a token"
    return [Trouble(words, "let only the trainer's network reach it, or bind it to a loopback address")]
