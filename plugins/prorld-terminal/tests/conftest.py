"""Real sandboxes for the tests of this plugin."""

from __future__ import annotations

from tests.sandbox.conftest import runtime, runtime_dir, warden

__all__ = ["runtime", "runtime_dir", "warden"]
