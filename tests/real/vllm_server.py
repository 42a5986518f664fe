"""A real vLLM server for the length of a block: in a process group of its own, ready within a bound, gone for sure.

A shell stands between: it kills the whole group when the server has ended, and when its input ends, so that nothing is
left of the server even where these tests are killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

READY_SECONDS_MAX = 400.0
TERM_SECONDS_MAX = 15.0
KILL_SECONDS_MAX = 10.0
CONTEXT_TOKENS = 1024
LAST_WORDS = 3000

GUARD = '("$@"; kill -KILL 0) & cat >/dev/null; kill -KILL 0'
# Sizes for a small machine that is not ours alone; the prefill in pieces is what a seed does not survive.
FLAGS = ("--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", "16", "--max-num-batched-tokens", "512")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
KEPT = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "CUDA_VISIBLE_DEVICES")


class VllmServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server that is ready, and how it was started."""

    url: str
    model: Path
    scale_out: bool
    pid: int
    ready_s: float


@contextmanager
def vllm_server(
    python: str, model: Path, folder: Path, *, scale_out: bool, more: Sequence[str] = ()
) -> Iterator[VllmServer]:
    """With ``scale_out`` the token endpoint and the control routes are open. Fails if it does not start.

    ``more`` comes last, so it wins.
    """
    port = _free_port()
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--served-model-name", "smollm2", "--enforce-eager", *FLAGS]
    environment = {**{name: os.environ[name] for name in KEPT if name in os.environ}, **ENVIRONMENT}
    if scale_out:
        argv.append("--enable-scale-out")
        environment["VLLM_SERVER_DEV_MODE"] = "1"
    argv += more
    log = folder / f"vllm-{port}.log"
    began = time.monotonic()
    # It leaves the sockets of its processes behind; their paths have to be short.
    with tempfile.TemporaryDirectory(prefix="vllm-", dir="/tmp") as sockets, log.open("wb") as output:
        environment["VLLM_RPC_BASE_PATH"] = sockets
        with guarded(argv, environment, output.fileno()) as process:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(process, url, log)
            ready_s = time.monotonic() - began
            assert any(Path(sockets).iterdir()), "vLLM has its sockets elsewhere: is the variable another one now?"
            yield VllmServer(url=url, model=model, scale_out=scale_out, pid=process.pid, ready_s=ready_s)


@contextmanager
def guarded(argv: Sequence[str], environment: Mapping[str, str], output: int) -> Iterator[subprocess.Popen[bytes]]:
    """A program in a process group of its own, all of which is gone when the block is left, or this process dies."""
    command = ["nice", "-n", "5", "sh", "-c", GUARD, "sh", *argv]
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        yield process
    finally:
        for number, seconds in ((signal.SIGTERM, TERM_SECONDS_MAX), (signal.SIGKILL, KILL_SECONDS_MAX)):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            until = time.monotonic() + seconds
            while has_group(process.pid) and time.monotonic() < until:
                process.poll()
                time.sleep(0.05)
        process.stdin.close()
        process.wait(KILL_SECONDS_MAX)
        assert not has_group(process.pid), "the server outlived SIGKILL"


def has_group(pid: int) -> bool:
    """Whether anything of a process group is there."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + READY_SECONDS_MAX
    while not _answers(f"{url}/health"):
        said = log.read_text(errors="replace")[-LAST_WORDS:]
        assert process.poll() is None, f"the server ended while it was starting; it said: {said}"
        assert time.monotonic() < until, f"the server was not ready within {READY_SECONDS_MAX:g} s; it said: {said}"
        time.sleep(0.2)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
