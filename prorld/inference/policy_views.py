"""What is told of policies: from their states to the types of the wire. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from prorld.domain.policy import Pause, PolicySettings, PolicyState, Update
from prorld.inference.policies import PolicySource
from prorld.inference.pool_entry import PoolEntry
from prorld.wire.policies import PauseView, PolicyInfo, PolicyUpdate, PutPolicy

__all__ = ["merged", "pause_view", "policy_info", "settings_of", "source_of", "update_view"]


def policy_info(
    state: PolicyState, settings: PolicySettings, entries: Sequence[PoolEntry], tenant: str | None, *, closed_s: float
) -> PolicyInfo:
    """A policy as a tenant sees it; ``None`` for an admin. Without a model of its own it has that of its engines."""
    served = next((entry.found.model for entry in entries), None)
    pause, running = state.pause, state.running
    return PolicyInfo(
        name=state.name,
        version=state.version.version,
        epoch=state.version.epoch,
        model=settings.model or served,
        tokenizer=settings.tokenizer,
        renderer=settings.renderer,
        chat_template_kwargs=settings.chat_template_kwargs,
        max_staleness=settings.max_staleness,
        adapter=None if state.adapter is None else state.adapter.name,
        pause=None if pause is None else pause_view(pause, tenant),
        update=None if running is None else update_view(state.name, running),
        paused_s=round(closed_s, 3),
        backends=dict(Counter(entry.row.state.value for entry in entries)),
    )


def settings_of(source: PolicySource) -> PolicySettings:
    """What a configuration says of a policy."""
    return PolicySettings(
        tokenizer=source.tokenizer,
        renderer=source.renderer,
        chat_template_kwargs=source.chat_template_kwargs,
        max_staleness=source.max_staleness,
    )


def source_of(settings: PolicySettings) -> PolicySource:
    """Where the tokens of a policy with these settings come from."""
    return PolicySource(
        tokenizer=settings.tokenizer,
        renderer=settings.renderer,
        chat_template_kwargs=settings.chat_template_kwargs,
        max_staleness=settings.max_staleness,
    )


def merged(known: PolicySettings, request: PutPolicy) -> PolicySettings:
    """The settings with what a request gives."""
    given: Mapping[str, Any] = {
        name: value
        for name in PolicySettings.__struct_fields__
        if (value := getattr(request, name)) is not msgspec.UNSET
    }
    return msgspec.structs.replace(known, **given)


def pause_view(pause: Pause, tenant: str | None) -> PauseView:
    """A pause as a tenant sees it; ``None`` for an admin."""
    pause_id = pause.pause_id if tenant in (None, pause.holder) else None
    return PauseView(pause_id=pause_id, holder=pause.holder, mode=pause.mode, since=pause.since)


def update_view(policy: str, update: Update) -> PolicyUpdate:
    """An update as it is told."""
    return PolicyUpdate(
        update_id=update.update_id, id=update.update_id, policy=policy, state=update.state,
        version=update.version, epoch=update.epoch, how=update.how,
        path=update.path, mode=update.mode, only=None if update.only is None else [*update.only],
        rollback=update.rollback, code=update.code, message=update.message, backends=[*update.backends],
        created_at=update.created_at, ended_at=update.ended_at,
    )  # fmt: skip
