"""Whose weights sample: the trainer's engines made those of a policy, and its weights named after each change."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from prorld.client.errors import ClientError
from prorld.client.sync import Client
from prorld.domain.policy import How, Mode
from prorld.wire.ops import SetBackend, SetBackends
from prorld.wire.policies import PolicyUpdate

__all__ = ["ENGINES_REFUSED", "UPDATE_FAILED", "publish", "use_engines"]

ENGINES_REFUSED = "engines_refused"
UPDATE_FAILED = "update_failed"
# How often somebody else may change the set while we do.
TRIES_MAX = 8
# A pause of somebody else ends when they say so; this is how often we ask.
BUSY_PAUSE_S = 0.5


def use_engines(client: Client, policy: str, engines: Sequence[SetBackend]) -> None:
    """Make these the engines of a policy, all at once; nothing is done where they are. They have the policy's version.

    Raises ``ClientError`` ``engines_refused`` that names those which can't be taken.
    """
    for left in reversed(range(TRIES_MAX)):
        known = client.backends(policy)
        if {(item.kind, item.url) for item in known.items} == {(one.kind, one.url) for one in engines}:
            return
        version = client.policy(policy).version
        wanted = SetBackends(policy=policy, generation=known.generation, backends=[*engines], version=version)
        try:
            answer = client.replace_backends(wanted)
        except ClientError as exc:
            if exc.stable_code != "generation_moved" or not left:
                raise
            continue
        if answer.failed:
            told = "; ".join(f"{one.url}: {one.message}" for one in answer.failed)
            raise ClientError(f"engines that could not be taken: {told}", code=ENGINES_REFUSED)
        return


def publish(
    client: Client, policy: str, how: How, path: Path | None = None, *, mode: Mode = "abort", within_s: float
) -> int:
    """Give the engines of a policy the next version: weights from ``path``, or (``none``) those that they got already.

    Goes on where a daemon that was started again had cut it short, and waits for a pause of somebody else. Answers with
    the version. Raises ``ClientError`` where no engine took it.
    """
    until = time.monotonic() + within_s
    version = client.policy(policy).version + 1
    while True:
        try:
            begun = client.update_policy(policy, version, how, path=None if path is None else str(path), mode=mode)
        except ClientError as exc:
            if exc.stable_code == "version_too_low":
                version = client.policy(policy).version + 1
            elif exc.stable_code != "policy_busy" or time.monotonic() >= until:
                raise
            time.sleep(BUSY_PAUSE_S)  # noqa: TID251 - there is no event loop on this side
            continue
        ended = client.wait_update(policy, begun.update_id, within_s=max(0.0, until - time.monotonic()))
        if ended.state == "done":
            return version
        if ended.state == "running" or ended.code != "interrupted" or time.monotonic() >= until:
            raise _refused(ended)


def _refused(update: PolicyUpdate) -> ClientError:
    """Why no engine took the weights, as far as they said."""
    told = "; ".join(f"{one.id}: {one.error}" for one in update.backends if not one.ok)
    what = "has not ended" if update.state == "running" else f"failed: {update.message}"
    message = f"version {update.version} of policy {update.policy} {what}" + (f" ({told})" if told else "")
    return ClientError(message, code=UPDATE_FAILED)
