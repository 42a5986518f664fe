"""What clients of engines have in common: an address and the sockets to it."""

from __future__ import annotations

from prorld.inference.engine_http import EngineHttp
from prorld.inference.uncontrolled import Uncontrolled
from prorld.kit.http_client import ClientStatistics

__all__ = ["CONTEXT_TOKENS_UNKNOWN", "HttpBackend"]

# Of an engine that does not say how long its context is. Longer than any; the job's own bound holds.
CONTEXT_TOKENS_UNKNOWN = 2**24


class HttpBackend(Uncontrolled):
    """A client over one ``EngineHttp``, which it closes."""

    def __init__(self, http: EngineHttp) -> None:
        super().__init__()
        self._http = http

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    @property
    def url(self) -> str:
        """Where the engine is."""
        return self._http.url

    def statistics(self) -> ClientStatistics:
        """The sockets of the calls to this engine."""
        return self._http.statistics()

    async def aclose(self) -> None:
        """Close pooled sockets."""
        await self._http.aclose()
