"""The label an engine carries for the weights it serves, and what it means. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

__all__ = ["PolicyVersion", "adapter_name", "deciding", "in_words", "parse_label"]

# What an engine that was never told a version calls its weights: the first version of its policy.
_FIRST = frozenset({"default", "base"})
# An adapter's name ends in its policy, where that is not the default one.
_LABEL = re.compile(r"prorld-(\d{1,9})\.(\d{1,18})(?:@.+)?|(\d{1,18})", re.ASCII)
_NO_NAME_OF_ITS_OWN = "default"


class PolicyVersion(msgspec.Struct, frozen=True, order=True):
    """A version of a policy. A rollback begins a new epoch, so that no version is ever meant twice."""

    epoch: int = 0
    version: int = 0

    @property
    def label(self) -> str:
        """What an engine is told, and what its spans say after that."""
        return f"prorld-{self.epoch}.{self.version}"


def adapter_name(policy: str, version: PolicyVersion) -> str:
    """What an adapter is called in an engine, which other policies may have theirs in, too, of the same versions."""
    return version.label if policy == _NO_NAME_OF_ITS_OWN else f"{version.label}@{policy}"


def deciding(sampled: Iterable[PolicyVersion]) -> list[PolicyVersion]:
    """The oldest and the newest of each epoch, rising: nothing else decides whether what they sampled is too old.

    The oldest is the farthest behind; the newest may be above the version that a rollback went back to.
    """
    ends: dict[int, tuple[PolicyVersion, PolicyVersion]] = {}
    for version in sorted(sampled):
        first, _ = ends.get(version.epoch, (version, version))
        ends[version.epoch] = first, version
    return sorted({end for of_epoch in ends.values() for end in of_epoch})


def in_words(version: PolicyVersion | None) -> str:
    """A version as messages name it."""
    return "an unknown version" if version is None else f"version {version.epoch}.{version.version}"


def parse_label(label: str | None) -> PolicyVersion | None:
    """What a label means: ours, a bare number, or the engine's word for weights never updated; else ``None``."""
    if label is None or label in _FIRST:
        return PolicyVersion()
    match = _LABEL.fullmatch(label)
    if match is None:
        return None
    if match[3] is not None:
        return PolicyVersion(0, int(match[3]))
    return PolicyVersion(int(match[1]), int(match[2]))
