"""From what a client asks for to what a batch is: every default filled in, and what can't be done refused. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET

from prorld.domain.batch import BatchRules, check_rules
from prorld.errors import BadRequest, Impossible, RequestError
from prorld.handlers.registry import Registry, accept
from prorld.rollout.batches.settings import BatchSettings
from prorld.store.batches import BatchSpec, GroupRow
from prorld.wire.batches import SubmitBatch

__all__ = ["check_instance", "complete", "group_row", "refused_at", "select_handler"]

# Half as many again as are wanted: more of them only make what is carried older.
AHEAD: Final = 1.5
# `{batch_id}:{offset}` and behind it `:{sample}` and a salt have to stay an id.
BATCH_CHARS_MAX: Final = 88
INSTANCE_ID_CHARS_MAX: Final = 256


def complete(
    request: SubmitBatch, batch_id: str, tenant: str, handler: str, settings: BatchSettings, captures: Container[str]
) -> BatchSpec:
    """The batch that a request means; ``Impossible`` for one that can't be."""
    for name in request.capture:
        if name not in captures:
            raise Impossible(f"can't capture {name!r}", code="unknown_capture")
    if request.carry_from is not None and request.carry_from == batch_id:
        raise Impossible("a batch can't carry what it leaves itself", details={"path": "carry_from"})
    is_eval = request.purpose == "eval"
    usual = settings.eval_priority if is_eval else settings.train_priority
    # A stream goes on until somebody says that it is over; whatever else came with prompts ends with them.
    closes = bool(request.instances) and (is_eval or request.target_groups is not None)
    return BatchSpec(
        batch_id=batch_id,
        tenant=tenant,
        handler=handler,
        policy=request.policy,
        purpose=request.purpose,
        rules=_rules(request, settings),
        closes=closes if request.last is None else request.last,
        max_wall_s=request.max_wall_s,
        carry_ttl_s=request.carry_ttl_s,
        leftovers=request.leftovers,
        carry_from=request.carry_from,
        pin_version=request.pin_version,
        max_attempts=1 if request.on_error == "exclude" else request.max_attempts,
        sampling=request.sampling,
        agent=request.agent,
        timeouts=request.timeouts,
        priority=usual if request.priority is UNSET else request.priority,
        capture=request.capture,
        metadata=request.metadata,
    )


def _rules(request: SubmitBatch, settings: BatchSettings) -> BatchRules:
    is_eval, target = request.purpose == "eval", request.target_groups
    running = request.max_running_groups
    if running is None:
        running = settings.running_groups if target is None else max(1, math.ceil(target * AHEAD))
    if request.samples_per_group > settings.jobs_max:
        words = f"a group of {request.samples_per_group} jobs has no room where {settings.jobs_max} are accepted at all"
        raise Impossible(words, code="too_large", details={"path": "samples_per_group"})
    asked = request.quorum.min_usable
    rules = BatchRules(
        samples_per_group=request.samples_per_group,
        target_groups=target,
        max_running_groups=running,
        max_ready_groups=request.max_ready_groups,
        max_groups=request.max_groups,
        informative=request.informative,
        selection=request.selection,
        min_usable=request.samples_per_group if asked is None else asked,
        grace_s=request.quorum.grace_s,
        on_error=request.on_error,
        on_timeout=request.on_timeout,
        leftovers=request.leftovers,
        max_staleness=request.max_staleness,
        is_eval=is_eval,
    )
    check_rules(rules)
    return rules


# --- prompts ----------------------------------------------------------------------------------------------------------


def select_handler(registry: Registry, name: str | None, instances: Sequence[Mapping[str, Any]]) -> str:
    """The one handler of a batch: the one it names, else that of its first prompt."""
    if name is None and not instances:
        raise Impossible("without prompts a batch has to name its handler", code="unknown_handler")
    return registry.select(name, instances[0] if instances else {}).name


def check_instance(
    registry: Registry, spec: BatchSpec, named: str | None, instance: Mapping[str, Any], place: int
) -> None:
    """What a single job's prompt is checked for, and that it is of the batch's handler. Names the bad one's place."""
    try:
        if named is None and (found := registry.select(None, instance).name) != spec.handler:
            raise Impossible(f"it is of {found}, and the batch of {spec.handler}", code="other_handler")
        accept(registry.get(spec.handler), instance, spec.agent)
    except RequestError as exc:
        raise refused_at(place, exc) from exc


def refused_at(place: int, exc: RequestError) -> RequestError:
    """The refusal of one prompt as that of all: none of them was taken."""
    inner = str((exc.details or {}).get("path", "")).removeprefix("instance")
    details = {"index": place, "path": f"instances[{place}]{inner}"}
    kind = BadRequest if isinstance(exc, BadRequest) else Impossible
    return kind(f"instances[{place}]: {exc.message}", code=exc.stable_code, details=details)


def group_row(batch_id: str, serial: int, place: int, instance: Mapping[str, Any]) -> GroupRow:
    """The group of one prompt."""
    packed = msgspec.msgpack.encode(instance, order="deterministic")
    return GroupRow(
        place=place,
        group_id=f"{_short(batch_id)}:{place}",
        origin=serial,
        instance_id=_instance_id(instance),
        instance=packed,
        digest=hashlib.blake2b(packed, digest_size=16).digest(),
    )


def _short(batch_id: str) -> str:
    """Ids of groups and jobs begin with that of their batch, as far as there is room."""
    if len(batch_id) <= BATCH_CHARS_MAX:
        return batch_id
    digest = hashlib.blake2b(batch_id.encode(), digest_size=8).hexdigest()
    return f"{batch_id[: BATCH_CHARS_MAX - 17]}-{digest}"


def _instance_id(instance: Mapping[str, Any]) -> str | None:
    for name in ("instance_id", "id"):
        value = instance.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool):
            return str(value)[:INSTANCE_ID_CHARS_MAX]
    return None
