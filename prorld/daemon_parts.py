"""The parts of the daemon in three groups: what samples, what makes sandboxes, what runs jobs.

Each group is built from the configuration in one place; the composition root puts them together and takes them down.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.config import Config, Loaded
from prorld.domain.admission import AdmissionRules
from prorld.domain.breaker import BreakerRules
from prorld.domain.scoring import Tolerance
from prorld.errors import SandboxError
from prorld.handlers.registry import Registry
from prorld.inference.kept_engines import KeptEngines
from prorld.inference.policies import Policies, PolicySource
from prorld.inference.policy_book import PolicyBook
from prorld.inference.policy_control import PolicyControl
from prorld.inference.policy_views import source_of
from prorld.inference.pool import BackendPool
from prorld.inference.pool_entry import EngineRules
from prorld.inference.registry import backend_factories, read_engine_keys
from prorld.inference.rescoring import Scorer
from prorld.kit.lanes import Lane
from prorld.metrics import Metrics
from prorld.ops.users import sandbox_user
from prorld.ops.walls import image_store, places_of, wall_of
from prorld.rollout.audit import Auditor
from prorld.rollout.batches.breakers import Breakers
from prorld.rollout.batches.make import make_batches
from prorld.rollout.batches.service import Batches
from prorld.rollout.batches.settings import BatchSettings
from prorld.rollout.clock import SystemClock
from prorld.rollout.compat.engines import CompatEngines
from prorld.rollout.compat.nemo_gym import GymService
from prorld.rollout.compat.service import CompatService
from prorld.rollout.life import World
from prorld.rollout.looks import Looks
from prorld.rollout.supervisor import Supervisor, SupervisorLimits
from prorld.sandbox import reaper
from prorld.sandbox.cgroups import Subtree, find_delegation, reap_cgroups
from prorld.sandbox.contract import SandboxRuntime
from prorld.sandbox.images.contract import Images
from prorld.sandbox.kinds import KINDS
from prorld.sandbox.probe import check_wall
from prorld.sandbox.registry import SandboxHost, run_runtime, runtime_factory
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.wall import Enclosing, Wall
from prorld.sandbox.warden_client import Warden, run_warden
from prorld.sandbox.warm import WarmRuntime
from prorld.sandbox.warm_plan import WarmRules
from prorld.store.compat_file import CompatFile
from prorld.store.engine_file import EngineFile
from prorld.store.journal import Journal
from prorld.store.places import remote_kind
from prorld.store.policy_file import PolicyFile
from prorld.store.reader import Reader
from prorld.store.retention import Keep, Retention

__all__ = [
    "DEFAULT_POLICY",
    "Compat",
    "Rollouts",
    "Sampling",
    "Sandboxes",
    "Stored",
    "make_compat",
    "make_rollouts",
    "scratch_dir",
    "start_sampling",
    "start_sandboxes",
    "start_store",
]

log: FilteringBoundLogger = structlog.get_logger("prorld.daemon")

DEFAULT_POLICY = "default"


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What is on the disk of jobs and batches: who writes it, who reads it, who forgets it."""

    journal: Journal
    reader: Reader
    retention: Retention


