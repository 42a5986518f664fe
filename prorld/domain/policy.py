"""A policy's versions as a pure state machine: who may change what, which version comes next, what is too old.

    serving --pause--> paused --resume--> serving
       |                 |
       +----update-----> updating --> serving        (or paused again: the update failed under a holder's pause)

No state is ever changed here: every decision is a function from one state to the next, or a ``RequestError``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from prorld.domain.versions import PolicyVersion, adapter_name
from prorld.errors import Conflict, Impossible

__all__ = [
    "UPDATES_KEPT",
    "Adapter",
    "BackendResult",
    "How",
    "Mode",
    "Pause",
    "PolicySettings",
    "PolicyState",
    "Resumed",
    "Update",
    "UpdateState",
    "begin_pause",
    "begin_update",
    "changed",
    "check_resume",
    "end_update",
    "interrupted",
    "is_stale",
    "moved_to",
    "must_be_free",
    "next_version",
    "quarantine_words",
    "resumed",
    "weights_in_force",
]

How = Literal["reload", "lora", "none"]
Mode = Literal["wait", "abort", "keep"]
UpdateState = Literal["running", "done", "failed"]

# Finished updates that are remembered of a policy, so that a repeat is the same one.
UPDATES_KEPT = 64


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy is made of, as it was set while the daemon ran."""

    model: str | None = None
    tokenizer: str | None = None
    renderer: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    max_staleness: int | None = None


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """A closed gate and who closed it. ``engines`` are the addresses of the engines that were paused with it.

    ``of_update``: it was closed by an update itself, and nobody asked for a pause.
    """

    pause_id: str
    holder: str
    mode: Mode
    since: str
    engines: tuple[str, ...] = ()
    of_update: bool = False


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that are served beside those they were made for, under a name of their own."""

    name: str
    path: str


class BackendResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one engine: the version it reads back, and why it stays out where it does."""

    id: str
    version: int | None = None
    ok: bool
    error: str | None = None
    code: str | None = None


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """One change of weights. ``only`` names the engines it is for; ``None`` for all.

    ``seal`` is what the file at ``path`` was when it was loaded, where this machine has it and it is one.
    """

    update_id: str
    version: int
    epoch: int
    how: How
    path: str | None
    seal: str | None = None
    mode: Mode
    only: tuple[str, ...] | None
    rollback: bool
    holder: str
    state: UpdateState = "running"
    code: str | None = None
    message: str | None = None
    backends: tuple[BackendResult, ...] = ()
    created_at: str
    ended_at: str | None = None

    @property
    def target(self) -> PolicyVersion:
        """The version it makes."""
        return PolicyVersion(self.epoch, self.version)

    def asks_the_same(self, other: Update) -> bool:
        """Whether two requests mean one thing."""
        mine, theirs = ((one.version, one.how, one.path, one.mode, one.only, one.rollback) for one in (self, other))
        return mine == theirs


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """The last resume, so that one whose answer was lost can be repeated."""

    pause_id: str
    version: int
    backends: tuple[BackendResult, ...]


class PolicyState(msgspec.Struct, frozen=True, kw_only=True):
    """All of a policy that has to survive a restart.

    ``base`` is what the engines' own label says, which is behind ``version`` while an adapter is served.
    ``rollbacks[e]`` is the version at which epoch ``e + 1`` began. ``settings`` is there where somebody set some.
    """

    name: str
    version: PolicyVersion = PolicyVersion()
    base: PolicyVersion = PolicyVersion()
    adapter: Adapter | None = None
    rollbacks: tuple[int, ...] = ()
    pause: Pause | None = None
    updates: tuple[Update, ...] = ()
    resumed: Resumed | None = None
    settings: PolicySettings | None = None

    @property
    def running(self) -> Update | None:
        """The update in progress."""
        return next((update for update in reversed(self.updates) if update.state == "running"), None)

    @property
    def is_closed(self) -> bool:
        """Whether no generation may begin."""
        return self.pause is not None


# --- versions ---------------------------------------------------------------------------------------------------------


