"""The process that the embedded engine runs in: llama.cpp's server on a port of loopback.

It runs alone with the engine's package and the standard library. It says one line of JSON on standard output, where it
listens or why it can't, and then serves until it is killed or the daemon has gone.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import stat
import sys
from importlib import import_module
from typing import Any, NoReturn

# Requests that wait for a slot hold a thread each; the client never opens as many, so health checks always get one.
HTTP_THREADS = 80

# Saved prefixes of prompts that lost their slot. The engine's own bound is 8 GiB.
PREFIX_CACHE_MIB = 512

MAGIC = b"GGUF"

# The engine lets any web page read its answers unless it is told of one that may. There is none.
NOBODY = "http://nobody.invalid"


def main() -> NoReturn:
    """Serve what the first argument, a JSON object, asks for."""
    wish: dict[str, Any] = json.loads(sys.argv[1])
    _end_with(int(os.environ["LIFELINE_FD"]))
    try:
        server, sealed = _serve(wish)
    except Exception as exc:  # noqa: BLE001 - whatever it is, the daemon is to hear of it in words
        _say({"error": f"{type(exc).__name__}: {exc}"})
        sys.exit(1)
    _say({"url": server.listening_address, "seal": sealed})
    while True:
        signal.pause()


def _end_with(lifeline: int) -> None:
    """Let the kernel end this process when the other end of the lifeline closes, whatever it is busy with.

    The default of SIGIO is to terminate, and the pipe raises it when its writer is gone. A thread that reads the pipe
    would have to wait for a model that is loading.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    # Gone already, before the signal was asked for.
    if select.select([lifeline], [], [], 0)[0]:
        sys.exit(1)


def _serve(wish: dict[str, Any]) -> tuple[Any, str | None]:
    """The server that answers, and the seal of the weights that it was given."""
    # Not at the top: it takes long, and the lifeline comes first.
    xllamacpp = import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = wish["model"]
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel = wish["slots"]
    params.n_ctx = wish["slots"] * wish["context_per_slot"]
    params.ctx_shift = False
    params.n_threads_http = HTTP_THREADS
    params.cache_ram_mib = PREFIX_CACHE_MIB
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.ui = False
    params.cors_origins = NOBODY
    params.cpuparams.n_threads = wish["threads"]
    params.cpuparams_batch.n_threads = wish["threads"]
    weights = None if wish["weights"] is None else _Named(wish["weights"])
    if weights is not None:
        # Called after the model whose tokenizer counts.
        params.model_alias = {params.model.path}
        params.model.path = weights.place
        # A trainer may remove its file or write over it; what is mapped would change under the engine, or end it.
        params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_NONE
    adapter = None if wish["adapter"] is None else _Named(wish["adapter"])
    if adapter is not None:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(adapter.place, 1.0)]
    server = xllamacpp.Server(params)
    for named in (weights, adapter):
        if named is not None:
            named.close()
    return server, None if weights is None else weights.seal


class _Named:
    """A file that somebody has named, open while the engine reads it."""

    def __init__(self, file: dict[str, Any]) -> None:
        self._path = file["path"]
        self._fd = _opened(file)
        # By its descriptor, so that what is read is what was looked at, also where the name is of another file by now.
        self.place = f"/proc/self/fd/{self._fd}"
        self.seal = seal(os.fstat(self._fd))

    def close(self) -> None:
        """It has been read; raises where it is not what it was before."""
        if seal(os.fstat(self._fd)) != self.seal:
            raise ValueError(f"{self._path} was changed while it was read")
        os.close(self._fd)


def seal(found: os.stat_result) -> str:
    """What changes when a file becomes another one, or its content does."""
    return f"{found.st_ino:x}.{found.st_size:x}.{found.st_mtime_ns:x}"


def _opened(file: dict[str, Any]) -> int:
    """The descriptor of a file that somebody has named, once it is known to be what it should."""
    path = file["path"]
    # A pipe without a writer would never open.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is not a regular file; this engine loads GGUF files")
    if found.st_size > file["bytes_max"]:
        raise ValueError(f"{path} has {found.st_size} bytes; engine.weights_bytes_max is {file['bytes_max']}")
    if os.pread(fd, len(MAGIC), 0) != MAGIC:
        raise ValueError(f"{path} is not a GGUF file")
    if file["seal"] not in (None, seal(found)):
        raise ValueError(f"{path} is not what it was when it was named: it has been written anew since")
    return fd


def _say(line: dict[str, str | None]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