async def start_store(loaded: Loaded, core: trio.Nursery, metrics: Metrics, clock: SystemClock) -> Stored:
    """Open the journal and start its writer. Nothing is forgotten before ``retention.run`` is started."""
    bounds = loaded.config.retention
    kind = remote_kind(loaded.state_dir)
    if kind is not None:
        log.warning(
            "journal.remote", kind=kind, state_dir=str(loaded.state_dir), cure="a state directory on a local disk"
        )
    journal = Journal(loaded.state_dir, metrics=metrics, reserve_bytes=bounds.reserve_bytes)
    with trio.fail_after(loaded.config.timeouts.boot_s):
        await journal.open()
        await core.start(journal.run, name="journal")
        reader = Reader(journal.path)
        await reader.open()
    keep = Keep(age_s=bounds.age_s, count_max=bounds.count_max, bytes_max=bounds.bytes_max)
    return Stored(journal=journal, reader=reader, retention=Retention(journal, reader, keep, wall=clock.wall))


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What samples: the engines, and the policies that they serve."""

    pool: BackendPool
    policies: Policies
    book: PolicyBook
    control: PolicyControl
    engines: KeptEngines


async def start_sampling(
    loaded: Loaded, core: trio.Nursery, lane: Lane, metrics: Metrics, clock: SystemClock, boot_id: str
) -> Sampling:
    """Start the pool, and what changes policies; no engine is asked yet."""
    config = loaded.config
    keys = read_engine_keys(config.engine_keys, os.environ)
    policies = Policies(_policy_sources(config), lane)
    pool = BackendPool(backend_factories(keys=keys), metrics, rules=_engine_rules(config), boot_id=boot_id)
    kept = PolicyFile(loaded.state_dir)
    book = PolicyBook(pool, policies, kept, metrics, clock.wall, states=kept.load(), load_s=config.timeouts.load_s)
    control = PolicyControl(book)
    named = EngineFile(loaded.state_dir)
    engines = KeptEngines(pool, named)
    engines.restore(named.load(), configured=[(entry.policy, entry.url) for entry in config.backends])
    with trio.fail_after(config.timeouts.boot_s):
        await core.start(pool.run, name="pool")
        await core.start(control.run, name="policies")
        await core.start(engines.run, name="kept engines")
    return Sampling(pool=pool, policies=policies, book=book, control=control, engines=engines)


@dataclass(frozen=True, kw_only=True)
class Sandboxes:
    """What makes sandboxes. ``lacking`` is why none can be made; with ``cgroups`` each has one of its own."""

    warden: Warden
    runtime: WarmRuntime
    lacking: str | None
    is_root: bool
    cgroups: bool


async def start_sandboxes(
    loaded: Loaded, core: trio.Nursery, lane: Lane, metrics: Metrics, boot_id: str, hide: Sequence[str]
) -> Sandboxes:
    """Start the warden, clear away what an earlier life left, and make the runtime; nothing is kept warm yet."""
    config = loaded.config
    user = sandbox_user(config.sandbox.user)
    if user is not None:
        log.warning("daemon.root", sandboxes_run_as=config.sandbox.user, uid=user[0])
    with trio.fail_after(config.timeouts.boot_s):
        scratch, images = scratch_dir(loaded), image_store(loaded)
        await images.prepare()
        places = places_of(config, config.sandbox.runtime, images)
        cgroups = await lane.run(_open_cgroups, boot_id, user)
        warden = await core.start(
            partial(run_warden, user=user, exposed=[str(reaper.make_base(scratch)), *places]), name="warden"
        )
        wall = wall_of(config.sandbox, config.sandbox.runtime, hide) if config.sandbox.runtime in KINDS else None
        lacking = None
        if wall is not None:
            image = config.sandbox.image
            lacking = await check_wall(wall, user=user, image=image, images=images, exposed=places)
    host = SandboxHost(runtime_dir=scratch, boot_id=boot_id, user=user)
    await _reap(host, lane, wall)
    runtime = await _runtime(config, core, warden, host, images, wall, cgroups)
    # Where none can be made, none is tried in advance: the jobs say why.
    rules = WarmRules(total=0) if lacking else msgspec.convert(config.warm, WarmRules, from_attributes=True)
    warm = WarmRuntime(runtime, rules, boot_id=boot_id, starts_max=config.sandbox.starts_max, metrics=metrics)
    return Sandboxes(
        warden=warden,
        runtime=warm,
        lacking=lacking,
        is_root=user is not None,
        # docker's containers have those that it makes itself, and a plugin's runtime is not ours to know
        cgroups=cgroups is not None and wall is not None and not isinstance(wall, Enclosing),
    )


def _open_cgroups(boot_id: str, user: tuple[int, int] | None) -> Subtree | None:
    """Before the warden is started, so that it comes along; the daemon goes on without where nothing is delegated."""
    found = find_delegation()
    if found.place is None or found.lacking is not None:
        return None
    reap_cgroups(found.place)
    owner = user or (os.getuid(), os.getgid())
    cgroups = Subtree(found.place, boot_id, user=owner, controllers=found.controllers)
    try:
        cgroups.open()
    except OSError as exc:
        log.warning("daemon.undelegated", place=str(found.place), error=str(exc))
        return None
    return cgroups


async def _reap(host: SandboxHost, lane: Lane, wall: Wall | None) -> None:
    reaped = await lane.run(partial(reaper.reap, host.runtime_dir, boot_id=host.boot_id))
    containers = await _reap_enclosures(wall, host)
    if reaped.sandboxes or containers:
        found = msgspec.structs.asdict(reaped)
        log.warning("daemon.reaped", **found, containers=containers)


async def _reap_enclosures(wall: Wall | None, host: SandboxHost) -> int:
    if wall is None or not isinstance(wall, Enclosing):
        return 0
    try:
        return await wall.reap(host.runtime_dir, boot_id=host.boot_id)
    except SandboxError:  # what does not answer is told as what is lacking
        return 0


async def _runtime(
    config: Config,
    core: trio.Nursery,
    warden: Warden,
    host: SandboxHost,
    images: Images,
    wall: Wall | None,
    cgroups: Subtree | None,
) -> SandboxRuntime:
    if wall is not None:
        return Runtime(
            wall, warden, runtime_dir=host.runtime_dir, boot_id=host.boot_id, images=images,
            default_image=config.sandbox.image, cgroups=cgroups,
        )  # fmt: skip
    factory = runtime_factory(config.sandbox.runtime)
    with trio.fail_after(config.timeouts.boot_s):
        runtime: SandboxRuntime = await core.start(partial(run_runtime, factory, host), name="sandbox runtime")
    return runtime


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """What runs jobs and batches of them, and looks at them again when they have ended."""

    supervisor: Supervisor
    batches: Batches
    looks: Looks
    auditor: Auditor

    async def start(self, jobs: trio.Nursery) -> None:
        """Let them live in this nursery."""
        # Batches know their jobs before the first of those goes on.
        await self.batches.floor.restore()
        await jobs.start(self.supervisor.run, name="supervisor")
        await jobs.start(self.batches.floor.run, name="batches")
        await jobs.start(self.looks.run, name="reevaluator")
        await jobs.start(partial(self.auditor.run, self.looks, self.supervisor.feed), name="auditor")


def make_rollouts(config: Config, world: World, registry: Registry, sampling: Sampling, stored: Stored) -> Rollouts:
    """The parts that run jobs; ``start`` starts them."""
    auditor = Auditor(share=config.audit.share, metrics=world.metrics)
    supervisor = Supervisor(
        world, registry, policies=sampling.policies.names(), limits=_limits(config), reader=stored.reader
    )
    supervisor.listen(auditor.ended)
    stored.retention.listen(lambda gone: supervisor.forget((job.tenant, job.job_id) for job in gone))
    sampling.control.tell = supervisor.feed.of_daemon
    looks = Looks(world, supervisor, registry, Scorer(sampling.pool, sampling.book.gate), tolerance=_tolerance(config))
    batches = make_batches(
        world, supervisor, registry, sampling.book, stored.reader,
        settings=_batch_settings(config),
        breakers=Breakers(msgspec.convert(config.breaker, BreakerRules, from_attributes=True)),
    )  # fmt: skip
    sampling.book.pins = batches.floor
    supervisor.begin_only_if(batches.floor.room.breakers.must_begin)
    return Rollouts(supervisor=supervisor, batches=batches, looks=looks, auditor=auditor)


@dataclass(frozen=True, kw_only=True)
class Compat:
    """What trainers of other servers ask."""

    service: CompatService
    gym: GymService


def make_compat(loaded: Loaded, rollouts: Rollouts, sampling: Sampling, registry: Registry) -> Compat | None:
    """Its parts, where it is configured; ``service.run`` starts them."""
    settings = loaded.config.compat
    if settings.bind is None:
        return None
    policy = settings.policy
    engines = CompatEngines(
        sampling.pool, sampling.policies, policy,
        own_source=lambda: source_of(sampling.book.of(policy).settings), allowed=settings.engine_hosts,
    )  # fmt: skip
    service = CompatService(
        rollouts.supervisor, engines, CompatFile(loaded.state_dir),
        handlers=registry, policy=policy, total_s=settings.timeout_s,
        expects=any(entry.policy == policy for entry in loaded.config.backends)
        or (loaded.config.embedded_engine and policy == DEFAULT_POLICY),
    )  # fmt: skip
    return Compat(service=service, gym=GymService(rollouts.supervisor, service, total_s=settings.timeout_s))


# --- from configuration -----------------------------------------------------------------------------------------------


def _engine_rules(config: Config) -> EngineRules:
    return EngineRules(
        admission=msgspec.convert(config.admission, AdmissionRules, from_attributes=True),
        stall_s=config.timeouts.engine_stall_s,
        call_s=math.inf if config.timeouts.engine_call_s is None else config.timeouts.engine_call_s,
    )


def _batch_settings(config: Config) -> BatchSettings:
    bounds = msgspec.structs.asdict(config.batches)
    return BatchSettings(**bounds, forget_after_s=config.retention.age_s, jobs_max=config.limits.jobs_max)


def _policy_sources(config: Config) -> dict[str, PolicySource]:
    sources = {
        name: PolicySource(
            tokenizer=entry.tokenizer,
            renderer=entry.renderer,
            chat_template_kwargs=entry.chat_template_kwargs,
            max_staleness=entry.max_staleness,
        )
        for name, entry in config.policies.items()
    }
    named = {DEFAULT_POLICY, *(entry.policy for entry in config.backends)}
    made = {name: PolicySource() for name in sorted(named)} | sources
    compat = config.compat
    if compat.bind is not None and compat.policy not in made:
        # Trainers that know nothing of policies mean the one model there is: its tokens are made as those of default.
        made[compat.policy] = made[DEFAULT_POLICY]
    return made


def _tolerance(config: Config) -> Tolerance:
    allowed = config.verification
    return Tolerance(mean=allowed.tolerance_mean, max=allowed.tolerance_max, varying=allowed.tolerance_mean_varying)


def scratch_dir(loaded: Loaded) -> Path:
    """Where sandboxes have their directories."""
    chosen = loaded.config.sandbox.scratch_dir
    return loaded.state_dir if chosen is None else Path(chosen)


def _limits(config: Config) -> SupervisorLimits:
    return SupervisorLimits(
        jobs_max=config.limits.jobs_max,
        accepted_bytes_max=config.limits.accepted_bytes_max,
        mailbox_size=config.limits.mailbox_size,
        results_max_count=config.limits.results_count_max,
        results_max_bytes=config.limits.results_bytes_max,
    )
