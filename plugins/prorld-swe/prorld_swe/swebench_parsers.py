"""The parsers of the swebench package, asked in a child that may be killed. Needs the extra ``prorld-swe[swebench]``.

Importing that package pulls in much that has no place in a daemon, so only the child does it.
"""

from __future__ import annotations

import importlib
from typing import Any

import msgspec

from prorld.handlers import run_grader

__all__ = ["LogPaper", "Statuses", "ask_swebench", "parse"]

PARSE_S = 120.0
MEMORY_BYTES = 4 << 30


class LogPaper(msgspec.Struct, frozen=True, kw_only=True):
    """A log and whose it is."""

    repo: str
    parser: str
    log: str


class Statuses(msgspec.Struct, frozen=True, kw_only=True):
    """By test, its status."""

    statuses: dict[str, str]


async def ask_swebench(repo: str, parser: str, log: str) -> dict[str, str]:
    """The statuses as the package reads them; ``GraderError`` where it is not installed or fails."""
    verdict = await run_grader(
        "prorld_swe.swebench_parsers:parse",
        LogPaper(repo=repo, parser=parser, log=log),
        Statuses,
        limit_s=PARSE_S,
        memory_bytes=MEMORY_BYTES,
    )
    return verdict.statuses


def parse(paper: LogPaper) -> Statuses:
    """In the child: find the parser and let it read the log."""
    found = _parser(paper)(paper.log, None)
    return Statuses(
        statuses={str(test): str(getattr(status, "value", status)).lower() for test, status in found.items()}
    )


def _parser(paper: LogPaper) -> Any:
    # Optional and heavy, and untyped.
    registry: dict[str, Any] = importlib.import_module("swebench.harness.log_parsers").PARSER_REGISTRY
    for name in (paper.parser, f"parse_log_{paper.parser}"):
        if name in registry:
            return registry[name]
    raise LookupError(f"swebench has no parser {paper.parser}")
