"""The policies as a trainer sees them: looked at, made, paused, resumed, updated.

What may be done is decided by ``prorld.domain.policy``, the state is kept in ``policy_book``, what is done to engines
is in ``policy_change``. Changes run in tasks of their own: whoever asked may leave, the change goes on.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.domain.ids import is_client_id
from prorld.domain.policy import (
    Mode,
    Pause,
    PolicySettings,
    PolicyState,
    Resumed,
    Update,
    begin_pause,
    begin_update,
    changed,
    check_resume,
)
from prorld.errors import (
    BadRequest,
    Conflict,
    Impossible,
    NotFound,
    ProrldError,
    RendererError,
    TooMany,
    chain,
)
from prorld.inference.policy_book import Policy, PolicyBook
from prorld.inference.policy_change import Changes
from prorld.inference.policy_views import merged, policy_info, source_of, update_view
from prorld.inference.policy_work import Work, Workshop
from prorld.wire.policies import (
    PausedPolicy,
    PausePolicy,
    PolicyInfo,
    PolicyList,
    PolicyUpdate,
    PolicyUpdateList,
    PutPolicy,
    ResumedPolicy,
    ResumePolicy,
    UpdatePolicy,
)

__all__ = ["PolicyControl", "Tell"]

log: FilteringBoundLogger = structlog.get_logger()

T = TypeVar("T")

POLICIES_MAX = 256

Tell = Callable[..., None]


class PolicyControl:
    """The policies of a book, to be looked at and changed. ``run`` is the task in which their weights are changed."""

    def __init__(self, book: PolicyBook, *, tell: Tell | None = None) -> None:
        """``tell`` gets the name and the facts of every event."""
        self.tell = tell
        self._book = book
        self._workshop = Workshop()
        self._putting = trio.Lock()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Change weights when asked, until cancelled. What is in progress then has failed for the next life."""
        await self._workshop.run(task_status=task_status)

    # --- what is read -------------------------------------------------------------------------------------------------

    def list(self, tenant: str | None) -> PolicyList:
        """All policies; they are nobody's alone."""
        return PolicyList(items=[self._info(policy, tenant) for policy in self._book])

    def get(self, name: str, tenant: str | None) -> PolicyInfo:
        """One policy; ``NotFound``."""
        return self._info(self._book.of(name), tenant)

    def _info(self, policy: Policy, tenant: str | None) -> PolicyInfo:
        entries = self._book.entries(policy.state.name)
        return policy_info(policy.state, policy.settings, entries, tenant, closed_s=policy.gate.closed_s)

    def updates(self, name: str) -> PolicyUpdateList:
        """The updates that are remembered, newest first."""
        return PolicyUpdateList(
            items=[update_view(name, update) for update in reversed(self._book.of(name).state.updates)]
        )

    def get_update(self, name: str, update_id: str) -> PolicyUpdate:
        """One of them; ``NotFound``."""
        for update in self._book.of(name).state.updates:
            if update.update_id == update_id:
                return update_view(name, update)
        raise NotFound(f"policy {name!r} has no update {update_id!r}", code="unknown_update")

    async def wait_update(self, name: str, update_id: str) -> PolicyUpdate:
        """One of them once it has ended. The caller's scope bounds the wait."""
        policy = self._book.of(name)
        await trio.lowlevel.checkpoint()
        while (found := self.get_update(name, update_id)).state == "running":
            await policy.news.wait()
        return found

    # --- what is changed ----------------------------------------------------------------------------------------------

    async def put(self, name: str, request: PutPolicy, tenant: str | None) -> tuple[PolicyInfo, bool]:
        """Make or change a policy; the flag says whether it is new."""
        if not is_client_id(name):
            raise BadRequest(
                f"{name[:64]!r} can't be the name of a policy", code="invalid_field", details={"path": "policy"}
            )
        # One at a time: what is left out stays as whoever came first has made it.
        async with self._putting:
            known = self._book.of(name) if name in self._book else None
            if known is None and len(self._book) >= POLICIES_MAX:
                raise TooMany(f"there are {POLICIES_MAX} policies already")
            if known is None and request.pause_id is not None:
                raise Conflict(f"policy {name!r} is not paused", code="not_paused")
            settings = merged(PolicySettings() if known is None else known.settings, request)
            try:
                await self._book.policies.check(source_of(settings))
            except RendererError as exc:
                raise Impossible(chain(exc), code=exc.stable_code) from exc
            work = self._workshop.start(partial(self._put, name, settings, request.pause_id), "policy put")
            is_new = await work.outcome()
        return self.get(name, tenant), is_new

    async def _put(self, name: str, settings: PolicySettings, pause_id: str | None, work: Work[bool]) -> bool:
        book = self._book
        is_new = name not in book
        if not is_new:
            book.of(name).must_be_idle()
            after = changed(book.of(name).state, settings, pause_id)
        else:
            after = PolicyState(name=name, settings=settings)
            book.policies.put(name, source_of(settings))
            book.open(name)
        policy = book.of(name)
        before = policy.state
        policy.busy_with = "changed"
        try:
            await book.write(policy, after)
        except ProrldError:
            if is_new:
                book.forget(name)
            raise
        finally:
            policy.busy_with = None
        book.policies.put(name, source_of(settings))
        policy.gate.max_staleness = settings.max_staleness
        log.info("policy.changed", policy=name, is_new=is_new, differs=before.settings != settings)
        return is_new

    async def pause(self, name: str, request: PausePolicy, tenant: str) -> PausedPolicy:
        """Close the gate and pause the engines. Told when that is done; it goes on if the asker leaves."""
        policy = self._book.of(name)
        if request.release:
            raise Impossible(
                "engines can't give memory back through this daemon; put them to sleep yourself while it is paused",
                code="release_unsupported",
                details={"path": "release"},
            )
        held = policy.state.pause
        is_repeat = held is not None and held.pause_id == request.pause_id
        if is_repeat and policy.pausing is not None and policy.pausing[0] == request.pause_id:
            return await policy.pausing[1].outcome()
        policy.must_be_idle()
        # After a restart nobody remembers what the engines said, nor whether all of them were asked.
        new = self._new_pause(request.mode, tenant, request.pause_id)
        begun = policy.state if is_repeat else begin_pause(policy.state, new)
        work: Work[PausedPolicy] = self._start(policy, "paused", partial(self._changes(policy).pause, begun, request))
        policy.pausing = (begun.pause.pause_id if begun.pause else "", work)
        return await work.outcome()

    async def resume(self, name: str, request: ResumePolicy) -> ResumedPolicy:
        """Label the engines, read that back, let them go on, open the gate."""
        policy = self._book.of(name)
        policy.must_be_idle()
        decided = check_resume(policy.state, request.pause_id, request.version, rollback=request.rollback)
        if isinstance(decided, Resumed):
            return ResumedPolicy(
                policy=name, version=decided.version, epoch=policy.state.version.epoch, backends=[*decided.backends]
            )
        if decided != policy.state.version:
            self._book.must_be_unpinned(name)
        work: Work[ResumedPolicy] = self._start(policy, "resumed", partial(self._changes(policy).resume, decided))
        return await work.outcome()

    async def update(self, name: str, request: UpdatePolicy, tenant: str) -> PolicyUpdate:
        """Begin an update, or find the one that the same body began before. Told when it is written down."""
        policy = self._book.of(name)
        entries = {entry.backend_id: entry for entry in self._book.entries(name)}
        only = None if request.backends is None else tuple(sorted(set(request.backends)))
        asked = Update(
            update_id=f"u-{secrets.token_hex(6)}", version=request.version, epoch=policy.state.version.epoch,
            how=request.how, path=request.path, mode=request.mode, only=only, rollback=request.rollback,
            holder=tenant, created_at=self._book.wall(),
        )  # fmt: skip
        behind = frozenset(entry.backend_id for entry in entries.values() if entry.quarantine is not None)
        decided = begin_update(policy.state, asked, request.pause_id, behind=behind)
        if isinstance(decided, Update):
            return update_view(name, decided)
        policy.must_be_idle()
        strange = [named for named in only or () if named not in entries]
        if strange:
            words = f"policy {name!r} has no engine {', '.join(strange[:8])}"
            raise Impossible(words, code="unknown_backend", details={"path": "backends"})
        begun = decided.running
        if begun is not None and begun.target != policy.state.version and self._book.pinned(name):
            await self._wait_unpinned(name, request.wait_pins_s, tenant)
            # Much may have changed meanwhile.
            return await self.update(name, msgspec.structs.replace(request, wait_pins_s=0.0), tenant)
        pause = msgspec.structs.replace(self._new_pause(request.mode, tenant), of_update=True)
        work = self._start(policy, "updated", partial(self._changes(policy).update, decided, pause, request.timeout_s))
        await work.begun.wait()
        if work.error is not None:
            raise work.error
        return self.get_update(name, asked.update_id)

    async def _wait_unpinned(self, name: str, seconds: float, tenant: str) -> None:
        """``Conflict`` where somebody still wants the policy to stay as it is after so long."""
        assert self._book.pins is not None
        with trio.move_on_after(seconds):
            await self._book.pins.wait_unpinned(name)
        self._book.must_be_unpinned(name, tenant)

    def _start(self, policy: Policy, what: str, do: Callable[[Work[T]], Awaitable[T]]) -> Work[T]:
        """Do it in a task of its own; ``what`` is being done to the policy meanwhile."""
        self._workshop.must_be_open()
        policy.busy_with = what
        return self._workshop.start(do, f"policy {what}", policy.note_done)

    def _new_pause(self, mode: Mode, tenant: str, pause_id: str | None = None) -> Pause:
        return Pause(
            pause_id=pause_id or f"p-{secrets.token_hex(8)}", holder=tenant, mode=mode, since=self._book.wall()
        )

    def _changes(self, policy: Policy) -> Changes:
        book = self._book
        return Changes(
            name=policy.state.name, gate=policy.gate, engines=policy.engines, pool=book.pool,
            state=lambda: policy.state, keep=partial(book.write, policy), remember=partial(_remember, policy),
            wall=book.wall, metrics=book.metrics, say=self._say, beside=self._workshop.beside,
        )  # fmt: skip

    def _say(self, event: str, **facts: Any) -> None:
        log.info(event, **facts)
        if self.tell is not None:
            self.tell(event, **facts)


def _remember(policy: Policy, after: PolicyState) -> None:
    policy.state = after
