"""What keeps a daemon from being ready: named conditions, each with the cure."""

from __future__ import annotations

from collections.abc import Iterable

from prorld.domain.outcome import STAGES
from prorld.wire.ops import Condition, Ready, Stages

__all__ = ["readiness"]


def readiness(
    *, draining: bool, engineless: Iterable[str], handlers: int, stages: Stages, sandbox: str | None
) -> Ready:
    """The conditions that hold now. ``sandbox`` is why no sandbox can be made, where that is known."""
    missing: list[Condition] = []
    if draining:
        missing.append(_missing("draining", "no new jobs are taken", "wait for the daemon to end and start it again"))
    for policy in engineless:
        words = f"policy {policy} has no engine that is up"
        missing.append(_missing("no_backend", words, "register one with POST /v1/backends, or wait for it to start"))
    if handlers == 0:
        missing.append(_missing("no_handlers", "no handler is installed", "install a plugin, e.g. prorld-math"))
    if sandbox is not None:
        missing.append(_missing("no_sandbox", "sandboxes can't be made", sandbox))
    for stage in STAGES:
        if getattr(stages, stage).workers == 0:
            cure = f'PATCH /v1/stages {{"{stage}": {{"workers": N}}}}'
            missing.append(_missing("stage_paused", f"the {stage} stage is paused", cure))
    return Ready(ready=not missing, missing=missing)


def _missing(code: str, message: str, cure: str) -> Condition:
    return Condition(code=code, message=message, cure=cure)
