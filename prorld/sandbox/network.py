"""Which networks a sandbox may have: none, one Unix socket of the daemon, or the host's own."""

from __future__ import annotations

from pathlib import Path

import msgspec

from prorld.errors import SandboxError
from prorld.sandbox.contract import Network

__all__ = ["SOCKET_DIR", "SOCKET_NAME", "NetworkRules"]

SOCKET_DIR = "/run/prorld"  # in the sandbox
SOCKET_NAME = "daemon.sock"


class NetworkRules(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator allows. ``socket_dir`` holds the daemon's socket and nothing else."""

    socket_dir: Path | None = None
    host: bool = False

    def check(self, network: Network) -> None:
        """Raise ``SandboxError`` for what is not to be had here."""
        if network == "host" and not self.host:
            words = "the host's network is not given to sandboxes here: sandbox.host_network allows it"
            raise SandboxError(words, code="network_refused", retryable=False)
        if network == "daemon" and self.socket_dir is None:
            words = "this daemon has no socket for sandboxes: sandbox.socket_dir names its directory"
            raise SandboxError(words, code="network_refused", retryable=False)

    def directory(self, network: Network) -> str | None:
        """The directory of the host that shows in the sandbox."""
        return str(self.socket_dir) if network == "daemon" else None

    def environment(self, network: Network) -> dict[str, str]:
        """How programs find the socket."""
        return {"PRORLD_SOCKET": f"{SOCKET_DIR}/{SOCKET_NAME}"} if network == "daemon" else {}
