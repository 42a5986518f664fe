"""``python -m tests.tasks.engines FILE``: scripted engines by policy, all in one process, until standard input ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import trio

from prorld.testing.scripted_engine.routes import ScriptedServer
from prorld.testing.scripted_engine.script import Script
from prorld.testing.scripted_engine.serve import Serving, serve_scripted
from tests.daemon.support import environ

__all__ = ["scripted_engines"]


@contextmanager
def scripted_engines(place: Path, scripts: Mapping[str, Script]) -> Iterator[dict[str, str]]:
    """An engine for each script; yields their addresses under the same names."""
    file = place / "scripts.json"
    file.write_bytes(msgspec.json.encode(scripts))
    command = [sys.executable, "-m", "tests.tasks.engines", str(file)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environ(place), stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.kill()


async def _serve(scripts: Mapping[str, Script]) -> None:
    async with trio.open_nursery() as nursery:
        urls: dict[str, str] = {}
        for name, script in scripts.items():
            serving: Serving = await nursery.start(serve_scripted, ScriptedServer(script))
            urls[name] = serving.url
        sys.stdout.write(json.dumps(urls) + "\n")
        sys.stdout.flush()
        async with trio.lowlevel.FdStream(sys.stdin.fileno()) as stream:
            while await stream.receive_some(4096):
                pass
        nursery.cancel_scope.cancel("nobody is left to serve")


if __name__ == "__main__":
    trio.run(_serve, msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=dict[str, Script]))
