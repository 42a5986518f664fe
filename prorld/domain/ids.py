"""The identifiers of the service and what a client may choose as one."""

from __future__ import annotations

import re
from typing import NewType

SandboxId = NewType("SandboxId", str)

# What a client may choose: readable in a log line, safe in a URL path and a file name.
CLIENT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
# The end is said so that it means the end in every dialect: in Python's, `$` also matches before a last line feed.
CLIENT_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}(?![\s\S])"

# The tenant of the token that a daemon makes for its own admin.
ADMIN_TENANT = "default"
# The tenant of jobs that come by the listener for trainers of other servers, which asks for no token.
COMPAT_TENANT = "compat"


def is_client_id(text: str) -> bool:
    """Whether ``text`` may be chosen as an id."""
    return CLIENT_ID.fullmatch(text) is not None
