"""The policies' file in the state directory: written whole before anything is answered, read once at the start.

A file that can't be read ends the start: to go on without it would forget a pause, or let old weights count as new.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import trio

from prorld.domain.policy import PolicyState
from prorld.errors import ConfigError
from prorld.store.state_file import read_state
from prorld.whole_file import replace_file

__all__ = ["POLICY_FILE", "PolicyFile"]

POLICY_FILE = "policies.json"
SCHEMA = 1
FILE_BYTES_MAX = 64 << 20


class _Content(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    policies: list[PolicyState] = []


class PolicyFile:
    """``policies.json`` of one state directory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / POLICY_FILE
        self._turn = trio.Lock()

    def load(self) -> list[PolicyState]:
        """What is in it; nothing where there is none. Raises ``ConfigError``."""
        content = read_state(self._path, _Content, schema=SCHEMA, bytes_max=FILE_BYTES_MAX, cure=_CURE)
        policies = [] if content is None else content.policies
        wrong = _contradiction(policies)
        if wrong is not None:
            raise ConfigError(f"{self._path} contradicts itself: {wrong}; {_CURE}")
        return policies

    async def save(self, policies: Iterable[PolicyState]) -> None:
        """Replace it. What is written is what is given now; the latest call is the last one to write."""
        content = msgspec.json.encode(_Content(policies=list(policies)))
        async with self._turn:
            await trio.to_thread.run_sync(replace_file, self._path, content)


def _contradiction(policies: list[PolicyState]) -> str | None:
    """What can't be of these states, however well they can be read."""
    seen: set[str] = set()
    for state in policies:
        if state.name in seen:
            return f"there are two policies {state.name!r}"
        seen.add(state.name)
        numbers = (*state.rollbacks, *(part for at in (state.version, state.base) for part in (at.epoch, at.version)))
        if min(numbers) < 0 or len(state.rollbacks) != state.version.epoch or state.base > state.version:
            return f"the versions of policy {state.name!r}"
    return None


_CURE = "repair it, or move it away: policies then begin at version 0 and no pause is remembered"
