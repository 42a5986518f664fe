"""Atropos: a ``ScoredDataItem`` for each row, and the ``ScoredDataGroup`` of a group's rollouts.

``masks`` are labels: the token where it was sampled, -100 elsewhere. ``inference_logprobs`` are 1.0 elsewhere, which no
log-probability can be. A rollout that may not be trained on gives no row, so that the group becomes smaller: Atropos
takes its baseline over every row it is given, a fork's too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prorld.export.reading import Document, branch_of_row, chat_of, lists, trained_rows
from prorld.export.rows import Row
from prorld.wire.trajectory import Trajectory

__all__ = ["scored_group", "scored_items"]

_NO_LABEL = -100
_NO_LOGPROB = 1.0


def scored_items(document: Document) -> list[dict[str, Any]]:
    """An item for each row, with its messages."""
    document = lists(document)
    return [_item(document, row) for row in trained_rows(document)]


def _item(document: Trajectory, row: Row) -> dict[str, Any]:
    sampled = list(zip(row.response_ids, row.response_logprobs, row.response_mask, strict=True))
    before = len(row.prompt_ids)
    return {
        "tokens": row.token_ids,
        "masks": [_NO_LABEL] * before + [token if mask else _NO_LABEL for token, _, mask in sampled],
        "scores": row.reward,
        "advantages": None,
        "ref_logprobs": None,
        "inference_logprobs": [_NO_LOGPROB] * before
        + [logprob if mask else _NO_LOGPROB for _, logprob, mask in sampled],
        "messages": chat_of(branch_of_row(document, row)),
        "generation_params": {"temperature": row.temperature},
        "overrides": None,
        "group_overrides": None,
        "images": None,
    }


def scored_group(documents: Iterable[Document]) -> dict[str, Any] | None:
    """What is posted to ``/scored_data`` for the rollouts of one group; ``None`` where none of them may be used."""
    items = [item for document in documents for item in scored_items(document)]
    if not items:
        return None
    return {
        **{name: [item[name] for item in items] for name in ("tokens", "masks", "scores", "inference_logprobs")},
        "messages": [item["messages"] for item in items],
        "advantages": None,
        "ref_logprobs": None,
        "generation_params": items[0]["generation_params"],
        "overrides": None,
        "group_overrides": {"group_size": len(items)},
        "images": None,
    }
