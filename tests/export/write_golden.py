"""Writes the golden files anew: ``python -m tests.export.write_golden``. What changed is for a reader to judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prorld.export.formats import export
from prorld.export.names import FORMATS, Format
from prorld.export.reading import NotExportable
from prorld.wire.codec import encode
from tests.export.documents import ALL

GOLDEN = Path(__file__).parent / "golden"


def exported(name: str, form: Format) -> Any:
    """The rows of a document as JSON has them, or why there are none."""
    try:
        return json.loads(encode(export(ALL[name](), form)))
    except NotExportable as exc:
        return {"refused": exc.stable_code}


def text(form: Format) -> str:
    """A golden file: a row a line, so that a difference is read as one."""
    parts: list[str] = []
    for name in ALL:
        found = exported(name, form)
        if isinstance(found, dict) or not found:
            parts.append(f"  {json.dumps(name)}: {json.dumps(found)}")
            continue
        rows = ",\n".join(f"    {json.dumps(row, sort_keys=True)}" for row in found)
        parts.append(f"  {json.dumps(name)}: [\n{rows}\n  ]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for form in FORMATS:
        (GOLDEN / f"{form}.json").write_text(text(form))
