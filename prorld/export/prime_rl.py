"""prime-rl: a ``TrainingSample`` for each row, as keyword arguments.

The columns are over the whole sequence: there is no prompt and no response, only a mask. Advantages are the
orchestrator's to assign, and their type has changed between its versions, so none are written here. A rollout that may
not be trained on gives no sample.
"""

from __future__ import annotations

from typing import Any

from prorld.export.reading import Document, lists, trained_rows

__all__ = ["training_samples"]


def training_samples(document: Document, *, env_name: str | None = None) -> list[dict[str, Any]]:
    """Keyword arguments of ``TrainingSample``; ``env_name`` is the handler's where none is given."""
    document = lists(document)
    return [
        {
            "token_ids": row.token_ids,
            "mask": [False] * len(row.prompt_ids) + [bool(bit) for bit in row.response_mask],
            "logprobs": [0.0] * len(row.prompt_ids) + row.response_logprobs,
            "temperatures": [row.temperature] * len(row.token_ids),
            "env_name": document.job.handler if env_name is None else env_name,
            "reward": row.reward,
        }
        for row in trained_rows(document)
    ]
