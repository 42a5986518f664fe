"""``python -m prorld.testing.scripted_engine --port 0 --script FILE``: a scripted engine until standard input ends."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import msgspec
import trio

from prorld.testing.scripted_engine.routes import ScriptedServer
from prorld.testing.scripted_engine.script import Script, load_script
from prorld.testing.scripted_engine.serve import Serving, serve_scripted


def main() -> None:
    """Serve, and say where in one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m prorld.testing.scripted_engine", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 lets the system choose")
    parser.add_argument("--script", help="JSON file with the script; - reads one line from standard input")
    parser.add_argument("--stay", action="store_true", help="go on after the end of standard input")
    arguments = parser.parse_args()
    trio.run(partial(_run, arguments, _script(arguments.script)))


def _script(source: str | None) -> Script:
    if source == "-":
        # Not buffered: what follows is watched by file descriptor.
        with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as raw:
            return msgspec.json.decode(raw.readline(), type=Script)
    return load_script(None if source is None else Path(source))


async def _run(arguments: argparse.Namespace, script: Script) -> None:
    async with trio.open_nursery() as nursery:
        serve = partial(serve_scripted, ScriptedServer(script), host=arguments.host, port=arguments.port)
        serving: Serving = await nursery.start(serve)
        sys.stdout.write(json.dumps({"url": serving.url, "port": int(serving.url.rpartition(":")[2])}) + "\n")
        sys.stdout.flush()
        if not arguments.stay:
            await _stdin_ended()
            nursery.cancel_scope.cancel()


async def _stdin_ended() -> None:
    async with trio.lowlevel.FdStream(sys.stdin.fileno()) as stream:
        while await stream.receive_some(4096):
            pass


if __name__ == "__main__":
    main()
