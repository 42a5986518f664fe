"""What a trainer imports: the typed client of the HTTP contract. Imports nothing of the daemon, and no event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prorld.client.errors import ClientError, UpdateFailed
from prorld.client.groups import columns, usable
from prorld.client.sync import Client

if TYPE_CHECKING:
    from prorld.client.aio import AsyncClient

__all__ = ["AsyncClient", "Client", "ClientError", "UpdateFailed", "columns", "usable"]


def __getattr__(name: str) -> Any:
    """``AsyncClient`` is imported when it is used: it needs anyio and h11."""
    if name == "AsyncClient":
        from prorld.client.aio import AsyncClient  # noqa: PLC0415 - as it says

        return AsyncClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
