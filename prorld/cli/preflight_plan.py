"""What a preflight has to do: each instance with the plays that are run on it, and a digest by which it is found again.

The digest is of the instance, the plays and everything that may change the verdict: the same command again goes on, and
another one does not take its lines for its own.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from prorld.cli.common import read_text
from prorld.cli.exits import UsageError
from prorld.cli.instances import INSTANCE_BYTES_MAX, read_lines
from prorld.cli.try_world import PLAY_CONTEXT_TOKENS, PLAY_TURN_TOKENS
from prorld.domain.job import AgentLimits
from prorld.errors import ProrldError, chain
from prorld.handlers.base import AgentHandler
from prorld.handlers.play import GOLD, Play
from prorld.handlers.registry import accept
from prorld.wire.codec import decode

__all__ = ["LIMITS", "Plan", "Settings", "Task", "no_gold", "plan", "plays_of", "read_tasks"]

# A play is no matter of budgets: its tokens are bytes.
LIMITS: Final = AgentLimits(max_context_tokens=PLAY_CONTEXT_TOKENS, max_sampled_tokens=PLAY_CONTEXT_TOKENS)
_DIGEST_CHARS = 16


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a verdict depends on beside the instance. ``plays`` are those asked for; ``None`` for all there are."""

    handler: str
    version: str
    config: dict[str, Any]
    plays: tuple[str, ...] | None
    times: int
    sandbox: str
    load: int

    def chosen(self, plays: Iterable[Play]) -> list[Play]:
        """Those of an instance's plays that are run."""
        return [play for play in plays if self.plays is None or play.name in self.plays]

    @property
    def needs_gold(self) -> bool:
        """Whether a right solution has to be known."""
        return self.plays is None or GOLD in self.plays


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One instance: where it stands, its text as it was read, and why it can't be played where that is so."""

    line: int
    digest: str
    text: str
    trouble: str | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks in their order, what was refused by line, and how many instances each play is there for."""

    tasks: list[Task]
    refused: list[tuple[int, str]]
    offered: Mapping[str, int]


def read_tasks(name: str, *, limit: int | None, shuffle_seed: int | None) -> list[tuple[int, str, dict[str, Any]]]:
    """Instances by line, as text and decoded: JSON objects one per line, or one JSON array of them."""
    text = read_text(name, limit_bytes=INSTANCE_BYTES_MAX)
    if text.lstrip()[:1] == "[":
        try:
            rows = decode(text.encode(), list[dict[str, Any]], what=name)
        except ProrldError as exc:
            raise UsageError(exc.message) from exc
        found = [(number, msgspec.json.encode(row).decode(), row) for number, row in enumerate(rows, 1)]
        if not found:
            raise UsageError(f"{name} holds no instance")
    else:
        lines = text.split("\n")
        found = [(number, lines[number - 1].rstrip("\r"), row) for number, row in read_lines(text, name)]
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(found)  # noqa: S311 - an order, no secret
    return found[:limit]


def plan(rows: Iterable[tuple[int, str, dict[str, Any]]], handler: AgentHandler[Any], settings: Settings) -> Plan:
    """What there is to do for these instances."""
    tasks: list[Task] = []
    refused: list[tuple[int, str]] = []
    offered: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    said = msgspec.json.encode(settings, order="deterministic")
    for line, text, instance in rows:
        try:
            accept(handler, instance, LIMITS)
        except ProrldError as exc:
            refused.append((line, exc.message))
            continue
        plays, trouble = plays_of(handler, instance)
        offered.update(play.name for play in plays)
        if trouble is None and settings.needs_gold and all(play.name != GOLD for play in plays):
            trouble = "the handler has no gold play for it"
        digest = _digest(said, instance, settings.chosen(plays))
        seen[digest] += 1
        name = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        tasks.append(Task(line=line, digest=name, text=text, trouble=trouble))
    _check(settings, handler, offered, tasks)
    return Plan(tasks=tasks, refused=refused, offered=offered)


def plays_of(handler: AgentHandler[Any], instance: Mapping[str, Any]) -> tuple[Sequence[Play], str | None]:
    """The plays of an instance that is accepted, or why there are none that can be said."""
    try:
        plays = [*handler.plays(accept(handler, instance, LIMITS))]
        for play in plays:
            longest = max(len(turn.encode()) for turn in play.turns)
            if longest >= PLAY_TURN_TOKENS:
                return [], f"a turn of the play {play.name} has {longest} bytes; {PLAY_TURN_TOKENS} are too many"
    except Exception as exc:  # noqa: BLE001 - whatever the plugin's code raises is told
        return [], f"{handler.name} can't say its plays: {chain(exc)}"
    return plays, None


def _digest(said: bytes, instance: Mapping[str, Any], plays: Sequence[Play]) -> str:
    body = msgspec.json.encode([instance, plays], order="deterministic")
    return hashlib.sha256(said + b"\n" + body).hexdigest()[:_DIGEST_CHARS]


def _check(settings: Settings, handler: AgentHandler[Any], offered: Mapping[str, int], tasks: Sequence[Task]) -> None:
    """Raise ``UsageError`` where what is asked for is there for no instance at all."""
    playable = [task for task in tasks if task.trouble is None]
    if settings.needs_gold and GOLD not in offered and tasks and offered:
        raise UsageError(no_gold(handler))
    unknown = [name for name in settings.plays or () if name not in offered]
    if unknown and playable:
        there = ", ".join(sorted(offered))
        raise UsageError(f"{handler.name} has no play {', '.join(unknown)} for any of these instances; it has {there}")


def no_gold(handler: AgentHandler[Any]) -> str:
    """What an author has to do before a preflight can prove anything."""
    return "\n".join([
        f"{handler.name} has no gold play: how its tasks are solved is not known. Say it in {type(handler).__name__}:",
        "",
        "    from prorld.handlers import Play, tool_call",
        "",
        "    def plays(self, instance):",
        "        return [",
        "            *super().plays(instance),",
        "            Play(name='gold', turns=(tool_call('bash', command='...'), 'the answer'), reward=1.0),",
        "        ]",
        "",
        "A turn is what the policy says; docs/preflight.md has more. `--plays empty` needs no gold.",
    ])  # fmt: skip
