"""What a trainer imports: the typed client of the HTTP contract. Imports nothing of the daemon, and no event loop.

With it come the types of what its methods are given; those of what they return are in ``prorld.wire``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prorld.client.errors import ClientError, UpdateFailed
from prorld.client.groups import columns, usable
from prorld.client.sync import Client
from prorld.domain.group import Informative, Quorum
from prorld.domain.job import AgentLimits, Sampling, StageTimeouts
from prorld.wire.batches import SubmitBatch
from prorld.wire.jobs import SubmitJob
from prorld.wire.ops import AddBackend, SetBackend, SetBackends, StagePatch, StagesPatch
from prorld.wire.policies import PutPolicy

if TYPE_CHECKING:
    from prorld.client.aio import AsyncClient

__all__ = [
    "AddBackend",
    "AgentLimits",
    "AsyncClient",
    "Client",
    "ClientError",
    "Informative",
    "PutPolicy",
    "Quorum",
    "Sampling",
    "SetBackend",
    "SetBackends",
    "StagePatch",
    "StageTimeouts",
    "StagesPatch",
    "SubmitBatch",
    "SubmitJob",
    "UpdateFailed",
    "columns",
    "usable",
]


def __getattr__(name: str) -> Any:
    """``AsyncClient`` is imported when it is used: it needs anyio and h11."""
    if name == "AsyncClient":
        from prorld.client.aio import AsyncClient  # noqa: PLC0415 - as it says

        return AsyncClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
