"""Which unprivileged user sandboxes run as when the daemon is root."""

from __future__ import annotations

import os
from pwd import getpwnam, getpwuid

from prorld.errors import ConfigError

__all__ = ["sandbox_user"]


def sandbox_user(name: str, *, uid: int | None = None) -> tuple[int, int] | None:
    """User and group ids of the account ``name`` (or its number); ``None`` where the daemon is no root itself."""
    if (os.getuid() if uid is None else uid) != 0:
        return None
    try:
        found = getpwuid(int(name)) if name.isdecimal() else getpwnam(name)
    except (KeyError, OverflowError):
        raise ConfigError(f"sandbox.user: there is no user {name} on this machine") from None
    if found.pw_uid == 0:
        raise ConfigError(f"sandbox.user: {name} is root, and a sandbox never runs as root")
    return found.pw_uid, found.pw_gid
