"""What a trainer imports: the typed client of the HTTP contract. Imports nothing of the daemon."""

from __future__ import annotations

from prorld.client.errors import ClientError
from prorld.client.groups import columns, usable
from prorld.client.sync import Client

__all__ = ["Client", "ClientError", "columns", "usable"]
