"""Real sandboxes for tools, made as those of the sandboxes' own tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from prorld.sandbox.contract import Sandbox, SandboxSpec
from prorld.sandbox.runtime import Runtime
from prorld.testing.sandbox_contract import open_sandbox
from tests.sandbox.conftest import runtime, runtime_dir, warden

__all__ = ["runtime", "runtime_dir", "sandbox", "warden"]


@pytest.fixture
async def sandbox(runtime: Runtime) -> AsyncIterator[Sandbox]:
    """One real sandbox. Its directory has a name of its own: below a common one there may be parts of the host."""
    async with open_sandbox(runtime, SandboxSpec(workdir="/task")) as opened:
        yield opened