def next_version(state: PolicyState, version: int, *, rollback: bool) -> PolicyVersion:
    """The version that a policy gets. ``Conflict`` for one that does not rise, unless it is a rollback."""
    now = state.version
    if version > now.version:
        return PolicyVersion(now.epoch, version)
    if rollback:
        return PolicyVersion(now.epoch + 1, version)
    words = f"policy {state.name!r} has version {now.version}, and {version} is not above it"
    raise Conflict(
        f'{words}; a way back needs "rollback": true',
        code="version_too_low",
        details={"version": now.version, "epoch": now.epoch},
    )


def weights_in_force(state: PolicyState) -> Update | None:
    """The update that brought the weights in force, for an engine that has to load them anew; without an adapter, which
    goes beside them.

    ``None`` where there is none: they were moved by somebody, only named, or are those that engines begin with.
    """
    return next(
        (
            update
            for update in reversed(state.updates)
            if update.state == "done" and update.how == "reload" and update.target == state.base
        ),
        None,
    )


def is_stale(
    sampled: Iterable[PolicyVersion], now: PolicyVersion, rollbacks: Sequence[int], max_staleness: int | None
) -> bool:
    """Whether tokens of these versions are too old to go on with.

    What was sampled above the version of a rollback after it is stale in any case: those weights are no ancestors of
    the policy any more. ``None`` sets no other limit.
    """
    for version in sampled:
        lineage = rollbacks[version.epoch : now.epoch]
        if any(version.version > point for point in lineage):
            return True
        if max_staleness is not None and now.version - version.version > max_staleness:
            return True
    return False


def quarantine_words(
    policy: str, expected: PolicyVersion, found: PolicyVersion | None, *, adapter: Adapter | None, told: bool
) -> str | None:
    """Why an engine that says ``found`` may not serve a policy whose engines say ``expected``; ``None`` where it may.

    ``told``: its label can be read and written; the word of others says nothing about their weights.
    """
    cure = f'bring it in by an update of policy {policy!r} that names it in "backends"'
    if adapter is not None:
        return f"it is not known to have the adapter {adapter.name}; {cure}"
    if found == expected:
        return None
    if found is None and not told:
        if expected == PolicyVersion():
            return None
        return f'it can\'t say its version, and the policy has {expected.label}; {cure} ("how": "none" just says so)'
    says = "no version of ours" if found is None else found.label
    return f"it says {says} where the policy has {expected.label}; {cure}"


# --- who may change what ----------------------------------------------------------------------------------------------


def must_be_free(state: PolicyState, pause_id: str | None) -> None:
    """``Conflict`` while somebody else changes the policy, or holds it paused."""
    running = state.running
    if running is not None:
        raise Conflict(
            f"policy {state.name!r} is being updated to version {running.version} by {running.holder!r}",
            code="policy_busy",
            details={"update_id": running.update_id, "holder": running.holder},
        )
    if state.pause is not None and state.pause.pause_id != pause_id:
        raise Conflict(
            f"policy {state.name!r} is paused by {state.pause.holder!r} since {state.pause.since}",
            code="policy_busy",
            details={"holder": state.pause.holder},
        )
    if state.pause is None and pause_id is not None:
        raise Conflict(f"policy {state.name!r} is not paused by {pause_id!r}", code="not_paused")


def changed(state: PolicyState, settings: PolicySettings, pause_id: str | None) -> PolicyState:
    """Other settings."""
    must_be_free(state, pause_id)
    return msgspec.structs.replace(state, settings=settings)


def begin_pause(state: PolicyState, pause: Pause) -> PolicyState:
    """The gate closes."""
    must_be_free(state, None)
    return msgspec.structs.replace(state, pause=pause)


def check_resume(state: PolicyState, pause_id: str, version: int, *, rollback: bool) -> PolicyVersion | Resumed:
    """The version to resume with, or the answer that was given to the same call before.

    The version in force may be named again: then nothing was changed meanwhile.
    """
    last = state.resumed
    if state.pause is None and last is not None and (last.pause_id, last.version) == (pause_id, version):
        return last
    must_be_free(state, pause_id)
    if version == state.version.version and not rollback:
        return state.version
    return next_version(state, version, rollback=rollback)


