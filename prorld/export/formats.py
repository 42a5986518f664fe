"""The formats by name, each as the rows of one document that JSON can say: what HTTP and the command line offer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prorld.export import (
    areal,
    atif,
    atropos,
    chat,
    nemo_rl,
    openrlhf,
    prime_rl,
    skyrl,
    slime,
    trl,
    verl,
)
from prorld.export.names import Format
from prorld.export.reading import Document, is_usable

__all__ = ["export"]

Rows = list[dict[str, Any]]


def _trl(document: Document) -> Rows:
    """The row of a ``rollout_func``; what never sampled has none."""
    if not any(any(branch.mask) for branch in document.branches):
        return []
    return [{name: column[0] for name, column in trl.rollout([document]).items()}]


def _skyrl(document: Document) -> Rows:
    """The rows of step-wise training."""
    if not is_usable(document):
        return []
    output = skyrl.generator_output([document], step_wise=True)
    return [{name: output[name][n] for name in skyrl.COLUMNS} for n in range(len(output["response_ids"]))]


def _openrlhf(document: Document) -> Rows:
    return [openrlhf.execution(document)] if is_usable(document) else []


def _areal(document: Document) -> Rows:
    found = areal.episode(document)
    return [] if found is None else [found]


_EXPORTERS: Mapping[Format, Callable[[Document], Rows]] = {
    "verl": verl.agent_loop_outputs,
    "slime": slime.samples,
    "trl": _trl,
    "nemo_rl": nemo_rl.run_answers,
    "skyrl": _skyrl,
    "openrlhf": _openrlhf,
    "prime_rl": prime_rl.training_samples,
    "areal": _areal,
    "atropos": atropos.scored_items,
    "atif": atif.trajectories,
    "chat": chat.lines,
}


def export(document: Document, form: Format) -> Rows:
    """The rows of one document. ``NotExportable`` where the format has no honest place for it."""
    return _EXPORTERS[form](document)
