"""AReaL: what ``RolloutWorkflow.arun_episode`` returns, a dictionary of columns with a row for each branch.

AReaL takes ``None`` for a rollout that is rejected, and so gets it for one that may not be trained on. ``versions`` is
-1 where the policy made nothing; a sampled token whose version is not known has no number there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prorld.export.reading import Document, NotExportable, lists, trained_rows
from prorld.export.rows import Row

__all__ = ["episode"]

_NOT_SAMPLED = -1


def episode(document: Document, *, pad_id: int = 0, version: int | None = None) -> dict[str, list[Any]] | None:
    """The columns as lists, padded on the right to the longest row; ``version`` is for engines that name none.

    Without it a rollout with a token of no known version is refused with ``no_version``.
    """
    rows = trained_rows(lists(document))
    if not rows:
        return None
    width = max(len(row.token_ids) for row in rows)
    return {
        "input_ids": [_wide(row.token_ids, width, pad_id) for row in rows],
        "loss_mask": [_wide([0] * len(row.prompt_ids) + row.response_mask, width, 0) for row in rows],
        "logprobs": [_wide([0.0] * len(row.prompt_ids) + row.response_logprobs, width, 0.0) for row in rows],
        "versions": [_wide(_versions(row, version), width, _NOT_SAMPLED) for row in rows],
        "attention_mask": [_wide([True] * len(row.token_ids), width, filler=False) for row in rows],
        "rewards": [row.reward for row in rows],
    }


def _wide(column: Sequence[Any], width: int, filler: float) -> list[Any]:
    return [*column, *([filler] * (width - len(column)))]


def _versions(row: Row, known: int | None) -> list[int]:
    found = [_NOT_SAMPLED] * len(row.prompt_ids)
    for made, mask in zip(row.versions, row.response_mask, strict=True):
        number = made if made is not None else known
        if mask and number is None:
            raise NotExportable(
                f"job {row.job_id} does not know which version sampled it, and AReaL must have one", code="no_version"
            )
        found.append(number if mask and number is not None else _NOT_SAMPLED)
    return found
