"""The runner as one file: a zip that Python runs, made of the modules of ``prorld_code.guest``."""

from __future__ import annotations

import io
import zipfile
from importlib.resources import files

__all__ = ["make_bundle"]

_MAIN = "__main__.py"
# The zip format has no time before this one; the same modules make the same bytes.
_NO_TIME = (1980, 1, 1, 0, 0, 0)


def make_bundle() -> bytes:
    """The bytes of the zip."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as bundle:
        _put(bundle, "prorld_code/__init__.py", b"")
        for module in sorted(files("prorld_code.guest").iterdir(), key=lambda one: one.name):
            if module.name.endswith(".py"):
                place = module.name if module.name == _MAIN else f"prorld_code/guest/{module.name}"
                _put(bundle, place, module.read_bytes())
    return held.getvalue()


def _put(bundle: zipfile.ZipFile, name: str, data: bytes) -> None:
    bundle.writestr(zipfile.ZipInfo(name, _NO_TIME), data, zipfile.ZIP_DEFLATED)
