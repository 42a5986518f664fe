"""How much of a batch may be under way, and how much more its sampler should send. Pure numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from prorld.domain.batch_rules import BatchRules
from prorld.domain.group import GroupEnd

__all__ = ["held_max", "more_wanted", "still_needed"]

# The share of informative groups that the sampler's window reckons with at least.
_KEPT_SHARE_MIN = 1 / 16

# Batches to come for which groups may be done in advance, while an earlier one takes long: more of them hardly make it
# faster, and the groups get older.
_BATCHES_AHEAD = 4


def held_max(rules: BatchRules, *, done: int, ready: int) -> int:
    """So many groups may have run to their end and wait for earlier ones, before later ones are not started.

    Those later ones could be accepted only where one before them drops out. Where what is left over is carried, the
    next batches begin with them, and there may be as many as those take before they are too old; else they are waste.
    """
    if rules.is_stream:
        return rules.max_ready_groups - ready
    if rules.target is None:
        return rules.max_running_groups
    later = 0
    if rules.leftovers == "carry":
        later = _BATCHES_AHEAD if rules.max_staleness is None else min(rules.max_staleness, _BATCHES_AHEAD)
    return rules.target - done + later * rules.target


def more_wanted(rules: BatchRules, ends: Mapping[GroupEnd, int], *, running: int, held: int) -> int:
    """How many groups the sampler should have ready beyond those that were started.

    Enough for every free place, and as many again as the window holds, but no more than the target is likely to take.
    """
    free = max(0, rules.max_running_groups - running)
    ahead = rules.max_running_groups
    if rules.target is not None:
        ahead = min(ahead, max(0, still_needed(rules.target, ends, held=held) - running - free))
    return free + ahead


def still_needed(target: int, ends: Mapping[GroupEnd, int], *, held: int) -> int:
    """How many more groups it takes to the target, by the share of those so far that training can learn from."""
    kept = ends.get(GroupEnd.DONE, 0) + held
    lost = sum(ends.get(end, 0) for end in (GroupEnd.FILTERED, GroupEnd.FAILED, GroupEnd.STALE))
    share = max(_KEPT_SHARE_MIN, (kept + 1) / (kept + lost + 1))
    return math.ceil(max(0, target - kept) / share)