def resumed(state: PolicyState, version: PolicyVersion, backends: Sequence[BackendResult]) -> PolicyState:
    """The gate may open, on this version. Weights that were put in place take the place of an adapter."""
    pause_id = "" if state.pause is None else state.pause.pause_id
    told = Resumed(pause_id=pause_id, version=version.version, backends=tuple(backends))
    if version == state.version:
        return msgspec.structs.replace(state, pause=None, resumed=told)
    return msgspec.structs.replace(moved_to(state, version, None), pause=None, resumed=told)


def begin_update(
    state: PolicyState, asked: Update, pause_id: str | None, *, behind: frozenset[str] = frozenset()
) -> Update | PolicyState:
    """The state with the update begun, or the update that the same request made before.

    ``behind`` are engines that are quarantined: an update to the version in force may bring such in, and only such.
    An update that a restart cut short left its own gate closed; its holder's next update needs no key to that.
    """
    catches_up = (
        asked.version == state.version.version
        and not asked.rollback
        and bool(asked.only)
        and behind.issuperset(asked.only or ())
    )
    known = _same(state, asked)
    # Engines that were brought in by such a request, and are out again, are not in by what it did then.
    if known is not None and not (catches_up and known.state == "done"):
        return known
    pause = state.pause
    if pause_id is None and pause is not None and pause.of_update and pause.holder == asked.holder:
        pause_id = pause.pause_id
    must_be_free(state, pause_id)
    if catches_up:
        _must_be_possible_beside(state, asked)
        target = state.version
    else:
        target = next_version(state, asked.version, rollback=asked.rollback)
    begun = msgspec.structs.replace(asked, epoch=target.epoch, state="running")
    return msgspec.structs.replace(state, updates=_kept((*state.updates, begun)))


def _must_be_possible_beside(state: PolicyState, asked: Update) -> None:
    """Weights in place and an adapter of one version are not the same weights."""
    adapted = state.adapter is not None
    if adapted != (asked.how == "lora") and asked.how != "none":
        served = "an adapter" if adapted else "whole weights"
        raise Impossible(f"version {state.version.version} of policy {state.name!r} is {served}", code="other_weights")


def _same(state: PolicyState, asked: Update) -> Update | None:
    """The update that the same body made; one that failed may be tried again."""
    for update in reversed(state.updates):
        if update.state == "failed" or not update.asks_the_same(asked):
            continue
        # A rollback is asked for again when the policy has left the version that the last one made.
        still = update.target == state.version if asked.rollback else update.epoch == state.version.epoch
        if update.state == "running" or still:
            return update
    return None


def _kept(updates: tuple[Update, ...]) -> tuple[Update, ...]:
    return updates[-UPDATES_KEPT:]


def end_update(state: PolicyState, ended: Update, *, moved: bool, resume: bool) -> PolicyState:
    """The end of the running update. ``moved``: at least one engine has the version, so the policy has it, too."""
    updates = tuple(ended if update.update_id == ended.update_id else update for update in state.updates)
    after = msgspec.structs.replace(state, updates=updates, pause=None if resume else state.pause)
    if not moved or ended.target == state.version:
        return after
    adapter = None
    if ended.how == "lora" and ended.path is not None:
        adapter = Adapter(name=adapter_name(state.name, ended.target), path=ended.path)
    return moved_to(after, ended.target, adapter)


def moved_to(state: PolicyState, version: PolicyVersion, adapter: Adapter | None) -> PolicyState:
    """The policy with this version in force; a new epoch is a way back, and where it leads is kept."""
    rollbacks = state.rollbacks
    if version.epoch > state.version.epoch:
        rollbacks = (*rollbacks, version.version)
    base = version if adapter is None else state.base
    return msgspec.structs.replace(state, version=version, base=base, adapter=adapter, rollbacks=rollbacks)


def interrupted(state: PolicyState, at: str) -> PolicyState:
    """What a restart makes of it: an update in progress has failed, a pause stays."""
    words = "the daemon ended while it ran; which engines have the new weights is not known"
    updates = tuple(
        msgspec.structs.replace(update, state="failed", code="interrupted", message=words, ended_at=at)
        if update.state == "running"
        else update
        for update in state.updates
    )
    return msgspec.structs.replace(state, updates=updates)
