"""Sandboxes that are there before a job asks: a runtime around a runtime.

``run`` gives a job a warm sandbox of exactly its spec where one waits, and starts one where none does; how many start
at once is bounded for both. A sandbox serves one job and ends with it: no runtime can prove that one is as it was made.
``keep`` is the actor whose nursery the warm sandboxes live in, lent ones included; it makes, watches and ends them.
Every change of the state here is made without awaiting.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Literal

import msgspec
import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.errors import SandboxError, boundary, chain, leaves
from prorld.kit.cleanup import afterwards
from prorld.metrics import Metrics
from prorld.sandbox.admission import Admission, default_starts
from prorld.sandbox.contract import Adoptable, Sandbox, SandboxInfo, SandboxRuntime, SandboxSpec
from prorld.sandbox.warm_plan import Demand, WarmRules, allot, room

__all__ = ["WarmRuntime"]

log: FilteringBoundLogger = structlog.get_logger()

LOOK_EVERY_S = 1.0
START_S = 120.0
# Its first session may still be coming up when a sandbox is there.
FIRST_CHECK_S = 30.0
# That of a warm sandbox has this long to answer before a job gets it.
CHECK_S = 2.0
# A job tries so many warm ones before it starts one of its own.
TRIES = 3
# A runtime's own clean-up has deadlines; this is over their sum.
END_S = 30.0
# A warm sandbox is not ended for the sake of another spec before it has waited so long: many specs that take turns
# would else only make and end sandboxes.
STAYS_S = 10.0
# Specs whose demand is remembered.
SHELVES_MAX = 256


class _Slot:
    """One sandbox that was made in advance, from its start to its end."""

    def __init__(self, shelf: _Shelf, name: str) -> None:
        self.shelf = shelf
        self.name = name
        self.state: Literal["starting", "idle", "lent", "ending"] = "starting"
        self.scope = trio.CancelScope()
        self.gone = trio.Event()
        self.failure: SandboxError | None = None
        self.sandbox: Adoptable | None = None
        self.idle_since = 0.0

    def end(self, why: str) -> None:
        self.state = "ending"
        self.scope.cancel(why)


class _Shelf:
    """One spec: how much it is wanted, and what there is of it. ``idle`` has the longest waiting first."""

    def __init__(self, spec: SandboxSpec, demand: Demand) -> None:
        self.spec = spec
        self.demand = demand
        self.idle: deque[_Slot] = deque()
        self.starting: set[_Slot] = set()

    @property
    def count(self) -> int:
        return len(self.idle) + len(self.starting)


class _Relay:
    """Hears of a start on its way to whoever waits for it."""

    def __init__(self, came_up: Callable[[], None], task_status: trio.TaskStatus[Sandbox]) -> None:
        self._came_up = came_up
        self._task_status = task_status

    def started(self, value: Sandbox | None = None) -> None:
        assert value is not None
        self._came_up()
        self._task_status.started(value)


class WarmRuntime:
    """A ``SandboxRuntime`` that keeps some sandboxes of ``inner`` ready. Until ``keep`` runs, none is."""

    def __init__(
        self,
        inner: SandboxRuntime,
        rules: WarmRules | None = None,
        *,
        boot_id: str,
        starts_max: int | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.admission = Admission(default_starts() if starts_max is None else starts_max, self._show)
        self._inner = inner
        self._rules = rules or WarmRules()
        self._boot_id = boot_id
        self._metrics = metrics or Metrics()
        self._is_wanted: Callable[[], bool] = lambda: True
        self._shelves: OrderedDict[bytes, _Shelf] = OrderedDict()
        self._ids: set[str] = set()
        self._made = 0
        self._bytes_each = 0
        self._kept = False
        self._can_keep = True
        self._bell = trio.Event()

    @property
    def name(self) -> str:
        """The kind of what it keeps."""
        return self._inner.name

    @property
    def idle(self) -> int:
        """Warm sandboxes that wait for a job."""
        return sum(len(shelf.idle) for shelf in self._shelves.values())

    def list(self) -> tuple[SandboxInfo, ...]:
        """All that live; those that wait for a job have no job."""
        return self._inner.list()

    def keep_while(self, is_wanted: Callable[[], bool]) -> None:
        """Ask this about once a second; while it says no, warm sandboxes are given up and none is made."""
        self._is_wanted = is_wanted
        self._bell.set()

    def expect(self, spec: SandboxSpec) -> None:
        """A job will soon want one: have one ready. A hint: nobody has to come, and another job may be faster."""
        self._shelf(spec).demand.expect(trio.current_time())
        self._bell.set()

    # --- what a job gets --------------------------------------------------------------------------------------------

    async def run(
        self,
        spec: SandboxSpec,
        *,
        sandbox_id: str,
        job_id: str,
        task_status: trio.TaskStatus[Sandbox] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """As the contract says; with a warm sandbox where there is one."""
        if sandbox_id in self._ids:
            raise SandboxError(f"there is a sandbox {sandbox_id} already", retryable=False)
        self._ids.add(sandbox_id)
        try:
            shelf = self._shelf(spec)
            slot = await self._fit(shelf) or await self._fit_of_image(spec)
            shelf.demand.ask(trio.current_time())
            self._bell.set()
            if slot is None:
                await self._cold(shelf, sandbox_id, job_id, task_status)
            else:
                await self._lend(slot, sandbox_id, job_id, task_status)
        finally:
            self._ids.discard(sandbox_id)

    async def _fit(self, shelf: _Shelf) -> _Slot | None:
        """A warm sandbox that answers. One that does not is ended."""
        for _ in range(TRIES):
            if not shelf.idle:
                break
            slot = shelf.idle.popleft()
            slot.state = "lent"
            assert slot.sandbox is not None
            fit = False
            try:
                fit = await _answers(slot.sandbox, shelf.spec, CHECK_S)
            finally:
                if not fit:
                    slot.end("it was not fit")
            if fit:
                return slot
            self._unused("unfit")
        return None

    async def _fit_of_image(self, spec: SandboxSpec) -> _Slot | None:
        """One of an image that the operator has named, whichever session comes up first in those."""
        plain = msgspec.structs.replace(spec, first=SandboxSpec().first)
        shelf = None if spec == plain else self._shelves.get(_key(plain))
        return await self._fit(shelf) if shelf is not None and shelf.demand.fixed else None

    async def _lend(self, slot: _Slot, sandbox_id: str, job_id: str, task_status: trio.TaskStatus[Sandbox]) -> None:
        async def end() -> None:
            slot.end("its job needs it no more")
            await slot.gone.wait()

        async with afterwards(END_S, f"ending {sandbox_id}", end):
            assert slot.sandbox is not None
            slot.sandbox.adopt(sandbox_id, job_id)
            slot.shelf.demand.served()
            self._metrics.sandbox_taken(self.name, "warm")
            self._show()
            task_status.started(slot.sandbox)
            await slot.gone.wait()
        raise slot.failure or SandboxError(f"sandbox {sandbox_id} ended by itself")

    async def _cold(self, shelf: _Shelf, sandbox_id: str, job_id: str, task_status: trio.TaskStatus[Sandbox]) -> None:
        async with self.admission.enter(shelf.spec.image or "", urgent=True) as leave:

            def came_up() -> None:
                leave()
                shelf.demand.came_up()
                shelf.demand.served()
                self._metrics.sandbox_taken(self.name, "cold")

            relay = _Relay(came_up, task_status)
            await self._inner.run(shelf.spec, sandbox_id=sandbox_id, job_id=job_id, task_status=relay)

    # --- what is kept -----------------------------------------------------------------------------------------------

    async def keep(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Make, watch and end warm sandboxes until cancelled; then none is left, and no more are made."""
        assert not self._kept, "kept twice"
        self._kept = True
        for image, count in self._rules.images.items():
            self._shelf(SandboxSpec(image=image or None)).demand.fixed = count
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                self._tend(nursery)
                with trio.move_on_after(LOOK_EVERY_S):
                    await self._bell.wait()
                self._bell = trio.Event()

    def _tend(self, nursery: trio.Nursery) -> None:
        now = trio.current_time()
        wanted = self._can_keep and self._is_wanted()
        demands = {key: shelf.demand for key, shelf in self._shelves.items()} if wanted else {}
        shares = allot(demands, self._rules, now=now, bytes_each=self._bytes_each)
        for key, shelf in self._shelves.items():
            self._trim(shelf, shares.get(key, 0), now, at_once=not wanted)
        places = room(self._rules, self._bytes_each) - sum(shelf.count for shelf in self._shelves.values())
        for key, share in shares.items():
            shelf = self._shelves[key]
            while places > 0 and shelf.count < share and now >= shelf.demand.retry_at:
                self._made += 1
                slot = _Slot(shelf, f"{self._boot_id}-warm-{self._made}")
                shelf.starting.add(slot)
                nursery.start_soon(self._hold, slot, name=f"warm sandbox {slot.name}")
                places -= 1
        self._forget()
        self._show()

    def _trim(self, shelf: _Shelf, share: int, now: float, *, at_once: bool) -> None:
        """End what is too old, and what is too much."""
        while shelf.idle and now - shelf.idle[0].idle_since >= self._rules.age_s:
            self._drop(shelf, "old")
        while shelf.idle and shelf.count > share and (at_once or now - shelf.idle[0].idle_since >= STAYS_S):
            self._drop(shelf, "idle")
        if at_once:
            for slot in tuple(shelf.starting):
                shelf.starting.discard(slot)
                slot.end("no warm sandboxes are wanted")

    def _drop(self, shelf: _Shelf, why: Literal["old", "idle"]) -> None:
        shelf.idle.popleft().end(why)
        self._unused(why)

    async def _hold(self, slot: _Slot) -> None:
        """One sandbox, whoever has it. What becomes of it is no trouble of the others."""
        try:
            with slot.scope:
                await self._live(slot)
        except* Exception as group:  # noqa: BLE001 - kept for whoever has it
            slot.failure = _failure(group)
        finally:
            self._over(slot)

    async def _live(self, slot: _Slot) -> None:
        spec = slot.shelf.spec
        async with trio.open_nursery() as nursery:
            async with self.admission.enter(spec.image or "", urgent=False):
                with boundary(SandboxError, f"starting {slot.name}"), trio.fail_after(START_S):
                    run = partial(self._inner.run, spec, sandbox_id=slot.name, job_id="")
                    sandbox: Sandbox = await nursery.start(run, name=f"sandbox {slot.name}")
                    if not isinstance(sandbox, Adoptable):
                        self._can_keep = False
                        raise SandboxError(f"sandboxes of {self.name} can't be adopted", retryable=False)
                    if not await _answers(sandbox, spec, FIRST_CHECK_S):
                        raise SandboxError(f"{slot.name} does not answer")
            slot.sandbox = sandbox
            slot.state, slot.idle_since = "idle", trio.current_time()
            slot.shelf.starting.discard(slot)
            slot.shelf.idle.append(slot)
            slot.shelf.demand.came_up()
            self._bytes_each = max(self._bytes_each, sandbox.rss_bytes())
            self._show()

    def _over(self, slot: _Slot) -> None:
        """It is gone. One that ended unasked before a job had it counts against its spec."""
        slot.gone.set()
        slot.shelf.starting.discard(slot)
        if slot in slot.shelf.idle:
            slot.shelf.idle.remove(slot)
        if slot.failure is not None and slot.state in {"starting", "idle"}:
            log.warning("sandbox.spoilt", sandbox=slot.name, state=slot.state, error=chain(slot.failure))
            self._unused("failed" if slot.state == "starting" else "died")
            slot.shelf.demand.failed(trio.current_time())
        self._bell.set()
        self._show()

    def _shelf(self, spec: SandboxSpec) -> _Shelf:
        key = _key(spec)
        shelf = self._shelves.get(key)
        if shelf is None:
            shelf = self._shelves[key] = _Shelf(spec, Demand(self._rules, now=trio.current_time()))
        self._shelves.move_to_end(key)
        return shelf

    def _forget(self) -> None:
        """Keep the demand of so many specs only; the longest unasked goes, unless something of it is there."""
        surplus = len(self._shelves) - SHELVES_MAX
        if surplus > 0:
            empty = [key for key, shelf in self._shelves.items() if not shelf.count and not shelf.demand.fixed]
            for key in empty[:surplus]:
                del self._shelves[key]

    def _unused(self, why: str) -> None:
        self._metrics.sandbox_unused(self.name, why)

    def _show(self) -> None:
        seen = self.admission.statistics()
        self._metrics.sandboxes_seen(self.name, warm=self.idle, starting=seen.starting, waiting=seen.waiting)


def _key(spec: SandboxSpec) -> bytes:
    return msgspec.json.encode(spec, order="deterministic")


def _failure(group: BaseExceptionGroup[Exception]) -> SandboxError:
    found = list(leaves(group))
    known = (leaf for leaf in found if isinstance(leaf, SandboxError))
    return next(known, SandboxError(f"its keeper failed: {chain(found[0])}"))


async def _answers(sandbox: Sandbox, spec: SandboxSpec, limit_s: float) -> bool:
    """Whether its first session does what it is told; an empty cell leaves no trace."""
    try:
        if spec.first == "python":
            result = await sandbox.python("", limit_s=limit_s)
        else:
            result = await sandbox.bash("true", limit_s=limit_s)
    except SandboxError:
        return False
    return result.exit_code == 0 and not result.timed_out and not result.restarted
