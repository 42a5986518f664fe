"""Whose weights sample: the trainer's engines made those of a policy, and its weights named after each change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prorld.client.adapters.settings import AdapterSettings
from prorld.client.errors import ClientError
from prorld.client.sync import Client
from prorld.domain.policy import How
from prorld.wire.ops import SetBackend, SetBackends
from prorld.wire.policies import PolicyUpdate

__all__ = ["ENGINES_REFUSED", "MovedWeights", "publish", "use_engines"]

ENGINES_REFUSED = "engines_refused"
# How often somebody else may change the set while we do.
TRIES_MAX = 8
# How long a daemon that was started again may be without the engines of its configuration.
ENGINES_S = 30.0


def use_engines(client: Client, policy: str, engines: Sequence[SetBackend]) -> None:
    """See to it that a trainer's engines are those of its policy, and no others; where they are, nothing is done.

    They are exchanged all at once and have the policy's version. One that somebody else has added goes: it knows none
    of the weights that the trainer moves, and would sample with others under their version. So it is before each step
    and while one is waited for, when it is also how a daemon that was started again hears of them. Without engines of
    its own a trainer takes those that the daemon has, and nothing is done either.

    Raises ``ClientError`` ``engines_refused`` that names those which can't be taken.
    """
    if not engines:
        return
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


class MovedWeights:
    """The weights of a trainer that moves them into its engines by itself: each step's get a version of their own."""

    def __init__(self, client: Client, settings: AdapterSettings, engines: Sequence[SetBackend]) -> None:
        self._client = client
        self._settings = settings
        self._engines = engines
        self._step: tuple[object, bool] | None = None

    def name(self, step: object, *, is_eval: bool) -> None:
        """Name those that were moved since the last call; an evaluation comes after an update of the same step."""
        if self._step == (step, is_eval):
            return
        use_engines(self._client, self._settings.policy, self._engines)
        # Before the first call, too: a trainer that goes on from a checkpoint has put older weights into its engines.
        publish(self._client, self._settings, "none")
        self._step = (step, is_eval)


def publish(client: Client, settings: AdapterSettings, how: How, path: Path | None = None) -> PolicyUpdate:
    """Give the policy its next version, and wait for a pause of somebody else meanwhile."""
    return client.publish(
        how=how, path=None if path is None else str(path), policy=settings.policy, within_s=settings.update_s,
        busy_s=settings.update_s, away_s=settings.away_s, engines_s=ENGINES_S,
    )  # fmt: skip
