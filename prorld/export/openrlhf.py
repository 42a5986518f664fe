"""OpenRLHF: what ``AgentExecutor.execute`` returns, one for a rollout.

Its columns are over the whole sequence, with 0.0 where nothing was sampled. OpenRLHF has neither several rows for one
rollout nor a rollout without a reward: both are refused.
"""

from __future__ import annotations

from typing import Any

from prorld.export.reading import Document, NotExportable, cut_short, is_usable, lists, one_row, prompt_chat
from prorld.export.rows import Row, rows_of

__all__ = ["execution"]


def execution(
    document: Document, *, prompt: str | None = None, label: str | None = None, last_branch: bool = False
) -> dict[str, Any]:
    """The answer of ``execute``, with the prompt and label that it was given; without a prompt, the text of ours.

    Refused with ``not_usable`` where training may not use the rollout, and with ``several_branches`` for a fork, unless
    ``last_branch`` lets the one sampled from last stand for it.
    """
    document = lists(document)
    if not is_usable(document):
        raise NotExportable(
            f"job {document.job.job_id} ended as {document.outcome.kind} and may not be trained on", code="not_usable"
        )
    row = one_row(document, rows_of(document), form="OpenRLHF", last=last_branch)
    parts = {f"reward_{name}": value for name, value in document.job.reward_parts.items()}
    return {
        "prompt": "\n".join(said["content"] for said in prompt_chat(document, row)) if prompt is None else prompt,
        "label": label,
        "images": None,
        "reward": row.reward,
        # What OpenRLHF's dynamic filter looks at; it wants a number from 0 to 1 there.
        "scores": row.reward,
        "observation_tokens": row.token_ids,
        "action_ranges": _ranges(row),
        "rollout_log_probs": [0.0] * len(row.prompt_ids) + row.response_logprobs,
        "truncated": cut_short(document, row),
        "extra_logs": {"turns": document.job.turns, **parts},
    }


def _ranges(row: Row) -> list[tuple[int, int]]:
    """The runs of sampled tokens, as half-open ranges over the whole sequence."""
    mask = [*([0] * len(row.prompt_ids)), *row.response_mask]
    starts = [n for n, bit in enumerate(mask) if bit and not (n and mask[n - 1])]
    ends = [n + 1 for n, bit in enumerate(mask) if bit and (n + 1 == len(mask) or not mask[n + 1])]
    return list(zip(starts, ends, strict=True))
